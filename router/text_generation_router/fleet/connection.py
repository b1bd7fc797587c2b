"""The connection to one engine: tries to connect until the engine answers, carries orders and messages, and connects
again after a loss."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from text_generation_common.backoff import Backoff
from text_generation_common.cluster.endpoints import Endpoint, UnixEndpoint
from text_generation_common.cluster.handshakes import problem as problem_of
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_common.errors import CredentialsError
from text_generation_common.tasks import cancelled
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.protocol import NO_ANSWER, NO_FOLDERS, NOT_CONNECTED, EngineNote, EngineStanding
from text_generation_router.fleet import reading
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.books import FrontBooks
from text_generation_router.fleet.cache_news import EVERY_MS, next_pace_ms
from text_generation_router.fleet.engines import EngineView, Fleet
from text_generation_router.fleet.state_calls import StateCalls
from text_generation_router.fleet.values import EngineFacts, EngineLoss, NewsBudget, RemoteCounts
from text_generation_router.wire.version import VERSION, WireError

logger = logging.getLogger("text_generation_router")

# Maximum size of a message in bytes: a Submit has 4 bytes for each token of the longest context, and up to 1 MiB of
# other fields.
MESSAGE_BYTES = 16 * 2**20
# Deadlines in seconds: for the engine's answer to Hello; for its next message, after which the engine counts as lost
# (its load comes every 0.25 to 1 s); for its answer to a Submit; for its answer to Health.
CONNECT_S, SILENT_S, ANSWER_S, HEALTH_S = 5.0, 3.0, 10.0, 2.0
# Seconds for an engine to have its shards read an adapter.
CHECK_S = 120.0
# How often an engine is told of the adapters before it is left, and seconds between two times.
TELL_TRIES, TELL_AGAIN_S = 3, 0.2
OLDER = "its version loads no adapters while it runs"
# If an engine has sent nothing for this time, in seconds, before its stream breaks, its process did not end by itself:
# the link was cut, or the process was stopped from outside. gRPC's pings may end the stream then, perhaps before
# SILENT_S.
QUIET_S = 1.0
# gRPC status codes with which an engine that still runs ends a front's stream.
CUT_OFF = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
# gRPC's text, with the code INTERNAL, for a write to a call that has ended while gRPC has not read the call's own
# status yet.
WRITE_FAILED = "Internal error from Core"
# gRPC's text for a connection whose other side has left a ping unanswered for security.PING_ANSWER_MS. gRPC measures
# that silence itself, and `heard_s` may be younger: it is when this process came to read a message.
PING_UNANSWERED = "ping timeout"
# Seconds between two readings of the clock. If a reading is STOPPED_S late, this process itself was stopped.
WATCH_S, STOPPED_S = 0.25, 1.0
# Minimum number of seconds between two Loads that the front reads. An engine that sends more Loads has to wait.
LEAST_LOAD_GAP_S = 0.01
# Seconds until the first try to connect again, and the longest wait.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
# Maximum number of reasons that are logged for one engine that cannot be reached.
MAX_LOGGED = 8
# gRPC's texts for a connection that the other side has closed.
CUT = ("Socket closed", "recvmsg:Connection reset by peer")


class SilentError(Exception):
    """The engine is silent, so the link to it may be cut."""


class EngineConnection:
    """`run` keeps the connection. `number` is the engine's number for the front."""

    def __init__(
        self,
        number: int,
        endpoint: Endpoint,
        security: Security,
        front_id: str,
        fleet: Fleet,
        books: FrontBooks,
        counts: RemoteCounts,
        on_change: Callable[[], None],
        adapters: Mapping[str, str] = NO_FOLDERS,
    ) -> None:
        """`adapters`: the folders of LoRA adapters, by digest, which every engine is told of. `on_change` is called
        when the engine is connected or lost, and when it reports new facts."""
        self.number = number
        self._endpoint = endpoint
        self._security = security
        self._front_id = front_id
        self._fleet = fleet
        self._books = books
        self._counts = counts
        self._on_change = on_change
        self._adapters = adapters
        self.states = StateCalls(front_id)
        self.loss, self.lost_s = "", 0.0  # why the engine was lost last, and when, by the event loop's clock
        self._stub: Any = None  # set while the engine is connected
        self._untold = asyncio.Event()  # the engine does not take the list of adapters
        self._news_budget = NewsBudget(0.0)
        self._pace_ms = EVERY_MS
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._logged: set[str] = set()  # the problems that were logged since the engine was connected last

    async def run(self) -> None:
        while True:
            self._log_problem(await self._try())
            await asyncio.sleep(self._backoff.failed(asyncio.get_running_loop().time()) * random.uniform(0.5, 1.0))

    def _log_problem(self, problem: str) -> None:
        """Logs why an engine at a TCP port is not connected: once for each reason, until it is connected. About engines
        at unix sockets the launcher writes its own lines."""
        problem = problem_of(problem)
        if isinstance(self._endpoint, UnixEndpoint) or problem in self._logged or len(self._logged) >= MAX_LOGGED:
            logger.debug("engine %s: %s", self._endpoint.target, problem)
            return
        self._logged.add(problem)
        if self._security.identity is not None and problem in CUT:
            # A client learns of the refusal of its certificate by the end of the connection, and by nothing else.
            problem += ". If it refuses this front's certificate, its log tells why"
        logger.warning("engine %s cannot be reached: %s", self._endpoint.target, problem)

    async def _try(self) -> str:
        """Connects, and returns when the connection is lost, with the reason."""
        try:
            async with self._security.channel(self._endpoint, Role.ENGINE, MESSAGE_BYTES) as channel:
                return await self._talk(pb_grpc.EngineServiceStub(channel))
        except WireError as error:
            self._counts.broken_rules += 1
            logger.error("engine %s breaks the protocol: %s", self._endpoint.target, error)
            return str(error)
        except (grpc.aio.AioRpcError, TimeoutError, CredentialsError) as error:
            return str(getattr(error, "details", lambda: "")() or error or type(error).__name__)

    async def _talk(self, stub: Any) -> str:
        work = stub.Work()
        news = None
        try:
            async with asyncio.timeout(CONNECT_S):
                await _send(work, reading.hello(self._front_id))
                facts = reading.facts_of_welcome(await _message(work))
                news = self._news(stub)
                report = reading.load_report_of((await _message(news)).load)
                told: Mapping[str, str] = {}
                while told != self._adapters:  # before the first request; the list may change meanwhile
                    told = dict(self._adapters)
                    facts = await self._told_adapters(stub, facts)
            has_orders = asyncio.Event()
            engine = EngineView(facts, report, Attempts(self.number, self._counts, has_orders.set))
            return await self._serve(stub, work, news, engine, has_orders)
        finally:
            work.cancel()
            if news is not None:
                news.cancel()

    async def _told_adapters(self, stub: Any, facts: EngineFacts) -> EngineFacts:
        try:
            answer = await stub.Adapters(_adapters_to_pb(self._adapters))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return facts  # An engine of an older build gets no request with these adapters.
            raise
        return facts if answer.refusal else facts.with_adapters(self._adapters)

    async def load_adapter(self, digest: str, folder: str) -> str:
        """Has the engine read an adapter. Returns why requests cannot ask for it there, or ""."""
        answer = await self._ask_adapters(_adapters_to_pb({**self._adapters, digest: folder}, check=digest), CHECK_S)
        if isinstance(answer, str):
            return answer
        if not answer.refusal:
            self._note_adapters({digest: folder})
        return str(answer.refusal)

    async def tell_adapters(self) -> None:
        """Tells the engine of all adapters. An engine that is not connected is told when it is, and one that does not
        answer is left."""
        for _ in range(TELL_TRIES):
            answer = await self._ask_adapters(_adapters_to_pb(self._adapters), HEALTH_S)
            if not isinstance(answer, str):
                if not answer.refusal:
                    self._note_adapters(self._adapters)
                return
            if answer in (NOT_CONNECTED, OLDER):
                return
            await asyncio.sleep(TELL_AGAIN_S)
        self._untold.set()

    async def num_with_adapter(self, digest: str) -> int:
        """Number of the engine's requests of an adapter. An engine that is not connected has none, and one that does
        not answer may have one."""
        answer = await self._ask_adapters(pb.AdaptersRequest(count=digest), HEALTH_S)
        if not isinstance(answer, str):
            return int(answer.requests)
        if answer in (NOT_CONNECTED, OLDER):
            return 0
        if answer not in self._logged:
            self._logged.add(answer)
            logger.warning("engine %s: whether it has requests of an adapter: %s", self._endpoint.target, answer)
        return 1

    async def _ask_adapters(self, request: pb.AdaptersRequest, timeout_s: float) -> pb.AdaptersResponse | str:
        """The engine's answer, or why there is none."""
        if self._stub is None:
            return NOT_CONNECTED
        try:
            answer: pb.AdaptersResponse = await self._stub.Adapters(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return OLDER
            return f"{NO_ANSWER}: {error.details() or error.code().name}"
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return f"{NO_ANSWER}: its connection is lost"
        return answer

    def _note_adapters(self, digests: Iterable[str]) -> None:
        if (view := self._fleet.engines.get(self.number)) is not None:
            view.facts = view.facts.with_adapters(digests)
            self._on_change()

    def _news(self, stub: Any, wants_cache: bool = False) -> Any:
        wanted = pb.NewsRequest(version=VERSION, front_id=self._front_id, wants_cache=wants_cache)
        wanted.every_ms = self._pace_ms
        return stub.News(wanted)

    async def _serve(self, stub: Any, work: Any, news: Any, engine: EngineView, has_orders: asyncio.Event) -> str:
        """Serves the connection from Welcome to the loss of the engine. Returns the reason of the loss."""
        engine.heard_s = asyncio.get_running_loop().time()
        self._stub, loss, problem = stub, EngineLoss.OUTSIDE, "closed"
        self._logged.clear()
        self._untold.clear()
        logger.info("engine %s is connected, term %d", self._endpoint.target, engine.facts.term)
        self._books.joined(self.number, engine)
        self.states.connected(stub)
        self._on_change()
        tasks = [
            asyncio.create_task(job)
            for job in (
                self._read(work, engine),
                self._write(work, engine.attempts, has_orders),
                self._listen(stub, news, engine),
                self._watch(engine),
                self._until_untold(),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.aio.AioRpcError as error:
            loss = self._cause(error, engine)
            problem = str(error.details() or error.code().name)
            raise
        except (WireError, SilentError) as error:
            problem = str(error)
            if isinstance(error, WireError):
                raise
            loss = self._silence()
        except asyncio.CancelledError:  # the front ends, or has no more use for the engine
            problem = ""
            raise
        finally:
            self._stub = None
            work.cancel()  # the stream is closed before its requests are submitted elsewhere
            await cancelled(*tasks)
            if problem:
                self.loss, self.lost_s = problem, asyncio.get_running_loop().time()
                logger.warning("engine %s is lost: %s", self._endpoint.target, problem)
            else:
                logger.info("engine %s is left", self._endpoint.target)
            self._books.lost(self.number, loss)
            self._on_change()
            await self.states.lost()
        return problem

    def _cause(self, error: grpc.aio.AioRpcError, engine: EngineView) -> EngineLoss:
        if error.code() in CUT_OFF and error.details() != WRITE_FAILED:
            return EngineLoss.CUT_OFF
        silent_s = asyncio.get_running_loop().time() - engine.heard_s
        is_silent = silent_s >= self._quiet_s or PING_UNANSWERED in (error.details() or "")
        return self._silence() if is_silent else EngineLoss.DIED

    def _silence(self) -> EngineLoss:
        """The loss of an engine that was silent. If no engine sends messages, this front's own link may be cut."""
        now = asyncio.get_running_loop().time()
        others = (view for number, view in self._fleet.engines.items() if number != self.number)
        is_heard = any(now - view.heard_s < self._quiet_s for view in others)
        return EngineLoss.SILENT if is_heard else EngineLoss.OUTSIDE

    @property
    def _quiet_s(self) -> float:
        return QUIET_S + (self._pace_ms - EVERY_MS) / 1000

    async def _read(self, work: Any, engine: EngineView) -> None:
        loop, books = asyncio.get_running_loop(), self._books
        while True:
            message = await _message(work)
            engine.heard_s = loop.time()
            try:
                reading.take(message, engine, books)
            except WireError:
                raise
            except Exception as error:  # a bug of this front: requests on other engines go on
                logger.exception("a message of engine %s could not be taken", self._endpoint.target)
                raise WireError(f"a message led to {type(error).__name__}") from error
            if message.HasField("epoch"):
                self._on_change()

    async def _write(self, work: Any, attempts: Attempts, has_orders: asyncio.Event) -> None:
        while True:
            await has_orders.wait()
            has_orders.clear()
            for order in attempts.take_orders():
                await _send(work, reading.message_of(order))

    async def _listen(self, stub: Any, news: Any, engine: EngineView) -> None:
        """Reads news. A News call that ends is made again: only a loss of Work is a loss of the engine. The call is
        also made again if news of the cache are missing, or if the front begins or ceases to want news of the cache."""
        wants_cache = False
        while True:
            try:
                while self._wants_same_news(wants_cache) and self._take_news(message := await _message(news), engine):
                    if message.HasField("load"):
                        await asyncio.sleep(LEAST_LOAD_GAP_S)
                await asyncio.sleep(LEAST_LOAD_GAP_S)
            except grpc.aio.AioRpcError:
                pass
            finally:
                news.cancel()
            await asyncio.sleep(WATCH_S)
            wants_cache, self._pace_ms = self._fleet.wants_cache, next_pace_ms(self._pace_ms, len(self._fleet.engines))
            news = self._news(stub, wants_cache)

    async def _until_untold(self) -> None:
        await self._untold.wait()
        raise SilentError("it did not take the list of adapters")

    def _wants_same_news(self, wants_cache: bool) -> bool:
        pace_ms = next_pace_ms(self._pace_ms, len(self._fleet.engines))
        return wants_cache == self._fleet.wants_cache and pace_ms == self._pace_ms

    def _take_news(self, message: pb.NewsMessage, engine: EngineView) -> bool:
        """Gives a message of the News call to the books. False: earlier news of the cache are missing."""
        engine.heard_s = asyncio.get_running_loop().time()
        self._backoff.reset()
        size = message.ByteSize()
        self._counts.news_bytes += size
        self._news_budget.take(size, engine.heard_s)
        match message.WhichOneof("message"):
            case "load":
                self._books.reported(self.number, reading.load_report_of(message.load))
            case "cache":
                is_next = self._fleet.cached(self.number, message.cache.sequence, reading.cache_news_of(message.cache))
                self._counts.news_gaps += not is_next
                return is_next
        return True

    async def _watch(self, engine: EngineView) -> None:
        """Raises SilentError or WireError when the engine is silent for too long."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(WATCH_S)
            now = loop.time()
            if now - before > STOPPED_S:
                engine.heard_s = now  # this process was stopped, so the engine's messages wait to be read
                continue
            if now - engine.heard_s > SILENT_S:
                raise SilentError(f"silent for {SILENT_S:g} s")
            since = engine.attempts.unanswered_since
            if since is not None and self._books.now - since > ANSWER_S:
                raise WireError(f"a Submit was not answered within {ANSWER_S:g} s")

    @property
    def note(self) -> EngineNote:
        """The engine, for people."""
        name = self._endpoint.target
        loss_s = round(asyncio.get_running_loop().time() - self.lost_s, 1) if self.loss else None
        if self._stub is None or (view := self._fleet.engines.get(self.number)) is None:
            return EngineNote(name, EngineStanding.AWAY, loss=self.loss, loss_s=loss_s)
        load = view.report.load
        standing = (
            EngineStanding.DRAINING
            if load.is_draining
            else EngineStanding.READY
            if load.is_ready
            else EngineStanding.LOST
        )
        return EngineNote(name, standing, load.running, load.waiting, loss=self.loss, loss_s=loss_s)

    async def is_healthy(self) -> bool:
        """Whether the engine is connected, and its shards answer."""
        if self._stub is None:
            return False
        try:
            answer = await self._stub.Health(pb.HealthRequest(), timeout=HEALTH_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.is_healthy)


def _adapters_to_pb(folders: Mapping[str, str], check: str = "") -> pb.AdaptersRequest:
    adapters = [pb.Adapter(digest=digest, folder=folder) for digest, folder in folders.items()]
    return pb.AdaptersRequest(adapters=adapters, check=check)


async def _send(call: Any, message: pb.FrontMessage) -> None:
    """Writes a message to the call. Raises AioRpcError if the call has ended."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise await _end_of(call) from None


async def _message(call: Any) -> Any:
    """The call's next message. Raises AioRpcError at its end."""
    if (message := await call.read()) is grpc.aio.EOF:
        raise await _end_of(call)
    return message


async def _end_of(call: Any) -> grpc.aio.AioRpcError:
    metadata = await call.initial_metadata(), await call.trailing_metadata()
    return grpc.aio.AioRpcError(await call.code(), *metadata, await call.details())
