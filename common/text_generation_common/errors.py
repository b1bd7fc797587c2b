"""The errors that end a command and that several packages raise. The launcher's errors have the root CommandError, the
shard's have the root ShardError.

CommandError                      ShardError
├── ArgumentValidation            ├── ModelError
├── AddressInUse                  ├── WeightsError
└── … of the launcher             └── … of the shard
"""

import json


class CommandError(Exception):
    """Base of errors that end a command. Its text is printed as TGI prints it: the name of the class, and the reason in
    quotes if there is a reason.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({json.dumps(self.reason, ensure_ascii=False)})" if self.reason else kind


class ArgumentValidation(CommandError):
    """A flag or a combination of flags is wrong or not supported."""


class AddressInUse(CommandError):
    """The API port or the place of the shards' sockets is in use, belongs to another user, or cannot be made."""


class ShardError(Exception):
    """An error that the user can correct. The text is one line: what is wrong, why, and what to do. The launcher meets
    a part of these errors before it starts a shard."""


class ModelError(ShardError):
    """config.json describes a model that is not supported, or does not describe one."""


class WeightsError(ShardError):
    """Weights, or the files beside them, are missing, broken, refused, or could not be fetched."""
