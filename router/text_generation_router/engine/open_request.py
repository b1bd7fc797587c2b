"""A request from its submission to its end, whether its engine is here or elsewhere: its sink gets its tokens, and then
exactly one Ended, whose times this request keeps."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

from text_generation_common.logs import request_id
from text_generation_router.engine.protocol import Ended, Sink, Tokens
from text_generation_router.scheduling.request import EndReason, GenerationRequest

logger = logging.getLogger("text_generation_router")

# Longest deadline of a request, in seconds from its arrival; event loop timers accept no longer delay.
LATEST_DEADLINE_S = 10.0**8


class Deadlines:
    """Ends requests whose time has run out."""

    def __init__(self, expire: Callable[[int], None]) -> None:
        """`expire` is called with the index of a request at its deadline."""
        self._expire = expire
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def set(self, index: int, timeout_s: float | None) -> None:
        """Sets the deadline of a request to `timeout_s` seconds from now; None: no deadline."""
        if timeout_s is not None:
            delay_s = min(timeout_s, LATEST_DEADLINE_S)
            self._timers[index] = asyncio.get_running_loop().call_later(delay_s, self._expire, index)

    def clear(self, index: int) -> None:
        """Stops the timer of a request that has ended."""
        if (timer := self._timers.pop(index, None)) is not None:
            timer.cancel()


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended. Times are those of one clock; 0 stands for a time that has not come."""

    index: int
    request: GenerationRequest
    sink: Sink
    credits: int  # number of tokens that the sink may still get
    _: KW_ONLY
    begun_s: float = 0.0  # first step
    lost_s: float = 0.0  # loss of the shards or the engine with its row; 0 unless the request waits to go on
    replays: tuple[tuple[float, float], ...] = ()  # as in `Ended`
    id_in_logs: str = field(default_factory=request_id.get)  # the HTTP request's

    def note_loss(self, now: float) -> None:
        """Notes that the shards or the engine with the request are lost."""
        if self.begun_s and not self.lost_s:
            self.lost_s = now

    def note_replay(self, until: float) -> None:
        """Notes that the request goes on after a loss."""
        self.replays += ((self.lost_s - self.begun_s, until - self.begun_s),)
        self.lost_s = 0.0

    def timed(self, ended: Ended, arrived_s: float, now: float) -> Ended:
        """`ended` with the times of the request, which ends now. To be called once."""
        if self.lost_s:
            self.note_replay(now)
        inference_s, queue_s = (now - self.begun_s, self.begun_s - arrived_s) if self.begun_s else (0.0, None)
        return replace(ended, inference_s=inference_s, queue_s=queue_s, replays=self.replays)

    def give(self, tokens: Tokens, ended: Ended | None) -> str:
        """Gives tokens to the sink. If the sink raises an error the request fails: either it has ended, and the sink is
        told, or the cause is returned, with which the caller has to end the request. "": there is no error.
        """
        try:
            self.sink.take(tokens, ended)
        except Exception as error:
            text, about = "the sink of request %d raised an error, so the request fails", self._about
            logger.error(text, self.index, exc_info=error, extra=about)
            cause = f"Server error: {type(error).__name__}"
            if ended is None:
                return cause
            self.report_end(replace(ended, reason=EndReason.FAILED, cause=cause))
        return ""

    def report_end(self, ended: Ended) -> None:
        """Tells the sink that the request has ended. An error of the sink changes nothing."""
        try:
            self.sink.ended(ended)
        except Exception:
            text = "the sink of request %d raised an error at the request's end"
            logger.exception(text, self.index, extra=self._about)

    @property
    def _about(self) -> dict[str, str]:
        """For log lines, which the engine's own task writes."""
        return {"request_id": self.id_in_logs}
