"""One request's stream of events: the sink that the engine gives token ids to, and the iterator that a route reads."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from text_generation_common.errors import GRAMMAR_FAULTS, GRAMMARS_WAIT, NO_TOKEN
from text_generation_common.logs import request_id
from text_generation_router.engine.protocol import Ended, Engine, Tokens
from text_generation_router.errors import (
    DeadlineError,
    GenerationError,
    GrammarError,
    IncompleteGenerationError,
    InferenceError,
    OverloadedError,
    Refusal,
    RefusedError,
    TooLongError,
)
from text_generation_router.fairness import LoopTurns
from text_generation_router.http.sse import DirectWriter
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.text.tokens.detokenization import Vocabulary
from text_generation_router.text.tokens.events import FinishReason, PromptRows, TokenEvent
from text_generation_router.text.tokens.output import TextOutput, TextRules
from text_generation_router.text.tokens.token_choice import no_token
from text_generation_router.text.validation import renamed

logger = logging.getLogger(__name__)

# Maximum number of unread tokens of a stream (top_n_tokens included), about 100 KB. At this number the request pauses
# until half of them are read. The HTTP server's write deadline disconnects a client that does not read at all.
CREDITS = 512
PLAIN_TEXT = TextRules()
NO_NAMES: Mapping[str, str] = MappingProxyType({})
Encode = Callable[[TokenEvent], bytes]
# The reasons why a request ended that follow from its token ids alone.
FINISH_REASONS = {
    EndReason.LENGTH: FinishReason.LENGTH,
    EndReason.EOS_TOKEN: FinishReason.EOS_TOKEN,
    EndReason.COMPLETE: FinishReason.EOS_TOKEN,  # only an end token could follow
}


class GenerationStream:
    """An async iterator of TokenEvent; the last event has `finish`. The iterator raises InferenceError when the request
    fails.

    The reader must call `cancel` in a `finally` block.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        metrics: Metrics,
        request: GenerationRequest,
        wakes: LoopTurns,
        rules: TextRules = PLAIN_TEXT,
        names: Mapping[str, str] = NO_NAMES,
        grammar_field: str = "grammar",
    ) -> None:
        """`submit` has to be called next. `wakes` wakes the readers of all streams. `names`: see `Prompt`.
        `grammar_field`: the request's field that is named if the request's grammar fails."""
        self.request = request
        self._engine = engine
        self._names = names
        self._grammar_field = grammar_field
        self._index = -1  # the engine's index of the request; set by `submit`
        self._metrics = metrics
        self.prompt: PromptRows | None = None  # set before the first event, if the request asked for log-probabilities
        self._vocabulary = vocabulary
        self._output = TextOutput(vocabulary, request, rules)
        self._events: deque[TokenEvent] = deque()
        self._error: InferenceError | None = None
        self.failure: str | None = None  # the failure's label `err` in tgi_request_failure, even if not counted
        self.first_token_s: float | None = None  # seconds from the first step to the first token; None before
        self.end: Ended | None = None  # the engine's report of the end
        self._finished = False  # no more events will come
        self._owner = request.share.owner
        self._id_in_logs = request_id.get()
        self._wakes = wakes
        self._is_waking = False  # the reader will be woken by `wakes`
        self._changed = asyncio.Event()
        self._reader_waits = False  # the reader has sent all events that it got, and waits
        self._through: tuple[DirectWriter, Encode] | None = None
        self._credits = CREDITS  # number of tokens that the engine may still send
        self._read = 0  # number of tokens read since the last credit

    @staticmethod
    def submit(streams: "Sequence[GenerationStream]") -> "asyncio.Future[None] | None":
        """Submits the requests of one prompt: all or none. Raises InferenceError if the engine refuses them. If a
        future is returned, `accepted` has to follow."""
        first = streams[0]
        try:
            indexes, answer = first._engine.submit_all([stream.request for stream in streams], streams, CREDITS)
        except RefusedError as refused:
            raise first._error_of(refused) from None
        for stream, index in zip(streams, indexes, strict=True):
            stream._index = index
        return answer

    @staticmethod
    async def accepted(streams: "Sequence[GenerationStream]", answer: "asyncio.Future[None]") -> None:
        """Waits for the engine's answer to `submit`. Raises InferenceError if the engine refuses the requests."""
        try:
            await answer
        except RefusedError as refused:
            for stream in streams:
                stream._finished = True
            raise streams[0]._error_of(refused) from None

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._changed.clear()
            self._reader_waits = True
            try:
                await self._changed.wait()
            finally:
                self._reader_waits = False
        return self._next_event()

    def _next_event(self) -> TokenEvent:
        event = self._events.popleft()
        self._read += 1 + len(event.top_tokens)
        if self._credits <= 0 and CREDITS - self._credits - self._read <= CREDITS // 2:
            self._give_credit()
        return event

    def write_through(self, writer: DirectWriter, encode: Encode) -> None:
        """From now on, events go to `writer` without waking the reader. The reader gets an event if the writer is
        closed, and the last event in any case."""
        self._through = writer, encode

    def cancel(self) -> None:
        """Ends an unfinished request, because the reader wants no more events. May be called at any time, and more than
        once.
        """
        if not self._finished:
            self._give_up(IncompleteGenerationError(), "dropped")

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were made."""
        return self._output.num_tokens

    @property
    def cached_tokens(self) -> int:
        """Number of the prompt's tokens that the prefix cache had; 0 before the first event."""
        return self._output.cached_tokens

    @property
    def has_begun(self) -> bool:
        """Whether the request runs, or has run before a preemption or a loss of the shards."""
        return self._output.num_tokens > 0 or self._engine.has_begun(self._index)

    def refuse(self, error: InferenceError) -> None:
        """Ends an unfinished request to make room for other requests; its reader gets the error `error`."""
        if not self._finished:
            self._give_up(error, error.label)

    def _give_up(self, error: InferenceError, label: str) -> None:
        self._fail(error, label)
        self._engine.cancel(self._index)

    # The engine calls the two methods below.

    def take(self, tokens: Tokens, ended: Ended | None) -> None:
        ids, logprobs, tops, inference_s, first = tokens
        if first is not None:
            self.first_token_s = inference_s if ids else None
            self._output.begin(first.queue_s, first.cached_tokens)
            if first.prompt_logprobs is not None:
                self.prompt = PromptRows(self._vocabulary, self.request.input_ids, first.prompt_logprobs)
        reason = None
        if ended is not None:
            self.end, reason = ended, FINISH_REASONS[ended.reason]
        if reason is not None and not ids:
            self._events.append(self._output.end(reason, inference_s))
            self._finish()
            return
        last, is_text = len(ids) - 1, ended is not None and ended.reason is EndReason.COMPLETE
        for i, token_id in enumerate(ids):
            reason_here = reason if i == last else None
            event = self._output.push(
                token_id,
                logprobs[i],
                tops[i] if tops else (),
                reason=reason_here,
                inference_s=inference_s,
                is_text=is_text,
            )
            self._events.append(event)
            self._credits -= 1 + len(event.top_tokens)
            if event.finish is not None:
                self._finish()
                if ended is None:
                    self._engine.end(self._index, self._output.num_tokens)
                return
        if self._credits <= 0 and self._read:
            self._give_credit()
        self._wake()

    def ended(self, ended: Ended) -> None:
        self.end = ended
        if self._finished:
            return  # this stream itself has ended the request before
        if ended.reason is EndReason.CLOSED:
            self._fail(IncompleteGenerationError(), None)
        elif ended.reason is not EndReason.DEADLINE:
            error = self._failure(ended.cause)
            self._fail(error, error.label)
        elif self._output.num_tokens:
            self._events.append(self._output.end(FinishReason.DEADLINE, ended.inference_s))
            self._finish()
        else:
            self._fail(DeadlineError(), DeadlineError.label)

    def _failure(self, cause: str) -> InferenceError:
        """The error of a request that failed, perhaps because of its own fields."""
        if cause == GRAMMARS_WAIT:
            return OverloadedError()
        if cause == NO_TOKEN:
            return renamed(no_token(self.request.sampling), self._names)
        if cause.startswith(GRAMMAR_FAULTS):
            return renamed(GrammarError(self._grammar_field, cause), self._names)
        return GenerationError(cause)

    def _give_credit(self) -> None:
        read, self._read = self._read, 0
        self._credits += read
        self._engine.credit(self._index, read)

    def _fail(self, error: InferenceError, label: str | None) -> None:
        """Ends the stream with an error. `label`: the failure's `err` in tgi_request_failure; None: the failure is not
        counted.
        """
        if label is not None:
            self._metrics.request_failure.labels(err=label).inc()
            error.is_counted = True
        self._error, self.failure = error, label or error.label
        self._finish()

    def _finish(self) -> None:
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            self._wakes.put(self._owner, self._deliver)

    def _deliver(self) -> bool:
        self._is_waking = False
        if self._reader_waits and self._through is not None and self._through[0].is_open:
            self._write_through(*self._through)
        if self._events or self._finished:
            self._changed.set()
        return True

    def _write_through(self, writer: DirectWriter, encode: Encode) -> None:
        events, encoded = self._events, []
        try:
            while events and events[0].finish is None:
                # Nothing is sent for an event whose text is held back: an empty chunk would end the response.
                if chunk := encode(self._next_event()):
                    encoded.append(chunk)
            if encoded:
                writer.write(encoded)
        except Exception as error:  # no task awaits this call, so the reader has to send the error to the client
            about = {"request_id": self._id_in_logs}
            logger.exception("an event could not be written, so its request fails", extra=about)
            self._through = None
            self._give_up(GenerationError(f"Server error: {type(error).__name__}"), GenerationError.label)

    def _error_of(self, refused: RefusedError) -> InferenceError:
        if refused.reason is Refusal.OVERLOADED:
            return OverloadedError(refused.retry_after_s)
        if refused.reason in (Refusal.CLOSED, Refusal.DRAINING):
            return IncompleteGenerationError()
        if refused.reason is Refusal.NO_ADAPTER:
            return GenerationError("Server error: no engine has loaded the adapter of this request")
        request, limits = self.request, self._engine.snapshot().limits
        too_long = TooLongError.of(
            "inputs",
            f"tokens + `max_new_tokens` must be <= {limits.max_batch_total_tokens}. Given: {len(request.input_ids)}"
            f" `inputs` tokens and {request.max_new_tokens} `max_new_tokens`",
        )
        return renamed(too_long, self._names)
