"""News of an engine for its fronts: its load, what it has served to each tenant, and what its prefix cache has."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from itertools import islice

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.local import LocalEngine
from text_generation_router.engine.protocol import Load, Snapshot
from text_generation_router.engine_service.fronts import ConnectedFronts
from text_generation_router.engine_service.sinks import STALL_S
from text_generation_router.errors import FrontLostError
from text_generation_router.fleet.cache_news import MAX_HASHES, CacheLog, CacheNews
from text_generation_router.scheduling.request import Share
from text_generation_router.wire.version import UINT64, packed

# Seconds between two Loads; and the minimum, when events ask for a Load at once, so that fronts that come and go cost
# little.
EVERY_S, PAUSE_S = 0.25, 0.02
# Maximum number of seconds between two Loads that a front may ask for. An engine that is silent for 3 s counts as lost.
MAX_EVERY_S = 1.0
# Seconds after its last request for which a tenant's service is reported.
ACTIVE_S = 60.0
# Seconds for which the cache is observed after the last News call that wants its changes: fronts call again after a
# break.
OBSERVED_S = 30.0
# Maximum number of bytes that one Load reports about tenants.
SERVED_BYTES = 2**20


class NewsReader:
    """What one News call still has to send: the newest Load, and what has changed in the cache. However slowly a front
    reads, at most one change waits for each block that has been in the cache since."""

    def __init__(self, front_id: str, snapshot: list[CacheNews] | None, every_s: float = EVERY_S) -> None:
        """`snapshot`: what is cached; None: the call gets no changes of the cache. `every_s`: seconds between two
        Loads."""
        self.front_id = front_id
        self.wants_cache = snapshot is not None
        self._snapshot: deque[CacheNews] = deque(snapshot or ())
        self._changes: dict[int, bool] = {}  # for each hash: True if its block was added, False if removed
        self._load: pb.Load | None = None
        # Loads are made every EVERY_S. A call whose Load is due gets it now if waiting for the next Load would make it
        # late by more than half of EVERY_S.
        self._every_s = min(every_s, MAX_EVERY_S) - EVERY_S / 2
        # `is_ready` and `is_draining` of the last Load: if either changes, a Load is sent at once.
        self._reported: tuple[bool, bool] | None = None
        self._reported_s = 0.0
        self._sequence = 0
        self._is_closing = False
        self._changed = asyncio.Event()

    def put(self, load: pb.Load, cache: list[CacheNews], now: float) -> None:
        self._load = load
        if self.wants_cache:
            for news in cache:
                self._changes.update(dict.fromkeys(news.removed, False) | dict.fromkeys(news.added, True))
        reported = load.is_ready, load.is_draining
        if reported != self._reported or now - self._reported_s >= self._every_s:
            self._reported, self._reported_s = reported, now
            self._changed.set()

    def close(self) -> None:
        self._is_closing = True
        self._changed.set()

    async def run(self, write: Callable[[pb.NewsMessage], Awaitable[None]]) -> None:
        """Sends news until `close` is called. Raises FrontLostError if the front does not read."""
        while not self._is_closing:
            await self._changed.wait()
            self._changed.clear()
            while (message := self._next()) is not None:
                try:
                    async with asyncio.timeout(STALL_S):
                        await write(message)
                except TimeoutError:
                    raise FrontLostError(f"nothing was read for {STALL_S:g} s") from None

    def _next(self) -> pb.NewsMessage | None:
        if self._load is not None:
            load, self._load = self._load, None
            return pb.NewsMessage(load=load)
        if self._snapshot:
            news = self._snapshot.popleft()
        elif self._changes:
            news = self._next_changes()
        else:
            return None
        self._sequence += 1
        added, removed = packed(news.added, UINT64), packed(news.removed, UINT64)
        cache = pb.Cache(sequence=self._sequence, is_snapshot=news.is_snapshot, added=added, removed=removed)
        return pb.NewsMessage(cache=cache)

    def _next_changes(self) -> CacheNews:
        hashes = list(islice(self._changes, MAX_HASHES))
        changes = {block: self._changes.pop(block) for block in hashes}
        added = [block for block, is_added in changes.items() if is_added]
        return CacheNews(added, [block for block, is_added in changes.items() if not is_added])


class NewsPublisher:
    """Makes the news for all News calls. The engine's cache is observed only while a front wants its changes."""

    def __init__(self, engine: LocalEngine, fronts: ConnectedFronts, cache: CacheLog | None) -> None:
        self._engine = engine
        self._fronts = fronts
        self._cache = cache
        self._is_observing = False
        self._wanted_s = 0.0  # when a front last wanted news of the cache
        self._readers: set[NewsReader] = set()
        self._recent: dict[Share, float] = {}  # when each tenant was last seen with a request
        self._due = asyncio.Event()

    def open(self, front_id: str, wants_cache: bool, every_s: float = EVERY_S) -> NewsReader:
        snapshot = self._observed(self._cache) if wants_cache and self._cache is not None else None
        reader = NewsReader(front_id, snapshot, every_s)
        for older in self._readers:
            if older.front_id == front_id:
                older.close()
        self._readers.add(reader)
        self.hurry()
        return reader

    def _observed(self, cache: CacheLog) -> list[CacheNews]:
        """All that is cached. From now on `cache` observes the changes."""
        if not self._is_observing:
            self._is_observing = True
            self._engine.observe_cache(cache.observer)
            cache.take()  # the snapshot contains these changes
        self._wanted_s = time.monotonic()
        return cache.snapshot()

    def forget(self, reader: NewsReader) -> None:
        self._readers.discard(reader)

    def close(self) -> None:
        """Ends all News calls."""
        for reader in self._readers:
            reader.close()

    def __len__(self) -> int:
        return len(self._readers)

    def note_share(self, share: Share) -> None:
        self._recent[share] = time.monotonic()

    def hurry(self) -> None:
        """Makes the next Load at once."""
        self._due.set()

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S - PAUSE_S):
                    await self._due.wait()
            self._due.clear()
            self._publish()
            await asyncio.sleep(PAUSE_S)

    def _publish(self) -> None:
        cache = self._changes()
        if not self._readers:
            return
        load, leases = load_to_pb(self._engine.load()), self._fronts.leases()
        now = time.monotonic()
        load.served.extend(self._served(now))
        for reader in self._readers:
            own = pb.Load()
            own.CopyFrom(load)
            own.permits = leases.get(reader.front_id, 0)
            own.newest_index = self._fronts.newest_index(reader.front_id)
            reader.put(own, cache, now)

    def _changes(self) -> list[CacheNews]:
        if self._cache is None or not self._is_observing:
            return []
        now = time.monotonic()
        if any(reader.wants_cache for reader in self._readers):
            self._wanted_s = now
        elif now - self._wanted_s > OBSERVED_S:
            self._is_observing = False
            self._engine.observe_cache(None)
            self._cache.end()
        return self._cache.take()

    def _served(self, now: float) -> list[pb.Served]:
        served, size = [], 0
        for share, seen_s in list(self._recent.items()):
            account = self._engine.account(share)
            if account is None or (account.is_idle and now - seen_s > ACTIVE_S):
                del self._recent[share]
                continue
            if not account.is_idle:
                self._recent[share] = now
            one = pb.Served(owner=share.owner, tenant=share.tenant, tokens=account.total)
            size += one.ByteSize()
            if size > SERVED_BYTES:
                break
            served.append(one)
        return served

    # EpochWatcher's methods: the engine calls `lost` when its shards are lost, and `ready` when new shards are ready.
    # Both change `is_ready`, so the next Load is made at once.

    def lost(self, reason: str, aboard: Collection[int]) -> None:
        self.hurry()

    def ready(self, snapshot: Snapshot) -> None:
        self.hurry()


def load_to_pb(load: Load) -> pb.Load:
    """Converts `load` to a message, without the fields that are different for each front."""
    return pb.Load(
        is_ready=load.is_ready,
        is_draining=load.is_draining,
        free_slots=load.free_slots,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        computing_tokens=load.computing_tokens,
        wait_s=load.wait_s,
    )
