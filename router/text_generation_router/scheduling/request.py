"""Values that pass between api, text, scheduling and engine: what a request asks for, and the events it gets."""

from dataclasses import dataclass, field
from enum import StrEnum

from text_generation_common.sampling import Sampling
from text_generation_router.scheduling.share import Share

Namespace = tuple[str, ...]


class FinishReason(StrEnum):
    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    DEADLINE = "deadline"  # the request's time ran out


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
