"""The gRPC service engine.v1 over the engine of this process."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Never, Protocol

import grpc
from google.protobuf.message import DecodeError

from text_generation_common.tasks import cancelled
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.local import MAX_KNOWN, TAKES_NONE, LocalEngine
from text_generation_router.engine_service.arrivals import Arrivals, ArrivingFront, arriving_front
from text_generation_router.engine_service.fronts import ConnectedFronts
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.news import NewsPublisher
from text_generation_router.engine_service.sinks import Outbox, Trial
from text_generation_router.engine_service.states import StateStreams
from text_generation_router.engine_service.work import FrontCounts, FrontWork
from text_generation_router.errors import FrontLostError
from text_generation_router.fleet.cache_news import CacheLog
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.page import OwnFamilies, render_in_turns
from text_generation_router.wire.version import WireError, check_version, facts_of

logger = logging.getLogger("text_generation_router")

# Deadlines in seconds: for a front's first message, and for the engine's last message to be sent.
HELLO_S, LAST_S = 5.0, 1.0
MAX_ID_CHARS = 128
# Maximum number of requests of one front, in multiples of the engine's permits: after a loss of other engines, a front
# submits all their requests at once.
MAX_OPEN = 4
# Seconds for which a new stream waits for its refusal, so that a front that calls again at once costs the engine
# little; maximum number of streams that wait so (further streams are refused at once); seconds between two log lines
# about them.
REFUSED_AFTER_S, MAX_REFUSED, LOGGED_EACH_S = 1.0, 256, 60.0
CODES: dict[type[BaseException], grpc.StatusCode] = {
    WireError: grpc.StatusCode.INVALID_ARGUMENT,
    FrontLostError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class StreamContext(Protocol):
    """The methods of gRPC's call context that the servicer uses."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> None: ...

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Never: ...

    def peer(self) -> str: ...


class EngineServicer(pb_grpc.EngineServiceServicer):
    def __init__(
        self, engine: LocalEngine, identity: EngineIdentity, metrics: Metrics, permits: int, cache: CacheLog | None
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._metrics = metrics
        self._max_open = MAX_OPEN * permits
        self._counts = FrontCounts(metrics.registry)
        self._trial = Trial()
        self._arrivals = Arrivals(time.monotonic())
        self._num_refused = 0  # fronts that wait for their refusal
        self._logged_s = -LOGGED_EACH_S
        self.fronts = ConnectedFronts(permits, self._counts)
        self.news = NewsPublisher(engine, self.fronts, cache)
        self._states = StateStreams(engine)
        engine.show_fronts(self.fronts.notes)
        engine.watch(self.fronts)
        engine.watch(self.news)

    # A method may also be a coroutine that reads and writes by its context, which the stubs' types do not say.
    async def Work(  # type: ignore[override]
        self, messages: AsyncIterator[pb.FrontMessage], context: StreamContext
    ) -> None:
        try:
            caller, version = await _hello(context)
        except WireError as broken:
            await self._hold()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(broken))
        if reason := self._arrivals.refusal(caller, time.monotonic()):
            self._note_turned_away(caller, reason)
            await self._hold()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        try:
            await self._serve(self._welcome(caller.front_id, version), context)
        finally:
            self._arrivals.leave(caller)

    def _note_turned_away(self, caller: ArrivingFront, reason: str) -> None:
        self._counts.turned_away.inc()
        now = time.monotonic()
        if now - self._logged_s >= LOGGED_EACH_S:
            self._logged_s = now
            logger.warning("a front%s is turned away: %s", f" of {caller.address}" if caller.address else "", reason)

    async def _hold(self) -> None:
        """Waits until a refused stream may be told of its refusal."""
        if self._num_refused >= MAX_REFUSED:
            return
        self._num_refused += 1
        try:
            await asyncio.sleep(REFUSED_AFTER_S)
        finally:
            self._num_refused -= 1

    async def _serve(self, work: FrontWork, context: StreamContext) -> None:
        """Serves a stream from Welcome to its end."""
        sending = asyncio.create_task(work.outbox.run(context.write), name="front writes")
        reading = asyncio.create_task(_read(work, context), name="front reads")
        ends = [self.fronts.add(work), reading, sending]
        for task in (reading, sending):
            task.add_done_callback(_take_error)
        self.news.hurry()
        error: BaseException | None = None
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = next((end.exception() for end in ends if end.done()), None)
        finally:
            self.fronts.remove(work)
            work.close()
            self._counts.ended(error)
            work.outbox.close()
            await asyncio.wait([sending], timeout=LAST_S)
            await cancelled(*ends)
        await self._end(context, error)

    def _welcome(self, front_id: str, version: int) -> FrontWork:
        """The FrontWork of a front whose stream opens, with a Welcome in its outbox."""
        outbox = Outbox()
        identity = self._identity
        welcome = pb.Welcome(
            version=version,
            engine_id=identity.engine_id,
            term=identity.term,
            digest=identity.digest,
            facts=facts_of(self._engine.snapshot()),
        )
        outbox.put(pb.EngineMessage(welcome=welcome))
        if not self._engine.load().is_ready:
            outbox.put(pb.EngineMessage(epoch=pb.Epoch(reason="the shards are not ready")))
        share, trial = self.news.note_share, self._trial
        return FrontWork(
            front_id=front_id,
            engine=self._engine,
            outbox=outbox,
            counts=self._counts,
            max_open=self._max_open,
            note_share=share,
            trial=trial,
            version=version,
        )

    async def _end(self, context: StreamContext, error: BaseException | None) -> None:
        """Ends a front's stream with its error, if there is one."""
        if error is None:
            return
        code = CODES.get(type(error), grpc.StatusCode.INTERNAL)
        if code is grpc.StatusCode.INTERNAL:
            logger.error("a front's stream failed", exc_info=error)
        else:
            logger.warning("a front is disconnected: %s", error)
        with suppress(TimeoutError):  # a front that reads nothing may not read this message either
            async with asyncio.timeout(LAST_S):
                await context.abort(code, str(error))

    async def News(  # type: ignore[override]
        self, request: pb.NewsRequest, context: StreamContext
    ) -> None:
        try:
            check_version(request.version)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if (work := self.fronts.find(request.front_id)) is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the front has no Work stream")
        await asyncio.sleep(work.news_pace.take(1, time.monotonic()))
        reader = self.news.open(request.front_id, request.wants_cache, request.every_ms / 1000)
        try:
            await reader.run(context.write)
        except FrontLostError as error:
            await self._end(context, error)
        finally:
            self.news.forget(reader)

    async def State(  # type: ignore[override]
        self, request: pb.StateRequest, context: StreamContext
    ) -> None:
        try:
            check_version(request.version)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if (work := self.fronts.find(request.front_id)) is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the front has no Work stream")
        await asyncio.sleep(work.news_pace.take(1, time.monotonic()))
        try:
            await self._states.run(request.front_id, context.write)
        except FrontLostError as error:
            await self._end(context, error)

    async def close(self) -> None:
        """Ends the engine: its requests end with ENGINE_CLOSED, then the streams end."""
        await self._engine.close()
        self.fronts.close()
        self.news.close()
        self._states.close()

    async def Health(self, request: pb.HealthRequest, context: StreamContext) -> pb.HealthResponse:
        return pb.HealthResponse(is_healthy=await self._engine.is_healthy())

    async def Adapters(self, request: pb.AdaptersRequest, context: StreamContext) -> pb.AdaptersResponse:
        folders = {adapter.digest: adapter.folder for adapter in request.adapters}
        # A front names those of its running requests, too, which may be served no more.
        if len(folders) > MAX_KNOWN or not folders.keys() >= {*filter(None, [request.check])}:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many adapters, or another one to be checked")
        engine, refusals = self._engine, [""]
        if request.check:
            refusals = [*(await engine.load_adapter(request.check, folders[request.check])).values(), ""]
        elif folders and not engine.snapshot().model.adapter_room.grows:
            refusals = [TAKES_NONE]
        if not refusals[0]:
            await engine.learn_adapters(folders)
        count = await engine.num_with_adapter(request.count) if request.count else 0
        return pb.AdaptersResponse(refusal=refusals[0], requests=count)

    async def Metrics(self, request: pb.MetricsRequest, context: StreamContext) -> pb.MetricsResponse:
        page = await render_in_turns(OwnFamilies(self._metrics.registry))
        return pb.MetricsResponse(text=page.encode())


def _take_error(task: "asyncio.Task[None]") -> None:
    """Takes the error of a task that `Work` did not wait for: gRPC may cancel a call twice when the front's process
    ends.

    Without this, asyncio would log the error as one that was never looked at.
    """
    if not task.cancelled():
        task.exception()


async def _next(context: StreamContext) -> pb.FrontMessage | None:
    """The front's next message; None: there is none. Raises WireError."""
    try:
        message = await context.read()
    except DecodeError as error:
        raise WireError(str(error)) from None
    return None if message is grpc.aio.EOF else message


async def _first(context: StreamContext) -> pb.FrontMessage:
    try:
        async with asyncio.timeout(HELLO_S):
            message = await _next(context)
    except TimeoutError:
        raise WireError(f"no Hello came within {HELLO_S:g} s") from None
    if message is None:
        raise WireError("the stream ended before Hello")
    return message


async def _hello(context: StreamContext) -> tuple[ArrivingFront, int]:
    """Reads a front's Hello: the front's id, and the version of the protocol that both sides speak. Raises
    WireError."""
    message = await _first(context)
    if message.WhichOneof("message") != "hello":
        raise WireError("the first message of a front is not Hello")
    front_id, version = message.hello.front_id, check_version(message.hello.version)
    if not 0 < len(front_id) <= MAX_ID_CHARS:
        raise WireError(f"the id of a front has {len(front_id)} characters")
    return arriving_front(front_id, context.peer()), version


async def _read(work: FrontWork, context: StreamContext) -> None:
    """Handles the front's messages until the stream ends. Raises WireError."""
    while (message := await _next(context)) is not None:
        if wait_s := work.handle(message):
            await asyncio.sleep(wait_s)
