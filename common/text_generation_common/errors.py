"""The errors that end a command and that several packages raise. The launcher's errors have the root CommandError, the
shard's have the root ShardError.

CommandError                      ShardError
├── ArgumentValidation            ├── ModelError
│   └── WrongUsage                │
├── AddressInUse                  ├── WeightsError
├── CredentialsError              ├── MemoryLimitError
└── … of the launcher             └── … of the shard
"""

INTERRUPTED = 130  # exit status after Ctrl-C: 128 + SIGINT, as shells have it


def first_line(error: BaseException) -> str:
    """The first line of a library's error, or the name of its class if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class CommandError(Exception):
    """Base of errors that end a command. `reason` is one line: what is wrong and why. `hint` says what to do; without
    it, `reason` may end in what to do, after a colon. `report.py` prints both.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class ArgumentValidation(CommandError):
    """A flag or a combination of flags is wrong or not supported."""


class WrongUsage(ArgumentValidation):
    """A number that no server could use, such as 0 for a limit. The command ends with the status of wrong usage."""


class AddressInUse(CommandError):
    """The API port or the place of the shards' sockets is in use, belongs to another user, or cannot be made."""


class CredentialsError(CommandError):
    """A certificate or key is missing, expired, unreadable, for another role, or does not fit; or a port that needs
    certificates has none."""


class ShardError(Exception):
    """An error that the user can correct. The text is one line: what is wrong, why, and what to do. The launcher meets
    a part of these errors before it starts a shard."""


class ModelError(ShardError):
    """config.json describes a model that is not supported, or does not describe one."""


class UnsupportedOption(ModelError):
    """A model of a native type has an option that the server's own decoder lacks. transformers may compute it."""

    def __init__(self, text: str, option: str) -> None:
        super().__init__(text)
        self.option = option  # the field of config.json


class WeightsError(ShardError):
    """Weights, or the files beside them, are missing, broken, refused, or could not be fetched."""


class MemoryLimitError(ShardError):
    """The KV cache that the user asked for, or the largest step, does not fit into memory."""


# Why a single request of a step fails, in words for its client. The other requests of the step go on.
NOT_FINITE = "the model's logits for it are not finite (NaN or infinity)"
NO_TOKEN = "grammar, allowed_token_ids, bad_words and min_new_tokens together exclude every token that could come next"
# The request's own grammar is the cause. More words may follow.
NOT_COMPILED = "the grammar cannot be compiled"
TOO_COMPLEX = "the grammar is too complex"
LOST = "the grammar cannot be followed any further"  # for example, a token needs more work than llguidance may do
DEAD_END = "the grammar allows no token after the text so far"
GRAMMAR_FAULTS = (NOT_COMPILED, TOO_COMPLEX, LOST, DEAD_END)
# The server's state is the cause: the request may be sent again.
GRAMMARS_WAIT = "too many grammars wait to be compiled"
