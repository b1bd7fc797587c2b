"""The state of this process's engine, made a few times a second while it is watched, and never otherwise."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from text_generation_common.json_values import as_json
from text_generation_common.tasks import cancelled
from text_generation_router.engine.protocol import STATE_BYTES_PER_S, Snapshot, StateNews, StateWatcher
from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.view.reading import TenantDigests, queue_of, rows_of
from text_generation_router.view.slot_map import slot_runs_of, uses_of
from text_generation_router.view.steps import StepRing
from text_generation_router.view.tree import TreeWalk
from text_generation_router.view.values import EngineSnapshot, FrontNote, ShardNote, TreeColumns

logger = logging.getLogger("text_generation_router")

# Least seconds between two states, and seconds between two walks over the prefix tree.
EVERY_S, WALK_S = 0.25, 1.0


class ShardNotes:
    """Implements EpochWatcher: whether the shards are there, and why they were lost last."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._note = ShardNote()
        self._changed_s = self._lost_s = time.monotonic()

    def lost(self, reason: str, aboard: Collection[int]) -> None:
        self._changed_s = self._lost_s = time.monotonic()
        self._note = replace(self._note, is_ready=False, loss=reason, num_losses=self._note.num_losses + 1)
        self._on_change()

    def ready(self, snapshot: Snapshot) -> None:
        self._changed_s, model = time.monotonic(), snapshot.model
        self._note = replace(
            self._note, is_ready=True, epoch=model.epoch, world_size=model.world_size, kernels=model.kernels
        )
        self._on_change()

    @property
    def note(self) -> ShardNote:
        now = time.monotonic()
        loss_s = round(now - self._lost_s, 1) if self._note.num_losses else None
        return replace(self._note, since_s=round(now - self._changed_s, 1), loss_s=loss_s)


class StateMaker:
    """`shards` is to be told of epochs. `num_made`: number of states that were made."""

    def __init__(self, scheduler: Scheduler, counts: StepMetrics) -> None:
        self.fronts: Callable[[], Sequence[FrontNote]] = lambda: ()  # the fronts in other processes
        self.num_made = 0
        self._due = asyncio.Event()
        self.shards = ShardNotes(self._due.set)
        self._scheduler = scheduler
        self._counts = counts
        self._digests = TenantDigests()
        self._task: asyncio.Task[None] | None = None

    def watch(self, watcher: StateWatcher | None) -> None:
        """See `Watchable.watch_state`."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._run(watcher), name="states") if watcher is not None else None
        self._counts.ring = StepRing() if watcher is not None else None

    async def _run(self, watcher: StateWatcher) -> None:
        tree, walked_s = TreeColumns(), 0.0
        try:
            while True:
                self._due.clear()
                if time.monotonic() - walked_s >= WALK_S:
                    tree, walked_s = await self._walk(), time.monotonic()
                watcher(StateNews(state := await self._make(tree)))
                with suppress(TimeoutError):  # a loss is shown at once
                    await asyncio.wait_for(self._due.wait(), max(EVERY_S, len(state) / STATE_BYTES_PER_S))
        except Exception as error:  # a bug of the view must not end the engine
            logger.exception("the engine's state could not be read")
            watcher(StateNews(problem=f"the state could not be read: {type(error).__name__}"))
            raise

    async def _walk(self) -> TreeColumns:
        walk = TreeWalk(self._scheduler.memory.cache, time.perf_counter)
        while not walk.go_on():
            await asyncio.sleep(0)
        return walk.table()

    async def _make(self, tree: TreeColumns) -> bytes:
        """A state as JSON. The loop does other work between its parts."""
        self.num_made += 1
        scheduler, now = self._scheduler, time.perf_counter()
        rows, queue = rows_of(scheduler, self._digests, now), queue_of(scheduler, self._digests, now)
        num_running, num_waiting = scheduler.active.num_running, len(scheduler.queue)
        await asyncio.sleep(0)
        slots = slot_runs_of(uses_of(scheduler))
        await asyncio.sleep(0)
        counters = scheduler.counters
        state = EngineSnapshot(
            rows=rows,
            num_running=num_running,
            queue=queue,
            num_waiting=num_waiting,
            slots=slots,
            tree=tree,
            steps=self._counts.ring.table() if self._counts.ring is not None else StepRing().table(),
            shards=self.shards.note,
            fronts=tuple(self.fronts()),
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prefilled_tokens=counters.prefilled_tokens,
        )
        return as_json(state)

    async def close(self) -> None:
        self._counts.ring = None
        if self._task is not None:
            await cancelled(self._task)
