"""The events that a reader of a generation receives: one for each token, and at the end the reason why the text ended;
and the rows of the prompt.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, overload

from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.text.tokens.detokenization import TextStream, Vocabulary


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
    adapter: str = ""  # the name of the request's LoRA adapter

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


# The tokens of a prompt with their log-probabilities, as rows like those of an answer. Rows are made when they are
# read, so that a long prompt does not keep the event loop from other work.

# A token, and the most likely tokens in its place.
PromptRow = tuple[Token, tuple[Token, ...]]


class PromptRows(Sequence[PromptRow]):
    """A row for each token of a prompt. The log-probability of the first token, which follows nothing, is NaN, and it
    has no most likely tokens. The texts of all rows joined are the prompt's text, special tokens included.
    """

    def __init__(self, vocabulary: Vocabulary, ids: Sequence[int], logprobs: PromptLogprobs) -> None:
        """`logprobs`: of all ids but the first."""
        assert len(logprobs) == len(ids) - 1, "a prompt's log-probabilities are not complete"
        self._vocabulary = vocabulary
        self._ids = ids
        self._logprobs = logprobs
        self._stream = TextStream(vocabulary, (), ())
        self._texts: list[str] = []  # texts of the first tokens, as many as were read

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, at: int) -> PromptRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[PromptRow]: ...
    def __getitem__(self, at: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(at, slice):
            return [self._row(i) for i in range(*at.indices(len(self)))]
        return self._row(range(len(self))[at])

    def _row(self, i: int) -> PromptRow:
        while len(self._texts) <= i:
            self._texts.append(self._stream.push(self._ids[len(self._texts)]).shown)
        return self._token(self._ids[i], self._texts[i], self._logprob(i)), tuple(self._tops(i))

    def _logprob(self, i: int) -> float:
        return float(self._logprobs.logprobs_P[i - 1]) if i else math.nan

    def _tops(self, i: int) -> Iterator[Token]:
        if i:
            values = self._logprobs
            tops = zip(values.top_ids_PK[i - 1].tolist(), values.top_logprobs_PK[i - 1].tolist(), strict=True)
            for token_id, logprob in tops:
                yield self._token(token_id, self._vocabulary.text_of(token_id), logprob)

    def _token(self, token_id: int, text: str, logprob: float) -> Token:
        return Token(token_id, text, logprob, token_id in self._vocabulary.special_ids)

    def text_alone(self, row: PromptRow) -> str:
        """The text of the row's token by itself, as TGI lists it: it may lack the space before a word."""
        return self._vocabulary.text_of(row[0].id)
