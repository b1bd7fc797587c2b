"""A fake gRPC service of an engine on a unix socket. It obeys its fronts and makes the tokens of `expected_tokens`,
unless a test changes its behaviour."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc
from text_generation_router.engine.protocol import Ended, FirstStep, Tokens
from text_generation_router.engine.tests.fakes import next_token
from text_generation_router.errors import RefusedError
from text_generation_router.fleet.tests.engines import SNAPSHOT, Row
from text_generation_router.scheduling.request import EndReason
from text_generation_router.wire.steps import FrontTokens, ended_to_pb, refused_to_pb
from text_generation_router.wire.submits import Submitted, submitted
from text_generation_router.wire.version import VERSION, WITH_BEGUN, facts_of

VOCAB = SNAPSHOT.model.vocab_size


@dataclass(eq=False)
class FakeService(pb_grpc.EngineServiceServicer):
    """One run of an engine's process. `alter` may change or replace each message before it is sent, or send nothing
    (None)."""

    path: str
    term: int = 1
    digest: bytes = b"a"
    version: int = VERSION
    answers: bool = True  # whether Submits are answered
    refusal: RefusedError | None = None
    step_s: float = 0.001
    load: pb.Load = field(default_factory=lambda: pb.Load(is_ready=True, permits=8, wait_s=2.5))
    alter: Callable[[pb.EngineMessage], pb.EngineMessage | None] = lambda message: message
    tells_load: bool = True
    max_tokens: int = 10**9  # tokens after which the engine makes no more
    healthy: bool = True
    hellos: list[pb.Hello] = field(default_factory=list)
    submits: list[list[Submitted]] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)  # kinds of the messages received
    num_news: int = 0
    wanted_cache: list[bool] = field(default_factory=list)  # whether each News call asked for news of the cache
    # The Cache messages that each News call gets if it asks for news of the cache.
    caches: Callable[[], Iterable[pb.Cache]] = lambda: ()
    made: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    _out: "asyncio.Queue[pb.EngineMessage]" = field(default_factory=asyncio.Queue)
    _server: Any = None
    _news_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "FakeService":
        self._server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
        pb_grpc.add_EngineServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    async def die(self) -> None:
        await self._server.stop(None)

    def send(self, message: pb.EngineMessage) -> None:
        self._out.put_nowait(message)

    def end_news(self) -> None:
        self._news_over.set()

    async def Work(self, messages: AsyncIterator[pb.FrontMessage], context: Any) -> None:
        self.rows.clear()
        self._out = asyncio.Queue()
        self.hellos.append((await context.read()).hello)
        welcome = pb.Welcome(version=self.version, engine_id=f"life {self.term}", term=self.term, digest=self.digest)
        welcome.facts.CopyFrom(facts_of(SNAPSHOT))
        self.send(pb.EngineMessage(welcome=welcome))
        jobs = [asyncio.create_task(job) for job in (self._read(context), self._step(), self._write(context))]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in jobs:
                job.cancel()
                with suppress(asyncio.CancelledError, grpc.aio.UsageError, grpc.RpcError):
                    await job

    async def _read(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            self.orders.append(kind)
            if kind == "submit":
                self._take(submitted(message.submit, VOCAB))
            elif kind == "credit":
                if message.credit.index in self.rows:
                    self.rows[message.credit.index].credits += message.credit.tokens
            else:
                self._end(kind, getattr(message, kind).index)

    def _end(self, kind: str, index: int) -> None:
        row = self.rows.get(index)
        if row is not None and not (kind == "withdraw" and row.has_begun):
            del self.rows[index]
            reasons = {"end": EndReason.STOPPED, "cancel": EndReason.CANCELLED, "withdraw": EndReason.WITHDRAWN}
            self.send(pb.EngineMessage(ended=ended_to_pb(index, Ended(reasons[kind]))))

    def _take(self, sequences: list[Submitted]) -> None:
        self.submits.append(sequences)
        indexes = [sequence.index for sequence in sequences]
        if not self.answers:
            return
        if self.refusal is not None:
            self.send(pb.EngineMessage(refused=refused_to_pb(indexes, self.refusal)))
            return
        for each in sequences:
            self.rows[each.index] = Row(each, list(each.past.output_ids), each.credits or 10**9)
        self.send(pb.EngineMessage(accepted=pb.Accepted(indexes=indexes)))

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            step = FrontTokens()
            for index, row in list(self.rows.items()):
                if row.credits > 0 and self.made < self.max_tokens:
                    self._token(step, index, row)
            if step.indexes:
                self.send(pb.EngineMessage(tokens=step.message))

    def _token(self, step: FrontTokens, index: int, row: Row) -> None:
        request, position = row.submitted.request, len(row.output_ids)
        row.output_ids.append(next_token([*request.input_ids, *row.output_ids]))
        row.credits -= 1
        self.made += 1
        first = None if row.has_begun else FirstStep(0.01, 1)
        if first is not None and self.version >= WITH_BEGUN:
            self.send(pb.EngineMessage(begun=pb.Begun(indexes=[index])))
        row.has_begun = True
        step.add(index, position, Tokens((row.output_ids[-1],), (-1.0,), (), 0.001, first))
        if len(row.output_ids) == request.max_new_tokens:
            del self.rows[index]
            step.ended.append(ended_to_pb(index, Ended(EndReason.LENGTH, 0.01)))

    async def _write(self, context: Any) -> None:
        while True:
            if (message := self.alter(await self._out.get())) is not None:
                await context.write(message)

    async def News(self, request: pb.NewsRequest, context: Any) -> None:
        self.num_news += 1
        self.wanted_cache.append(request.wants_cache)
        self._news_over.clear()
        if self.tells_load:
            await context.write(pb.NewsMessage(load=self.load))
        for cache in self.caches() if request.wants_cache else ():
            await context.write(pb.NewsMessage(cache=cache))
        while not self._news_over.is_set():
            if self.tells_load:
                await context.write(pb.NewsMessage(load=self.load))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news_over.wait(), 0.02)

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        return pb.HealthResponse(is_healthy=self.healthy)
