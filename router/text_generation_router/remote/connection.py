"""The connection to one engine: calls until it answers, carries orders and messages, and calls again after a loss."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from text_generation_common.tasks import cancelled
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.remote import reading
from text_generation_router.remote.attempts import Attempts
from text_generation_router.remote.books import FrontBooks
from text_generation_router.remote.fleet import EngineView
from text_generation_router.remote.values import RemoteCounts
from text_generation_router.wire.errors import WireError
from text_generation_router.wire.version import VERSION

logger = logging.getLogger("text_generation_router")

# Most bytes of a message of an engine, and of a Submit.
RECEIVED_BYTES, SENT_BYTES = 5 * 2**20, 64 * 2**20
OPTIONS = [
    ("grpc.max_receive_message_length", RECEIVED_BYTES),
    ("grpc.max_send_message_length", SENT_BYTES),
    # A new call must not share a connection that gRPC waits up to 120 s to open again.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # An engine is asked for a sign of life each second, so that a cut link is noticed though nothing is sent.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
]
# Seconds: until an engine has answered Hello; without any message, after which it is lost (it tells its load every
# 0.25 s); until a Submit is answered; until Health is answered.
CONNECT_S, SILENT_S, ANSWER_S, HEALTH_S = 5.0, 3.0, 10.0, 2.0
# Seconds between two looks at the time, and a delay of them after which this process itself was stopped.
WATCH_S, STOPPED_S = 0.25, 1.0
# Seconds until the first try to connect again; the wait doubles up to the last.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class EngineAddress:
    target: str  # unix:PATH, or HOST:PORT
    credentials: grpc.ChannelCredentials | None = None  # None: without TLS


class SilentError(Exception):
    """The engine is silent, so the link to it may be cut."""


class EngineConnection:
    """`run` keeps the connection. `number` is the engine's number for the front."""

    def __init__(
        self,
        number: int,
        address: EngineAddress,
        front_id: str,
        books: FrontBooks,
        counts: RemoteCounts,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when the engine is connected or lost, and when it tells new facts."""
        self.number = number
        self._address = address
        self._front_id = front_id
        self._books = books
        self._counts = counts
        self._on_change = on_change
        self._stub: Any = None  # set while the engine is connected
        self._heard_s = 0.0  # time of the loop at which the engine last sent a message
        self._pause_s = FIRST_PAUSE_S

    async def run(self) -> None:
        while True:
            problem = await self._try()
            logger.debug("engine %s: %s", self._address.target, problem)
            await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    async def _try(self) -> str:
        """Connects, and returns when the connection is lost, with the reason."""
        async with self._channel() as channel:
            try:
                return await self._talk(pb_grpc.EngineServiceStub(channel))
            except WireError as error:
                self._counts.broken_rules += 1
                logger.error("engine %s breaks the protocol: %s", self._address.target, error)
                return str(error)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                return str(getattr(error, "details", lambda: "")() or type(error).__name__)

    def _channel(self) -> grpc.aio.Channel:
        target, credentials = self._address.target, self._address.credentials
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        return grpc.aio.secure_channel(target, credentials, options=OPTIONS)

    async def _talk(self, stub: Any) -> str:
        work = stub.Work()
        news = None
        try:
            async with asyncio.timeout(CONNECT_S):
                await work.write(reading.hello(self._front_id))
                facts = reading.facts_of_welcome(await _message(work))
                news = self._news(stub)
                told = reading.told_load_of((await _message(news)).load)
            has_orders = asyncio.Event()
            engine = EngineView(facts, told, Attempts(self.number, self._counts, has_orders.set))
            return await self._serve(stub, work, news, engine, has_orders)
        finally:
            work.cancel()
            if news is not None:
                news.cancel()

    def _news(self, stub: Any) -> Any:
        return stub.News(pb.NewsRequest(version=VERSION, front_id=self._front_id))

    async def _serve(self, stub: Any, work: Any, news: Any, engine: EngineView, has_orders: asyncio.Event) -> str:
        """From Welcome to the loss of the engine."""
        self._heard_s = asyncio.get_running_loop().time()
        self._stub, by_itself, problem = stub, False, "closed"
        logger.info("engine %s is connected, term %d", self._address.target, engine.facts.term)
        self._books.joined(self.number, engine)
        self._on_change()
        tasks = [
            asyncio.create_task(job)
            for job in (
                self._read(work, engine),
                self._write(work, engine.attempts, has_orders),
                self._listen(stub, news),
                self._watch(engine.attempts),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.aio.AioRpcError as error:
            by_itself, problem = True, str(error.details() or error.code().name)
            raise
        except (WireError, SilentError) as error:
            problem = str(error)
            if isinstance(error, WireError):
                raise
        finally:
            self._stub = None
            work.cancel()  # the stream is closed before its requests are submitted elsewhere
            await cancelled(*tasks)
            logger.warning("engine %s is lost: %s", self._address.target, problem)
            self._books.lost(self.number, by_itself=by_itself)
            self._on_change()
        return problem

    async def _read(self, work: Any, engine: EngineView) -> None:
        loop, books = asyncio.get_running_loop(), self._books
        while True:
            message = await _message(work)
            self._heard_s = loop.time()
            reading.take(message, engine, books)
            if message.HasField("epoch"):
                self._on_change()

    async def _write(self, work: Any, attempts: Attempts, has_orders: asyncio.Event) -> None:
        while True:
            await has_orders.wait()
            has_orders.clear()
            for order in attempts.take_orders():
                await work.write(reading.message_of(order))

    async def _listen(self, stub: Any, news: Any) -> None:
        """Reads news. A News call that ends is made again: only a loss of Work is a loss of the engine."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                message = await _message(news)
            except grpc.aio.AioRpcError:
                news.cancel()
                await asyncio.sleep(WATCH_S)
                news = self._news(stub)
                continue
            self._heard_s = loop.time()
            self._pause_s = FIRST_PAUSE_S
            if message.WhichOneof("message") == "load":
                self._books.told(self.number, reading.told_load_of(message.load))

    async def _watch(self, attempts: Attempts) -> None:
        """Raises SilentError or WireError when the engine is silent for too long."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(WATCH_S)
            now = loop.time()
            if now - before > STOPPED_S:
                self._heard_s = now  # this process was stopped, so the engine's messages wait to be read
            if now - self._heard_s > SILENT_S:
                raise SilentError(f"silent for {SILENT_S:g} s")
            since = attempts.unanswered_since
            if since is not None and self._books.now - since > ANSWER_S:
                raise WireError(f"a Submit was not answered within {ANSWER_S:g} s")

    async def is_healthy(self) -> bool:
        """Whether the engine is connected, and says that its shards answer."""
        if self._stub is None:
            return False
        try:
            answer = await self._stub.Health(pb.HealthRequest(), timeout=HEALTH_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.is_healthy)


async def _message(call: Any) -> Any:
    """The call's next message. Raises AioRpcError at its end."""
    message = await call.read()
    if message is not grpc.aio.EOF:
        return message
    raise grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
