"""Decides whether a shard works or hangs, from its answers to gRPC calls of Health. The rules do no input or output.

gRPC is imported when shards are starting.
"""

import os
from dataclasses import dataclass

# Seconds that one Health call may take, and the number of calls in a row without an answer after which a shard counts
# as hung.
ANSWER_S = 2.0
MAX_MISSES = 2
# A step hangs when it makes no progress for STILL_STEP_S seconds, or for PAUSES times the longest pause in a step that
# the shard measured at warm-up, whichever is longer.
STILL_STEP_S = 5.0
PAUSES = 10
# Limits in seconds for the phases PREPARING, in which Python may not answer for minutes: loading, and warming up, which
# compiles kernels and records CUDA graphs. The shard reports the phase before it begins.
STILL_PREPARING_S = 300.0
MAX_MISSES_PREPARING = 10
PREPARING = ("load", "warmup")
# Most seconds that count against a shard between two answers. A launcher that was itself suspended measures a longer
# gap, for which the shard is not at fault.
LONGEST_GAP_S = 1.25 * ANSWER_S

# Options of the channel to one shard of one epoch. Without them gRPC's waits between attempts to connect grow to 120 s,
# and channels to the same address share these waits.
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """One answer of a shard's Health call."""

    phase: str
    progress: int
    running_step: int  # number of the step; 0: no step is running
    longest_pause_s: float  # longest time without progress in a step at warm-up, in seconds; 0: not known yet

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready"

    def has_moved_since(self, earlier: "HealthAnswer | None") -> bool:
        return earlier is None or (self.phase, self.progress, self.running_step) != (
            earlier.phase,
            earlier.progress,
            earlier.running_step,
        )


class Watchdog:
    """Decides whether one shard hangs, from its answered and unanswered Health calls."""

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._still_s = 0.0
        self._misses = 0
        self._last: HealthAnswer | None = None

    def judge(self, now_s: float, answer: HealthAnswer | None) -> str | None:
        """The reason if the shard hangs, or None if it works. `answer` is None when Health was not answered in time."""
        if answer is not None and answer.has_moved_since(self._last):
            self._still_s = 0.0
        else:
            self._still_s += min(now_s - self._seen_s, LONGEST_GAP_S)
        self._seen_s = now_s
        self._misses = self._misses + 1 if answer is None else 0
        self._last = answer or self._last
        return self._verdict()

    def _verdict(self) -> str | None:
        last = self._last
        is_preparing = last is None or last.phase in PREPARING
        if is_preparing and self._still_s >= STILL_PREPARING_S:
            return f"phase {last.phase if last else 'start'} stands still for {STILL_PREPARING_S:.0f} s"
        if last is None:
            return None  # The shard's program is still being imported, and its socket does not exist yet.
        max_misses = MAX_MISSES_PREPARING if is_preparing else MAX_MISSES
        if self._misses >= max_misses:
            return f"Health was not answered {max_misses} times in a row"
        limit_s = max(STILL_STEP_S, PAUSES * last.longest_pause_s)
        if not is_preparing and last.running_step and self._still_s >= limit_s:
            return f"step {last.running_step} stands still for {limit_s:.0f} s"
        return None


class HealthClient:
    """Calls Health of one shard of one epoch. Must be made inside an event loop; the owner must `close` it."""

    def __init__(self, socket_path: str) -> None:
        # The launcher's forked processes exec another program at once. gRPC's fork handlers would only print warnings.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        # Imported here, because the import takes 0.2 s, which `--help` would notice and loading shards do not.
        import grpc

        from text_generation_proto import generate_pb2, generate_pb2_grpc

        self._channel = grpc.aio.insecure_channel(f"unix://{socket_path}", options=CHANNEL_OPTIONS)
        self._health = generate_pb2_grpc.TextGenerationServiceStub(self._channel).Health
        self._request = generate_pb2.HealthRequest()
        self._error = grpc.aio.AioRpcError

    async def ask(self) -> HealthAnswer | None:
        """Calls Health once. None when there was no answer within `ANSWER_S`, for any reason."""
        try:
            answer = await self._health(self._request, timeout=ANSWER_S, wait_for_ready=True)
        except self._error:
            return None
        return HealthAnswer(answer.phase, answer.progress, answer.running_step, answer.longest_pause_ms / 1000)

    async def close(self) -> None:
        await self._channel.close()
