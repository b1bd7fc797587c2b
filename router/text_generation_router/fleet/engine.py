"""The engines in other processes as one engine: the EngineRun protocol over connections to all of them."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from text_generation_common.autoscaling import Demand
from text_generation_common.cluster.endpoints import Endpoint
from text_generation_common.cluster.security import Security
from text_generation_common.tasks import cancelled
from text_generation_router.engine.open_request import Deadlines
from text_generation_router.engine.protocol import (
    EngineNote,
    Load,
    Sink,
    Snapshot,
    StateNews,
    StateWatcher,
    Submission,
)
from text_generation_router.errors import Refusal, RefusedError, ShardsError
from text_generation_router.fleet.books import FrontBooks
from text_generation_router.fleet.choice import MAX_ENGINES
from text_generation_router.fleet.connection import EngineConnection
from text_generation_router.fleet.engines import Fleet
from text_generation_router.fleet.placement import LeastLoad, Placement
from text_generation_router.fleet.values import RemoteCounts
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.view.values import short_id

logger = logging.getLogger("text_generation_router")

# Seconds between two checks for requests that wait for an engine in vain, or that another engine would begin sooner.
LOOK_S = 1.0
GONE = "there is no such engine any more"


class RemoteEngine:
    """Implements EngineRun, AdapterEngine and Watchable. All methods are to be called on the event loop's thread.
    Requests survive the loss of any engine, and wait while no engine is connected."""

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        security: Security,
        placement: Placement | None = None,
        resumes_across_builds: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`resumes_across_builds`: whether a request goes on with an engine of another digest, perhaps with another
        text."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts = RemoteCounts()
        self._front_id = uuid.uuid4().hex
        placement = placement or LeastLoad(random.randrange(MAX_ENGINES))
        self._adapters: dict[str, str] = {}  # the folders of LoRA adapters that every engine is told of
        self._fleet = Fleet(placement, resumes_across_builds, self._front_id)
        self._books = FrontBooks(self._fleet, clock, self.counts, lambda index: self._deadlines.clear(index))
        self._deadlines = Deadlines(lambda index: self._books.cancel(index, EndReason.DEADLINE))
        self._endpoints = list(endpoints)
        self._security = security
        self._connections: dict[str, tuple[EngineConnection, asyncio.Task[None]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._snapshot: Snapshot | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Waits until an engine is connected. Raises ShardsError after an error of this process."""
        self._looking = asyncio.create_task(self._look_after_waiting(), name="engines")
        await self.connect(self._endpoints)
        await self._started.wait()
        if self.failed.done():
            raise ShardsError("a connection to an engine failed; its log line has the cause")

    async def connect(self, endpoints: Iterable[Endpoint]) -> None:
        """Connects to the engines at `endpoints`, and disconnects from all other engines. Requests on other engines go
        on elsewhere. Raises CredentialsError if an endpoint needs certificates and there are none."""
        wanted = {endpoint.target: endpoint for endpoint in endpoints}
        for endpoint in wanted.values():
            self._security.check(endpoint)
        for target in [target for target in self._connections if target not in wanted]:
            connection, task = self._connections.pop(target)
            await cancelled(task)
            self._books.removed(connection.number)
        for target, endpoint in wanted.items():
            if target not in self._connections and not self._is_closed:
                used = {connection.number for connection, _ in self._connections.values()}
                number = next(number for number in count() if number not in used)
                connection = EngineConnection(
                    number=number,
                    endpoint=endpoint,
                    security=self._security,
                    front_id=self._front_id,
                    fleet=self._fleet,
                    books=self._books,
                    counts=self.counts,
                    on_change=self._note_change,
                    adapters=self._adapters,
                )
                task = asyncio.create_task(connection.run(), name=f"engine {target}")
                task.add_done_callback(self._note_end)
                self._connections[target] = connection, task

    def is_connected(self, endpoint: Endpoint) -> bool:
        """Whether there is a connection to the engine at `endpoint`."""
        found = self._connections.get(endpoint.target)
        return found is not None and found[0].number in self._fleet.engines

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        """A connection's task ends only if it is cancelled, or has an error of its own."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("a connection to an engine failed", exc_info=error)
        self._is_closed = True
        self._books.end_all(EndReason.FAILED, f"Server error: {type(error).__name__}")
        if not self.failed.done():
            self.failed.set_result(None)
        self._started.set()

    def _note_change(self) -> None:
        self._snapshot = self._fleet.snapshot or self._snapshot
        if self._fleet.engines:
            self._started.set()

    async def _look_after_waiting(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._books.look()

    def submit_all(self, requests: Sequence[GenerationRequest], sinks: Sequence[Sink], credits: int) -> Submission:
        if self._is_closed:
            raise RefusedError(Refusal.CLOSED)
        if self._fleet.lacks_adapter(requests[0].adapter):
            raise RefusedError(Refusal.NO_ADAPTER)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_answer(refused: RefusedError | None) -> None:
            if answer.done():
                return  # the wait for the answer was cancelled
            if refused is None:
                answer.set_result(None)
            else:
                answer.set_exception(refused)

        indexes = self._books.submit_all(requests, sinks, credits, on_answer)
        for index, request in zip(indexes, requests, strict=True):
            self._deadlines.set(index, request.timeout_s)
        return Submission(indexes, answer)

    def end(self, index: int, num_tokens: int) -> None:
        self._books.end(index, num_tokens)

    def cancel(self, index: int) -> None:
        self._books.cancel(index)

    def credit(self, index: int, tokens: int) -> None:
        self._books.credit(index, tokens)

    def has_begun(self, index: int) -> bool:
        return self._books.has_begun(index)

    def snapshot(self) -> Snapshot:
        """The facts of all connected engines together (see `Fleet.snapshot`); without any engine, the last known facts.
        To be called after `start`."""
        assert self._snapshot is not None
        return self._snapshot

    async def learn_adapters(self, folders: Mapping[str, str]) -> None:
        """Adapters that are not served any more are kept while this front has a request of one, which may go on with
        another engine."""
        for digest in [each for each in self._adapters if each not in folders and not self._books.num_with(each)]:
            del self._adapters[digest]
        for digest, folder in folders.items():
            self._adapters.pop(digest, None)
            self._adapters[digest] = folder
        await asyncio.gather(*(connection.tell_adapters() for connection, _ in self._connections.values()))

    async def load_adapter(self, digest: str, folder: str) -> Mapping[str, str]:
        connections = [connection for connection, _ in self._connections.values()]
        answers = await asyncio.gather(*(connection.load_adapter(digest, folder) for connection in connections))
        named = zip(connections, answers, strict=True)
        return {connection.note.name: refusal for connection, refusal in named if refusal} or (
            {} if connections else {"engines": "none is connected"}
        )

    async def num_with_adapter(self, digest: str) -> int:
        connections = [connection for connection, _ in self._connections.values()]
        counts = await asyncio.gather(*(connection.num_with_adapter(digest) for connection in connections))
        return self._books.num_with(digest) + sum(counts)

    def load(self) -> Load:
        return self._fleet.load

    @property
    def demand(self) -> Demand:
        """What the clients of this front want now."""
        requests, permits = self._books.num_requests, self.permits
        return Demand(self._fleet.least_wait_s, requests, requests / permits if permits else 0.0)

    @property
    def permits(self) -> int:
        """Number of requests that the engines allow this front; without any engine, the number that they allowed
        last."""
        return self._fleet.permits

    @property
    def num_engines(self) -> int:
        """Number of engines that are connected."""
        return len(self._fleet.engines)

    @property
    def num_suspects(self) -> int:
        """Number of requests that may have ended an engine."""
        return len(self._fleet.suspects)

    @property
    def num_cached_blocks(self) -> int:
        """Number of different blocks that engines are known to have cached."""
        return self._fleet.num_cached_blocks

    @property
    def front_id(self) -> str:
        return short_id(self._front_id)

    def engines(self) -> list[EngineNote]:
        return [connection.note for connection, _ in self._connections.values()]

    def watch_state(self, name: str, watcher: StateWatcher | None) -> None:
        if name in self._connections:
            self._connections[name][0].states.watch(watcher)
        elif watcher is not None:
            watcher(StateNews(problem=GONE))

    async def is_healthy(self) -> bool:
        """Whether the shards of any engine answer."""
        asked = [asyncio.ensure_future(connection.is_healthy()) for connection, _ in self._connections.values()]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
        finally:
            await cancelled(*asked)
        return False

    async def close(self) -> None:
        """Stops at once: every request ends with CLOSED. May be called more than once."""
        self._is_closed = True
        self._books.end_all(EndReason.CLOSED)
        if self._looking is not None:
            await cancelled(self._looking)
        await self.connect(())
