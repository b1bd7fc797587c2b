"""Does a shard work, or does it hang? The rules are pure; asking is gRPC, which is loaded once shards are starting."""

import os
from dataclasses import dataclass

# The limit of one call, and how many in a row may pass it.
ANSWER_S = 2.0
MOST_MISSES = 2
STILL_STEP_S = 5.0
PAUSES = 10
# Loading, warming up, and a step that compiles kernels or records a graph may hold the interpreter, and announce
# themselves beforehand.
STILL_PREPARING_S = 300.0
MOST_MISSES_PREPARING = 10
PREPARING = ("load", "warmup", "capture")
# Between two looks no more time counts than this: a launcher that was itself stopped takes its own gap for nobody's.
LONGEST_GAP_S = 1.25 * ANSWER_S

# One channel per shard and generation. gRPC's own waits between attempts grow to 120 s, and are shared between channels
# to the same address unless each has its own pool.
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of Health."""

    phase: str
    progress: int
    running_step: int  # 0: none
    longest_pause_s: float  # 0: not known yet

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready"

    def has_moved_since(self, earlier: "Sample | None") -> bool:
        return earlier is None or (self.phase, self.progress, self.running_step) != (
            earlier.phase,
            earlier.progress,
            earlier.running_step,
        )


class Watchdog:
    """One shard's: hears every answer and every silence, and says what stands still."""

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._still_s = 0.0
        self._misses = 0
        self._last: Sample | None = None

    def look(self, now_s: float, sample: Sample | None) -> str | None:
        """`sample` is None when Health was not answered. The reason when the shard hangs, else None."""
        if sample is not None and sample.has_moved_since(self._last):
            self._still_s = 0.0
        else:
            self._still_s += min(now_s - self._seen_s, LONGEST_GAP_S)
        self._seen_s = now_s
        self._misses = self._misses + 1 if sample is None else 0
        self._last = sample or self._last
        return self._verdict()

    def _verdict(self) -> str | None:
        last = self._last
        is_preparing = last is None or last.phase in PREPARING
        if is_preparing and self._still_s >= STILL_PREPARING_S:
            return f"phase {last.phase if last else 'start'} stands still for {STILL_PREPARING_S:.0f} s"
        if last is None:
            return None  # its program is still being imported, and nobody listens
        most_misses = MOST_MISSES_PREPARING if is_preparing else MOST_MISSES
        if self._misses >= most_misses:
            return f"Health was not answered {most_misses} times in a row"
        limit_s = max(STILL_STEP_S, PAUSES * last.longest_pause_s)
        if not is_preparing and last.running_step and self._still_s >= limit_s:
            return f"step {last.running_step} stands still for {limit_s:.0f} s"
        return None


class Probe:
    """Asks one shard of one generation. Inside an event loop; `close` it."""

    def __init__(self, socket_path: str) -> None:
        # Our forks run another program at once. gRPC's handlers for forks would only complain about them, on stderr.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        # Here, because it takes a fifth of a second that `--help` should not take and the shards are loading in.
        import grpc

        from text_generation_proto import generate_pb2, generate_pb2_grpc

        self._channel = grpc.aio.insecure_channel(f"unix://{socket_path}", options=CHANNEL_OPTIONS)
        self._health = generate_pb2_grpc.TextGenerationServiceStub(self._channel).Health
        self._request = generate_pb2.HealthRequest()
        self._error = grpc.aio.AioRpcError

    async def ask(self) -> Sample | None:
        """None when there was no answer within `ANSWER_S`, whatever the reason."""
        try:
            answer = await self._health(self._request, timeout=ANSWER_S, wait_for_ready=True)
        except self._error:
            return None
        return Sample(answer.phase, answer.progress, answer.running_step, answer.longest_pause_ms / 1000)

    async def close(self) -> None:
        await self._channel.close()
