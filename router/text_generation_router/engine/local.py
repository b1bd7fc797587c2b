"""The engine that runs in this process: the EngineRun protocol over a scheduler and the shards of this machine."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from text_generation_common import faults
from text_generation_common.errors import GRAMMARS_WAIT
from text_generation_common.tasks import cancelled
from text_generation_router.engine.audit import Audit
from text_generation_router.engine.lifecycle import EngineConfig, Lifecycle
from text_generation_router.engine.loop import StepLoop
from text_generation_router.engine.overload import Overload
from text_generation_router.engine.protocol import (
    NOT_READY,
    EngineNote,
    EngineStanding,
    EpochWatcher,
    Load,
    Sink,
    Snapshot,
    StateWatcher,
    Submission,
)
from text_generation_router.engine.requests import Requests
from text_generation_router.engine.shard_groups import ShardGroups
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.engine.watching import StateMaker
from text_generation_router.errors import OverloadedError, Refusal, RefusedError, ShardsError
from text_generation_router.fairness import FairSlots
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.memory.observer import CacheObserver
from text_generation_router.scheduling.request import NEW, EndReason, GenerationRequest, Limits, Past, Share
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.tenant import Tenant
from text_generation_router.view.values import FrontNote

logger = logging.getLogger("text_generation_router")

OWN_NAME = "this process"
TAKES_NONE = "it takes no adapters but those of its start: --lora-dirs was not given there"
# Adapters that an engine remembers beside those of its start. A front, which serves at most 1,000, names all that it
# serves whenever it names one.
MAX_KNOWN = 4000


class Compiling:
    """Has the shards compile the grammars of requests before these are queued, so that no step waits for a compiler.

    One grammar is compiled at a time, and owners take turns.
    """

    def __init__(self, requests: Requests, shards: Callable[[], ShardedClient | None], max_waiting: int) -> None:
        """`shards`: returns the shards that work now, or None. `max_waiting`: most grammars of one tenant that may
        wait."""
        self._requests = requests
        self._shards = shards
        self._turns = FairSlots(1, max_waiting)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, indexes: Sequence[int], request: GenerationRequest) -> None:
        """Queues the requests `indexes`, which have the grammar of `request`, when the shards have compiled it, or ends
        them if they refuse to."""
        task = asyncio.create_task(self._compile(indexes, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compile(self, indexes: Sequence[int], request: GenerationRequest) -> None:
        refusal = ""
        try:
            refusal = await self._refusal(indexes, request)
        except OverloadedError:
            refusal = GRAMMARS_WAIT
        except ShardsError:
            pass  # the next shards compile the grammar with the request's first step
        finally:  # whatever has happened, no request waits for ever
            for index in indexes:
                if refusal:
                    self._requests.fail(index, refusal)
                else:
                    self._requests.make_ready(index)

    async def _refusal(self, indexes: Sequence[int], request: GenerationRequest) -> str:
        grammar = request.sampling.grammar
        async with self._turns.slot(request.share, len(grammar)):
            shards = self._shards()  # not those of the time before the wait, which may be lost
            are_wanted = any(map(self._requests.is_open, indexes))
            return await shards.compile(grammar) if shards is not None and are_wanted else ""

    async def close(self) -> None:
        await cancelled(*self._tasks)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """One of the requests that are submitted together."""

    request: GenerationRequest
    sink: Sink
    credits: int
    past: Past = NEW
    on_begun: Callable[[], None] | None = None  # called when the request's first step is decided


class EpochWatchers:
    """Tells all watchers."""

    def __init__(self) -> None:
        self.watchers: list[EpochWatcher] = []

    def lost(self, reason: str, aboard: Collection[int]) -> None:
        for watcher in self.watchers:
            watcher.lost(reason, aboard)

    def ready(self, snapshot: Snapshot) -> None:
        for watcher in self.watchers:
            watcher.ready(snapshot)


class LocalEngine:
    """Implements EngineRun, AdapterEngine and Watchable. All methods belong to the event loop's thread.

    `failed` is done once the engine can generate nothing more for any request.
    """

    front_id = ""

    def __init__(
        self,
        shard_groups: ShardGroups,
        config: EngineConfig,
        metrics: Metrics,
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = asyncio.Event()
        self._audit = Audit(metrics)
        self._scheduler = Scheduler(
            Limits(0, config.max_concurrent_requests, config.tokens.prefill_budget, config.scheduling),
        )
        counts = StepMetrics(metrics, self._scheduler)
        self._overload = Overload(self._scheduler, config.scheduling.max_queued_tokens)
        self._requests = Requests(self._scheduler, counts, work)
        self._states = StateMaker(self._scheduler, counts)
        # Folders of adapters that have come since the start, by digest, the newest last.
        self._adapter_folders: dict[str, str] = {}

        def make_loop(shards: ShardedClient) -> StepLoop:
            return StepLoop(
                shards=shards,
                scheduler=self._scheduler,
                requests=self._requests,
                work=work,
                counts=counts,
                overload=self._overload,
                audit=self._audit,
                on_confirmed=shard_groups.confirmed,
                adapter_folders=self._adapter_folders,
            )

        self._compiling = Compiling(self._requests, lambda: self._lifecycle.shards, config.max_concurrent_requests)
        self._epochs = EpochWatchers()
        self._epochs.watchers.append(self._states.shards)
        self._lifecycle = Lifecycle(
            shard_groups=shard_groups,
            config=config,
            requests=self._requests,
            make_loop=make_loop,
            metrics=metrics,
            epochs=self._epochs,
        )
        self._ended = self._has_failed = False
        self._is_draining = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Waits until the first shards are ready. Raises ShardsError if no shards will come."""
        self._task = asyncio.create_task(self._run(), name="engine")
        ready = asyncio.create_task(self._lifecycle.started.wait())
        try:
            await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            self._task.result()

    async def _run(self) -> None:
        try:
            await self._lifecycle.run()
        except Exception as error:
            if not self._lifecycle.started.is_set():
                raise  # `start` raises it again
            if isinstance(error, ShardsError):
                logger.error("%s", error)
            else:
                logger.exception("the engine failed")
            cause = str(error) if isinstance(error, ShardsError) else type(error).__name__
            self._ended = self._has_failed = True
            self._requests.end_all(EndReason.FAILED, f"Server error: {cause}")
            self.failed.set_result(None)

    def submit_all(self, requests: Sequence[GenerationRequest], sinks: Sequence[Sink], credits: int) -> Submission:
        return Submission(
            self.submit_group([NewRequest(r, sink, credits) for r, sink in zip(requests, sinks, strict=True)])
        )

    def submit(self, request: GenerationRequest, sink: Sink, credits: int, past: Past = NEW) -> int:
        """Queues one request and returns its index. RefusedError: the engine does not take it."""
        return self.submit_group([NewRequest(request, sink, credits, past)])[0]

    def submit_group(self, group: Sequence[NewRequest]) -> list[int]:
        """Queues requests that differ in seed, output, credits and sink only, and returns their indexes. RefusedError:
        the engine takes none of them."""
        request, past = group[0].request, group[0].past
        faults.point("engine.submit", lambda: request.input_ids)
        if self._ended:
            raise RefusedError(Refusal.CLOSED)
        if self._is_draining:
            raise RefusedError(Refusal.DRAINING)
        if len(request.input_ids) + request.max_new_tokens > self._scheduler.limits.capacity:
            raise RefusedError(Refusal.TOO_LONG)
        if request.adapter and request.adapter not in self.snapshot().model.adapters:
            raise RefusedError(Refusal.NO_ADAPTER)
        if not past.has_run:  # a request that was accepted once is not refused when its engine is lost
            self._overload.check(request.share, len(group) * len(request.input_ids))
        is_ready = not request.sampling.grammar or self._lifecycle.shards is None
        indexes = [
            self._requests.add(
                one.request, one.sink, one.credits, past=one.past, is_ready=is_ready, on_begun=one.on_begun
            )
            for one in group
        ]
        if not is_ready:
            self._compiling.begin(indexes, request)
        return indexes

    def withdraw(self, index: int, even_begun: bool = False) -> None:
        """Ends the request with WITHDRAWN if no step was decided for it yet. Otherwise no effect, unless
        `even_begun`."""
        self._requests.withdraw(index, even_begun)

    def end(self, index: int, num_tokens: int) -> None:
        self._requests.complete(index, num_tokens)

    def cancel(self, index: int) -> None:
        self._requests.cancel(index)

    def credit(self, index: int, tokens: int) -> None:
        self._requests.credit(index, tokens)

    def has_begun(self, index: int) -> bool:
        return self._requests.has_begun(index)

    def snapshot(self) -> Snapshot:
        """To be called after `start`."""
        return self._lifecycle.snapshot

    async def learn_adapters(self, folders: Mapping[str, str]) -> None:
        """From now on requests may ask for these adapters. The shards read one when it is first asked for."""
        known = self._adapter_folders
        for digest, folder in folders.items():
            known.pop(digest, None)
            known[digest] = folder
        for oldest in list(known)[: max(0, len(known) - MAX_KNOWN)]:
            del known[oldest]
        self._lifecycle.add_adapters(known)

    async def load_adapter(self, digest: str, folder: str) -> Mapping[str, str]:
        if (shards := self._lifecycle.shards) is None:
            refusal = NOT_READY
        elif not shards.info.adapter_room.grows:
            refusal = TAKES_NONE
        else:
            try:
                refusal = await shards.prepare_adapter(digest, folder)
            except ShardsError as error:
                refusal = f"{NOT_READY}: {error}"
        return {OWN_NAME: refusal} if refusal else {}

    async def num_with_adapter(self, digest: str) -> int:
        """Number of requests that have not ended."""
        return self._requests.num_with(digest)

    def load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            retry_after_s=self._overload.retry_after_s(),
            wait_s=self._overload.wait_s(),
            is_ready=self._lifecycle.shards is not None,
            is_draining=self._is_draining,
            free_slots=scheduler.memory.num_available,
            running=scheduler.active.num_running,
            waiting=len(scheduler.queue),
            waiting_tokens=scheduler.queue.num_tokens,
            computing_tokens=sum(request.num_uncomputed for request in scheduler.active.running.values()),
        )

    def account(self, share: Share) -> Tenant | None:
        """What was served to a tenant; None: nothing that is remembered."""
        return self._scheduler.queue.account(share)

    def observe_cache(self, observer: CacheObserver | None) -> None:
        """From now on `observer` is told which tokens are cached; None: no one is, so steps pay nothing for it."""
        self._scheduler.observe_cache(observer)

    def watch(self, watcher: EpochWatcher) -> None:
        self._epochs.watchers.append(watcher)

    def engines(self) -> Sequence[EngineNote]:
        load, is_lost = self.load(), self._lifecycle.shards is None
        standing = (
            EngineStanding.LOST if is_lost else EngineStanding.DRAINING if load.is_draining else EngineStanding.READY
        )
        return (EngineNote(OWN_NAME, standing, load.running, load.waiting),)

    def watch_state(self, name: str, watcher: StateWatcher | None) -> None:
        self._states.watch(watcher)

    def show_fronts(self, fronts: Callable[[], Sequence[FrontNote]]) -> None:
        """From now on states have the fronts that `fronts` returns: those in other processes."""
        self._states.fronts = fronts

    @property
    def num_states(self) -> int:
        """Number of states that were made: 0 while the engine has had no watcher."""
        return self._states.num_made

    def drain(self) -> None:
        """From now on, requests are refused with DRAINING. Accepted requests go on to their ends."""
        self._is_draining = True

    @property
    def has_failed(self) -> bool:
        """Whether an error of the engine itself has ended it. True already when requests end for it."""
        return self._has_failed

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return self._scheduler.is_idle and not self._requests.num_open

    async def is_healthy(self) -> bool:
        shards = self._lifecycle.shards
        return not self._ended and shards is not None and await shards.is_healthy()

    async def close(self) -> None:
        """Stops at once: every request ends with CLOSED. May be called more than once."""
        self._ended = True
        if self._task is not None:
            await cancelled(self._task)
        await self._audit.close()
        await self._compiling.close()
        await self._states.close()
        self._requests.end_all(EndReason.CLOSED)
        await self._lifecycle.close()
