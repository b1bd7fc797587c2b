"""The steps that were sent to the shards and have not been applied, oldest first."""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from text_generation_common.tasks import cancelled
from text_generation_router.errors import StepAbortedError, StepFailedError
from text_generation_router.scheduling.step import ForwardStep, Step, StepAnswer


@dataclass(slots=True)
class StepInFlight:
    step: Step
    answer: asyncio.Future[StepAnswer | None]
    sent_s: float

    @property
    def has_answered(self) -> bool:
        """False while the shards compute the step, and after the step has failed."""
        return self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None


class StepsInFlight:
    def __init__(self) -> None:
        self.num_forwards = 0
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> StepInFlight:
        return self._steps[0]

    @property
    def forward_steps(self) -> list[ForwardStep]:
        return [sent.step for sent in self._steps if isinstance(sent.step, ForwardStep)]

    def add(self, sent: StepInFlight) -> None:
        self.num_forwards += isinstance(sent.step, ForwardStep)
        self._steps.append(sent)

    def remove_oldest(self) -> None:
        self.num_forwards -= isinstance(self._steps.popleft().step, ForwardStep)

    async def finish_failed(self) -> None:
        """To be called after the oldest step has failed. Waits until the shards have answered that they did not run the
        later steps.
        """
        while len(self._steps) > 1:
            with suppress(StepAbortedError, StepFailedError):
                await self._steps[1].answer
            del self._steps[1]
        self._forget()

    async def drop(self) -> None:
        """Stops waiting for the answers."""
        answers = [sent.answer for sent in self._steps]
        self._forget()
        await cancelled(*answers)

    def _forget(self) -> None:
        self._steps.clear()
        self.num_forwards = 0
