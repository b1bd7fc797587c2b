"""The events that a reader of a generation receives: one for each token, and at the end the reason why the text
ended.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a text ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    DEADLINE = "deadline"  # the request's time ran out


class Token(NamedTuple):
    id: int
    # The text that this token adds; "" while a character is incomplete. The last token of a request also carries the
    # text that was held back until then.
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """Facts about a request that has ended. Durations in seconds."""

    reason: FinishReason
    generated_text: str  # the text without special tokens
    generated_tokens: int  # number of tokens, including the end-of-text token
    seed: int | None  # None if the request was greedy
    queue_s: float  # seconds from submission until the first step was decided
    inference_s: float  # seconds from the first step to the last token
    cached_tokens: int  # number of prompt tokens found in the prefix cache at the first start
    stop: str | None = None  # the stop string that ended a text which is cut off before it

    @property
    def mean_token_s(self) -> float:
        return self.inference_s / max(self.generated_tokens, 1)


class Part(NamedTuple):
    """A part of a text that is divided into pieces (pieces.py)."""

    text: str
    special: bool  # whether it is the text of a special token, and no text that ordinary tokens spell


class TokenEvent(NamedTuple):
    """The event of one generated token. The last event of a request has `finish`. It has no token if the reason is
    DEADLINE, or if no token was wanted.
    """

    token: Token | None
    # The text that the event adds to the generated text: the token's text. Without a token, or with a special token:
    # the text that was held back before.
    text: str
    top_tokens: tuple[Token, ...] = ()
    finish: Finish | None = None
    parts: tuple[Part, ...] = ()  # the parts of `text`, if the text has markers (`TextRules`)
