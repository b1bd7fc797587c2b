"""One generation, from its start to its result: its permit, its tokens, its times and metrics."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from text_generation_router.api.common.generation_stream import Encode, GenerationStream
from text_generation_router.api.common.permits import Permit
from text_generation_router.http.request_log import RequestEnd, request_end
from text_generation_router.http.sse import DirectWriter
from text_generation_router.metrics.key_usage import KeyUsage, key_usage
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.tracing import GenerationSummary, GenerationTrace
from text_generation_router.text.tokens.events import Finish, PromptRows, Token, TokenEvent
from text_generation_router.text.tokens.pieces import Piece, PieceReader, Reasoning, Text, merged, read

logger = logging.getLogger(__name__)

# A token, and the most likely tokens at its position in the text.
Row = tuple[Token, tuple[Token, ...]]


@dataclass(slots=True)
class Generation:
    """A generation in progress, and then its result. Holds a permit until it has finished or `close` is called; its
    owner must always call `close`."""

    stream: GenerationStream
    permit: Permit
    metrics: Metrics
    prompt_tokens: int
    prompt_characters: int
    started_s: float  # time.perf_counter when the HTTP request was received
    is_answer: bool = True  # False: the text only helps to make the answer's prompt; it is neither counted nor logged
    input_ids: tuple[int, ...] = ()  # token ids of the prompt, if the answer repeats them
    reader: PieceReader | None = None  # None: the text is not divided into pieces
    reasoning_tokens: int = 0  # number of reasoning tokens until now
    # time.perf_counter when the engine has accepted the request
    queued_s: float = field(default_factory=time.perf_counter)
    total_s: float = 0.0  # seconds from `started_s` until the generation had finished
    # The results of `collect`.
    tokens: tuple[Token, ...] = ()
    top_tokens: tuple[tuple[Token, ...], ...] = ()
    pieces: tuple[Piece, ...] = ()  # pieces of the whole text, if it is divided; neighbours of one kind are one piece
    event_pieces: tuple[Sequence[Piece], ...] = ()  # if it is divided: pieces that each token adds, then the end
    trace: GenerationTrace | None = None  # None: requests are not traced
    end: RequestEnd | None = field(default_factory=request_end.get)  # collects how the HTTP request ends
    usage: KeyUsage | None = field(default_factory=key_usage.get)  # counts tokens for the request's API key
    _finish: Finish | None = None  # None until the generation has finished
    _through: tuple[DirectWriter, Encode] | None = None
    _has_begun: bool = False
    _is_closed: bool = False
    _is_reasoning: bool = False  # whether the newest piece is reasoning

    def __aiter__(self) -> Self:
        return self

    def write_through(self, writer: DirectWriter, encode: Encode) -> None:
        """Sends events to `writer`, as GenerationStream.write_through does. The first event goes to the reader."""
        self._through = writer, encode

    async def __anext__(self) -> TokenEvent:
        event = await self.stream.__anext__()
        if not self._has_begun:
            self._has_begun = True
            if self.is_answer:
                self.metrics.time_to_first_token.observe(time.perf_counter() - self.started_s)
            if self._through is not None:
                self.stream.write_through(*self._through)
        if event.finish is not None:
            self._note_finish(event.finish)
        return event

    @property
    def prompt(self) -> PromptRows | None:
        """The prompt's tokens with their log-probabilities, if these were asked for. Set before the first event."""
        return self.stream.prompt

    @property
    def cached_tokens(self) -> int:
        """Number of the prompt's tokens that the prefix cache had. Set before the first event."""
        return self.stream.cached_tokens

    @property
    def finish(self) -> Finish:
        """The reason of the end, and the numbers of tokens."""
        assert self._finish is not None, "it is in progress"
        return self._finish

    @property
    def adapter(self) -> str:
        """The name of the text's LoRA adapter; "": none."""
        return self.stream.request.adapter_name

    @property
    def validation_s(self) -> float:
        return self.queued_s - self.started_s

    @property
    def rows(self) -> list[Row]:
        return list(zip(self.tokens, self.top_tokens, strict=True))

    @property
    def mean_logprob(self) -> float:
        return sum(float(token.logprob) for token in self.tokens) / max(len(self.tokens), 1)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.stream.cancel()
            self._count_usage()
            self.permit.give_back(1)
            if self.end is not None:
                self.end.num_tokens += self.stream.num_tokens
                self.end.adapter = self.adapter
            if self.trace is not None:
                self.trace.end(self._summary())

    def _count_usage(self) -> None:
        """Counts the text for the API key and the adapter. A text that was cancelled or has failed counts too, if it
        has a token."""
        if self.is_answer and (self.stream.num_tokens or self._finish is not None):
            self.metrics.adapters.count_text(self.adapter, self.prompt_tokens, self.stream.num_tokens)
            if self.usage is not None:
                self.usage.count_text(self.prompt_tokens, self.stream.cached_tokens, self.stream.num_tokens)

    def _summary(self) -> GenerationSummary:
        stream, finish, now = self.stream, self._finish, time.perf_counter()
        end, failure = stream.end, None if finish is not None else stream.failure or "dropped"
        queue_s, inference_s, replays = (
            (end.queue_s, end.inference_s, end.replays) if end is not None else (None, 0.0, ())
        )
        if finish is not None:
            queue_s, inference_s = finish.queue_s, finish.inference_s
        return GenerationSummary(
            started_s=self.started_s,
            queued_s=self.queued_s,
            ended_s=now,
            queue_s=queue_s,
            first_token_s=stream.first_token_s,
            last_token_s=inference_s,
            replays=replays,
            failure=failure,
            finish_reason=finish.reason.value if finish is not None else None,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=stream.num_tokens,
            cached_tokens=finish.cached_tokens if finish is not None else 0,
            seed=finish.seed if finish is not None else None,
        )

    def _note_finish(self, finish: Finish) -> None:
        self._finish = finish
        self.close()
        self.total_s = time.perf_counter() - self.started_s
        if self.is_answer:
            self._count_success(finish)
            self._log_success(finish)
            if self.end is not None:
                self.end.num_successes += 1

    def _count_success(self, finish: Finish) -> None:
        self.metrics.request_success.inc()
        self.metrics.request_duration.observe(self.total_s)
        self.metrics.request_validation_duration.observe(self.validation_s)
        self.metrics.request_queue_duration.observe(finish.queue_s)
        self.metrics.request_inference_duration.observe(finish.inference_s)
        self.metrics.request_mean_time_per_token_duration.observe(finish.mean_token_s)
        self.metrics.request_generated_tokens.observe(finish.generated_tokens)

    def _log_success(self, finish: Finish) -> None:
        """Logs the end of a generation: numbers only, no text of a prompt or an answer."""
        times = {
            "total_time": self.total_s,
            "validation_time": self.validation_s,
            "queue_time": finish.queue_s,
            "inference_time": finish.inference_s,
            "time_per_token": finish.mean_token_s,
        }
        fields = {
            **{name: f"{seconds:.6f}s" for name, seconds in times.items()},
            **{f"{name}_s": round(seconds, 6) for name, seconds in times.items()},
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": finish.generated_tokens,
            "seed": finish.seed,
            "route": self.end.route if self.end is not None else "",
            "finish_reason": finish.reason.value,
            **({"adapter": self.adapter} if self.adapter else {}),
        }
        logger.info("Success", extra={"fields": fields})

    @property
    def is_divided(self) -> bool:
        return self.reader is not None

    def pieces_of(self, event: TokenEvent) -> Sequence[Piece]:
        """The pieces that an event adds to the text. To be called once for each event, in order."""
        if self.reader is None:
            return (Text(event.text),) if event.text else ()
        pieces = read(self.reader, event)
        reasons = any(isinstance(piece, Reasoning) for piece in pieces) or (self._is_reasoning and not pieces)
        self.reasoning_tokens += reasons and event.token is not None
        self._is_reasoning = isinstance(pieces[-1], Reasoning) if pieces else self._is_reasoning
        return pieces

    @property
    def pieces_of_text(self) -> Sequence[Piece]:
        """The pieces of the whole text, which is one piece if it is not divided."""
        if self.is_divided:
            return self.pieces
        text = self.finish.generated_text
        return (Text(text),) if text else ()

    async def collect(self) -> Self:
        """Reads the generation to its end."""
        tokens, top_tokens = [], []
        event_pieces: list[Sequence[Piece]] = []
        async for event in self:
            if event.token is not None:
                tokens.append(event.token)
                top_tokens.append(event.top_tokens)
            if self.is_divided:
                event_pieces.append(self.pieces_of(event))
        self.tokens, self.top_tokens, self.event_pieces = tuple(tokens), tuple(top_tokens), tuple(event_pieces)
        self.pieces = merged(chain.from_iterable(event_pieces))
        return self


def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()
