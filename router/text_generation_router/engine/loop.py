"""Drives the shards of one epoch: keeps two steps in flight, and hands the tokens of each answer to the requests."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from text_generation_common import faults
from text_generation_common.tasks import cancelled
from text_generation_router.engine.adapter_reads import AdapterReads
from text_generation_router.engine.audit import Audit
from text_generation_router.engine.overload import Overload
from text_generation_router.engine.protocol import NO_FOLDERS
from text_generation_router.engine.requests import Requests
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.errors import ShardsError, StepAbortedError, StepFailedError
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import AdapterStep, ForwardStep, Step, StepAnswer

logger = logging.getLogger("text_generation_router")

# One step runs and one step waits behind it in the shard, so a shard never waits for the router.
MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class StepInFlight:
    step: Step
    answer: asyncio.Future[StepAnswer | None]
    sent_s: float

    @property
    def has_answered(self) -> bool:
        """False while the shards compute the step, and after the step has failed."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None


class StepLoop:
    def __init__(
        self,
        shards: ShardedClient,
        scheduler: Scheduler,
        requests: Requests,
        work: asyncio.Event,
        counts: StepMetrics,
        overload: Overload,
        audit: Audit,
        on_confirmed: Callable[[ShardedClient], None],
        adapter_folders: Mapping[str, str] = NO_FOLDERS,
    ) -> None:
        """`work` is set when a request that arrives, ends or goes on may change what the next step is. `on_confirmed`
        is called when the shards have answered their first forward step."""
        self._shards = shards
        self._scheduler = scheduler
        self._requests = requests
        self._work = work
        self._counts = counts
        self._overload = overload
        self._audit = audit
        self._on_confirmed = on_confirmed
        self._adapter_reads = AdapterReads(shards, scheduler, requests, work, adapter_folders)
        self._confirmed = False  # whether the shards have answered a forward step
        # The steps that were sent to the shards and have not been applied, oldest first.
        self._in_flight: deque[StepInFlight] = deque()

    async def run(self) -> None:
        """Sends steps until the shards are lost, then raises ShardsError."""
        stepping = asyncio.create_task(self._step_for_ever(), name="steps")
        try:
            ends: list[asyncio.Future[Any]] = [stepping, self._shards.lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stepping.done():
                stepping.result()
            raise ShardsError(self._shards.lost.result())
        finally:
            await cancelled(stepping)

    async def _step_for_ever(self) -> None:
        while True:
            while len(self._forwards) < MAX_IN_FLIGHT and self._send_next():
                pass
            if self._in_flight:
                await self._receive()
            else:
                self._rest()
                await self._work.wait()
            self._work.clear()

    def _send_next(self) -> bool:
        """Decides a step without knowing the tokens of the step before it, and sends it. False: no step can be sent
        now."""
        started_s = time.perf_counter()
        step = self._scheduler.next_step()
        self._adapter_reads.begin(self._scheduler.adapters.take_unready())
        if step is None:
            return False
        self._send(step)
        if isinstance(step, ForwardStep) and step.concat_reason:
            self._counts.joined_running(time.perf_counter() - started_s)
        return True

    def _send(self, step: Step) -> None:
        if isinstance(step, ForwardStep):
            faults.point("engine.step", lambda: [i for chunk in step.chunks if chunk.first for i in chunk.first.ids])
        now = time.perf_counter()
        if isinstance(step, ForwardStep):
            self._requests.begin(step, now)  # before the step, which may be the end of this process
            self._counts.sent(step)
        self._in_flight.append(StepInFlight(step, asyncio.ensure_future(self._shards.run(step)), now))

    async def _receive(self) -> None:
        """Waits for the answer of the oldest step in flight and applies it."""
        # If the wait is cancelled, the step stays in flight, so that `stop` can return it.
        oldest = self._in_flight[0]
        try:
            answer = await oldest.answer
        except StepFailedError as error:
            await self._start_again(oldest.step, str(error))
            return
        self._in_flight.popleft()
        received = time.perf_counter()
        if answer is not None and isinstance(oldest.step, ForwardStep):
            if not self._confirmed:
                self._confirmed = True
                self._on_confirmed(self._shards)
            self._requests.publish(answer, self._scheduler.apply(answer), received)
            self._counts.answered(oldest.step, answer, oldest.sent_s, received)
            self._overload.note_step(oldest.sent_s, received)
        elif answer is not None and isinstance(oldest.step, AdapterStep):
            self._scheduler.apply(StepAnswer(oldest.step.number))
            if answer.refusal:
                self._requests.refuse_adapter(oldest.step.adapter, answer.refusal)
            else:
                self._scheduler.note_adapter(oldest.step.adapter)
        else:
            self._scheduler.apply(StepAnswer(oldest.step.number))
            self._counts.filtered(oldest.sent_s, received)

    async def _start_again(self, failed: Step, reason: str) -> None:
        """Restarts all running requests: step `failed` raised in a shard, and no later step was run. Only requests in
        step `failed` can have caused the failure.
        """
        logger.error("%s: starting all running requests again", reason)
        blamed = [failed] if isinstance(failed, ForwardStep) else []
        for step in blamed:
            self._counts.failed(step)
        # The shards answer that they did not run the later steps.
        while len(self._in_flight) > 1:
            with suppress(StepAbortedError, StepFailedError):
                await self._in_flight[1].answer
            del self._in_flight[1]
        self._in_flight.clear()
        self._requests.put_back(blamed, reason)
        self._send(self._scheduler.clear())

    def _rest(self) -> None:
        if self._scheduler.is_idle:
            self._audit.note_idle(self._scheduler, self._shards)

    async def take_answers(self) -> None:
        """Applies the answers that came before the shards were lost."""
        while self._in_flight and self._in_flight[0].has_answered:
            await self._receive()

    async def stop(self) -> list[ForwardStep]:
        """Drops the steps in flight. Returns the forward steps among them."""
        unanswered, answers = self._forwards, [sent.answer for sent in self._in_flight]
        self._in_flight.clear()
        await cancelled(*answers)
        await self._adapter_reads.close()
        return unanswered

    @property
    def _forwards(self) -> list[ForwardStep]:
        """The forward steps in flight."""
        return [sent.step for sent in self._in_flight if isinstance(sent.step, ForwardStep)]
