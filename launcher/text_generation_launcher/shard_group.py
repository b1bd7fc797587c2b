"""One group of shards, which start together, are watched together and are killed together; and how the launcher decides
whether a shard works or hangs.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from text_generation_common.memory import is_refused_memory
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import ShardFailed
from text_generation_launcher.process import HELD_S, Child

# Decides whether a shard works or hangs, from its answers to gRPC calls of Health. The rules do no input or output.
#
# gRPC is imported when shards are starting.

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


# Starts the shard of a rank and an epoch.
StartShard = Callable[[int, int], Awaitable[Child]]
# Seconds between two Health calls. Shorter before a shard is ready, because the start of the server waits for it.
POLL_S = 0.5
POLL_PREPARING_S = 0.1
# Seconds to wait for the end of killed shards.
KILL_S = 30.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a group of shards has ended, or must end."""

    reason: str
    rank: int | None = None  # rank of the shard at fault, or None


class ShardGroup:
    """The processes of one epoch. The caller must `start` the group, wait for `lost`, `unwatch` and `kill` the group.
    `ready` is set when every shard has reported that it is ready.
    """

    def __init__(self, epoch: int, socket_paths: Sequence[str]) -> None:
        self.ready = asyncio.Event()
        self.lost: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self.children: list[Child] = []
        self._epoch = epoch
        self._socket_paths = socket_paths
        self._ready_ranks: set[int] = set()
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, start_shard: StartShard) -> None:
        """Starts and watches all ranks. ShardCannotStart when a rank cannot be started; other ranks may run already."""
        for rank in range(len(self._socket_paths)):
            self.children.append(await start_shard(rank, self._epoch))
        for rank, child in enumerate(self.children):
            self._watch(self._watch_exit(rank, child))
            self._watch(self._watch_ready(rank, child))
            self._watch(self._watch_health(rank, child))

    def lose(self, loss: Loss) -> None:
        """Marks the group as lost. Only the first loss counts, because later losses are mostly caused by the first."""
        if not self.lost.done():
            self.lost.set_result(loss)

    def error_of(self, loss: Loss) -> str:
        """The error with which the shard at fault has ended, "" if it printed none. A shard that lost its group to
        another rank's error ends first at times: then it is that error, also if that rank is only about to end."""
        if loss.rank is None:
            return ""
        return next(filter(None, (child.error for child in (self.children[loss.rank], *self.children))), "")

    async def await_reported(self) -> None:
        """Waits for the end of ranks that have printed their error, for their exit statuses."""
        ending = [child.exited for child in self.children if child.error and not child.exited.done()]
        if ending:
            await asyncio.wait(ending, timeout=HELD_S)

    def is_user_error(self) -> bool:
        """Whether a rank ended with EX_CONFIG, or native code ended it for lack of memory: the user must correct
        something, which the shard has logged."""
        ended = [child for child in self.children if child.exited.done()]
        return any(
            child.exited.result() == os.EX_CONFIG
            or (child.exited.result() == -signal.SIGABRT and is_refused_memory(child.last_lines))
            for child in ended
        )

    async def unwatch(self) -> None:
        await cancelled(*self._watchers)

    async def kill(self) -> None:
        """Sends SIGKILL to all shards, because a shard that hangs does not react to SIGTERM. Returns when all have
        ended. ShardFailed when a shard does not end within KILL_S."""
        for child in self.children:
            child.send(signal.SIGKILL)
        left = [child.exited for child in self.children if not child.exited.done()]
        if left and (await asyncio.wait(left, timeout=KILL_S))[1]:
            raise ShardFailed(f"a killed shard does not end within {KILL_S:.0f} s: look for its device in kernel logs")

    def _watch(self, watching: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(watching)
        task.add_done_callback(self._on_watcher_end)
        self._watchers.append(task)

    def _on_watcher_end(self, task: "asyncio.Task[None]") -> None:
        """Raises the error of a watcher again. Such an error is a bug in the launcher, which would otherwise stay
        hidden while shards live.
        """
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.lost.done():
            self.lost.set_exception(error)

    async def _watch_exit(self, rank: int, child: Child) -> None:
        await asyncio.wait([child.exited])
        self.lose(Loss(f"Shard {rank} {child.how_it_ended}", rank))

    async def _watch_ready(self, rank: int, child: Child) -> None:
        await child.is_ready.wait()
        self._note_ready(rank)

    async def _watch_health(self, rank: int, child: Child) -> None:
        """Calls Health of one rank. Each rank has a task of its own, so that a silent shard delays no other call."""
        await child.begun.wait()
        client = HealthClient(self._socket_paths[rank])
        watchdog = Watchdog(time.monotonic())
        try:
            while True:
                asked_s = time.monotonic()
                answer = await client.ask()
                verdict = watchdog.judge(time.monotonic(), answer)
                if verdict is not None:
                    self.lose(Loss(f"Shard {rank} hangs: {verdict}", rank))
                    return
                if answer is not None and answer.is_ready:
                    self._note_ready(rank)
                period_s = POLL_S if rank in self._ready_ranks else POLL_PREPARING_S
                await asyncio.sleep(asked_s + period_s - time.monotonic())
        finally:
            await client.close()

    def _note_ready(self, rank: int) -> None:
        self._ready_ranks.add(rank)
        if len(self._ready_ranks) == len(self.children):
            self.ready.set()
