"""The newest steps of an engine, noted only while the engine is watched."""

from collections import deque

from text_generation_router.scheduling.step import ForwardStep, StepAnswer
from text_generation_router.view.values import StepColumns

# Number of steps of a state. The page keeps more: states overlap.
MAX_STEPS = 64


class StepRing:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, ...]] = deque(maxlen=MAX_STEPS)

    def note(self, step: ForwardStep, answer: StepAnswer) -> None:
        prompt = sum(chunk.end - chunk.start for chunk in step.chunks)
        times = answer.total_ns // 1000, answer.gap_ns // 1000
        self._steps.append((step.number, len(step.decode_ids), prompt, step.joined, *times))

    def table(self) -> StepColumns:
        return StepColumns(*zip(*self._steps, strict=True)) if self._steps else StepColumns()
