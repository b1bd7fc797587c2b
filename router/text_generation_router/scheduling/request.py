"""Values that pass between api, text, scheduling and engine: what a request asks for, and the events it gets."""

from dataclasses import dataclass, field
from enum import StrEnum

from text_generation_router.scheduling.share import Share

Namespace = tuple[str, ...]


class FinishReason(StrEnum):
    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    DEADLINE = "deadline"  # the request's time ran out


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults are neutral: the most likely token."""

    temperature: float = 1.0
    top_k: int = 0  # tokens; 0: off
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0  # noise is a hash of (seed, position, token); always set
    repetition_penalty: float = 1.0  # counts tokens of prompt and output
    frequency_penalty: float = 0.0  # counts output tokens only
    watermark: bool = False
    top_n_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """As in TGI: asking for any warper asks for sampling."""
        return not (
            self.do_sample or self.temperature != 1.0 or self.top_k or self.top_p != 1.0 or self.typical_p != 1.0
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that has been validated and tokenized. `len(input_ids) + max_new_tokens` fits the server's limits."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    share: Share = field(default_factory=Share)  # the share of the server that the request is charged to
    priority: int = 0  # lower goes first, as in vLLM
    namespace: Namespace = ()  # prompts of different namespaces share no cached prefix
    timeout_s: float | None = None  # seconds from submission until the engine ends the request


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    # Text this token adds; "" while a character is incomplete. The last token of a request carries the text that was
    # held back.
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """What is known when a request ends. Durations in seconds."""

    reason: FinishReason
    generated_text: str  # without special tokens
    generated_tokens: int  # including the end-of-text token
    seed: int | None  # None if the request was greedy
    queue_s: float  # from submission until the first step was decided
    inference_s: float  # from the first step to the last token
    cached_tokens: int  # prompt tokens found in the prefix cache at the first start


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. The last event of a request has `finish`, and no token if the reason is DEADLINE."""

    token: Token | None
    # What the event adds to the generated text: the text of the token. Without a token, or with a special token, the
    # text that was held back before.
    text: str
    top_tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
