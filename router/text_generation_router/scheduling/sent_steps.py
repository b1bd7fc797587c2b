"""Numbers the steps of an epoch, and remembers the forward steps that have not answered."""

from collections import deque
from collections.abc import Iterator

from text_generation_router.scheduling.step import Chunk, ForwardStep


class SentSteps:
    def __init__(self) -> None:
        self.newest = 0  # number of the newest step
        self.answered = 0  # number of the newest step that has answered
        self._unanswered: deque[ForwardStep] = deque()

    def __iter__(self) -> Iterator[ForwardStep]:
        """The forward steps that have not answered, in order."""
        return iter(self._unanswered)

    def next_number(self) -> int:
        self.newest += 1
        return self.newest

    def send(self, step: ForwardStep) -> None:
        self._unanswered.append(step)

    def note_answered(self, number: int) -> list[Chunk]:
        """Notes that step `number` and all earlier steps have answered. Returns the chunks of the steps that were
        unanswered until now."""
        self.answered = number
        chunks: list[Chunk] = []
        while self._unanswered and self._unanswered[0].number <= number:
            chunks += self._unanswered.popleft().chunks
        return chunks

    def carry_any_but(self, request_id: int) -> bool:
        """Whether an unanswered step carries a request other than `request_id`, which could also be the cause of a
        loss.
        """
        return any(other != request_id for step in self._unanswered for other in step.request_ids)

    def void(self) -> None:
        """Forgets the unanswered steps, because none of them will answer any more."""
        self._unanswered.clear()
