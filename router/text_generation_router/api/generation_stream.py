"""One request's stream of tokens, from the engine that makes the tokens to the handler that sends them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from text_generation_router.errors import DeadlineError, IncompleteGenerationError, InferenceError
from text_generation_router.scheduling.request import FinishReason
from text_generation_router.scheduling.running import Running
from text_generation_router.text.detokenization import TextStream, Vocabulary
from text_generation_router.text.events import Finish, Token, TokenEvent

# Most unread tokens of a stream (top_n_tokens included), about 100 KB. At this number its request pauses, until half of
# them are read. The HTTP server's write deadline disconnects a client that does not read at all.
MAX_UNREAD = 512


class GenerationStream:
    """An async iterator of TokenEvent; the last event has `finish`. Raises InferenceError when the request fails.

    The reader must call `cancel` in a `finally` block.
    """

    def __init__(
        self,
        running: Running,
        vocabulary: Vocabulary,
        on_cancel: Callable[[Running, str], None],
        on_read: Callable[[], None],
    ) -> None:
        request = running.request
        self.running = running
        self._vocabulary = vocabulary
        self._on_cancel = on_cancel
        self._on_read = on_read  # called when a paused request may go on
        self._unread = 0
        self._text = TextStream(vocabulary, request.input_ids, request.stop)
        self._events: deque[TokenEvent] = deque()
        self._error: InferenceError | None = None
        self._finished = False  # no more events will come
        self._changed = asyncio.Event()
        self._queued_s = time.perf_counter()
        self._begun_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.last_token_s = 0.0  # when the newest token came

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        self._unread -= 1 + len(event.top_tokens)
        if self.running.paused and self._unread <= MAX_UNREAD // 2:
            self.running.paused = False
            self._on_read()
        return event

    def cancel(self) -> None:
        """Ends an unfinished request: the reader wants no more events. May be called at any time, and again."""
        self._end_early(IncompleteGenerationError(), "dropped")

    @property
    def has_begun(self) -> bool:
        """Whether the request runs, or has run before a preemption or a loss of the shards."""
        return self.running.has_begun

    def refuse(self, error: InferenceError) -> None:
        """Ends the request to make room for other requests; its reader gets `error`."""
        self._end_early(error, error.label)

    def _end_early(self, error: InferenceError, label: str) -> None:
        self._on_cancel(self.running, label)
        if not self._finished:
            self.fail(error)

    # The methods below are for the engine only.

    def begin(self, now: float) -> bool:
        """Notes that the request joined a step. Returns False if it had joined one before: it is being resumed."""
        if self._begun_s is not None:
            return False
        self._begun_s = now
        return True

    @property
    def queue_s(self) -> float:
        """Seconds from arrival in the queue to the first step; 0 before that step."""
        return (self._begun_s or self._queued_s) - self._queued_s

    def end_at(self, timer: asyncio.TimerHandle) -> None:
        """`timer` fires at the request's deadline; it is cancelled when the request ends earlier."""
        self._timer = timer

    def fail(self, error: InferenceError) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._finished = True
        self._changed.set()
        if self._timer is not None:
            self._timer.cancel()

    def expire(self, now: float) -> bool:
        """Ends the request at its deadline: with the tokens made so far (returns True), or with DeadlineError if there
        are none (returns False). `push` must not be called afterwards."""
        if not self.running.output_ids:
            self.fail(DeadlineError())
            return False
        held_back = self._text.flush()
        self._events.append(TokenEvent(None, held_back, finish=self._finish(FinishReason.DEADLINE, now)))
        self._unread += 1
        self._end()
        return True

    def push(
        self, token_id: int, logprob: float, top_tokens: tuple[Token, ...], reason: FinishReason | None, now: float
    ) -> bool:
        """Adds a token that the scheduler has confirmed. `reason`: why the request ends with it, if it does. Returns
        whether the request is finished: a stop string in its text ends it too."""
        shown, plain, stopped = self._text.push(token_id)
        if reason is None and stopped:
            reason = FinishReason.STOP_SEQUENCE
        if reason is not None and not stopped:
            held_back = self._text.flush()
            shown, plain = shown + held_back, plain + held_back
        token = Token(token_id, shown, logprob, token_id in self._vocabulary.special_ids)
        self._events.append(TokenEvent(token, plain, top_tokens, self._finish(reason, now) if reason else None))
        self._unread += 1 + len(top_tokens)
        self.running.paused = self._unread >= MAX_UNREAD
        self.last_token_s = now
        if reason is not None:
            self._end()
        self._changed.set()
        return self._finished

    def _finish(self, reason: FinishReason, now: float) -> Finish:
        sampling = self.running.request.sampling
        begun = self._begun_s if self._begun_s is not None else now
        return Finish(
            reason,
            self._text.text(),
            len(self.running.output_ids),
            sampling.seed if sampling.do_sample else None,
            begun - self._queued_s,
            now - begun,
            self.running.cached_tokens,
        )
