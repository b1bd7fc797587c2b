"""How long another owner's prompts keep a request waiting, in prompt tokens and steps."""

from collections import deque

from text_generation_router.scheduling.chunks import PARTS, SHARED_STEPS, OwnerParts
from text_generation_router.scheduling.request import GenerationRequest, Limits, Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep, Step
from text_generation_router.scheduling.tenant import Owner
from text_generation_router.scheduling.tests.answers import answer

BUDGET, LONG = 64, 100


def crowd(prompts: int) -> Scheduler:
    """Long prompts of one owner wait."""
    scheduler = Scheduler(Limits(4000, 64, BUDGET))
    for i in range(prompts):
        scheduler.add(GenerationRequest(tuple(range(LONG * i, LONG * (i + 1))), 2, share=Share("many")))
    return scheduler


def add_small(scheduler: Scheduler) -> Running:
    return scheduler.add(GenerationRequest((1, 2), 1, share=Share("one")))


class TwoAhead:
    """Keeps two steps in flight, as the engine does."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[Step | None] = deque([scheduler.next_step(), scheduler.next_step()])

    def _next(self) -> Step | None:
        answer(self._scheduler, self._in_flight.popleft())
        self._in_flight.append(self._scheduler.next_step())
        return self._in_flight[-1]

    def run_to_end_of(self, request: Running) -> None:
        while not request.ended:
            self._next()

    def prompt_tokens_until_start_of(self, request: Running) -> list[int]:
        """Prompt tokens of other requests in each step in flight, and in each step from then to the request's first."""
        steps = list(self._in_flight)
        while not request.has_begun:
            steps.append(self._next())
        return [
            sum(chunk.end - chunk.start for chunk in step.chunks if chunk.request_id != request.id)
            for step in steps
            if isinstance(step, ForwardStep)
        ]


def test_while_owners_share_the_server_a_request_waits_for_short_steps_only() -> None:
    scheduler = crowd(40)
    steps = TwoAhead(scheduler)
    steps.run_to_end_of(add_small(scheduler))
    tokens = steps.prompt_tokens_until_start_of(add_small(scheduler))
    assert max(tokens) == BUDGET // PARTS and len(tokens) <= 3


def test_one_owner_alone_has_whole_steps() -> None:
    scheduler = crowd(40)
    for _ in range(20):
        step = scheduler.next_step()
        answer(scheduler, step)
        if isinstance(step, ForwardStep):
            assert sum(chunk.end - chunk.start for chunk in step.chunks) == BUDGET


def test_a_request_that_is_owed_a_place_does_not_wait_for_prompts_that_fill_the_budget() -> None:
    scheduler = crowd(40)
    answer(scheduler, scheduler.next_step())
    small = add_small(scheduler)
    scheduler.next_step()
    assert small.has_begun


def test_prompts_of_an_owner_wait_until_a_part_of_the_step_has_room() -> None:
    """More prompts at a time would make all of them late."""
    scheduler = crowd(40)
    steps = TwoAhead(scheduler)
    for _ in range(50):
        steps.run_to_end_of(add_small(scheduler))
    running = scheduler.active.running.values()
    assert 0 < sum(request.prefilled < request.prefill_to for request in running) <= 8 // PARTS


def test_owners_share_the_server_until_one_has_been_alone_for_a_while() -> None:
    parts, one, other = OwnerParts(BUDGET), Owner(0.0), Owner(0.0)
    parts.note_joined(one, 0)
    parts.note_joined(one, 5)
    assert parts.most(6) == BUDGET
    parts.note_joined(other, 7)
    assert parts.most(7) == parts.most(4 + SHARED_STEPS) == BUDGET // PARTS
    parts.note_joined(one, 9)
    assert parts.most(6 + SHARED_STEPS) == BUDGET // PARTS and parts.most(7 + SHARED_STEPS) == BUDGET
    parts.note_joined(other, 1000)
    assert parts.most(1000) == BUDGET, "the first owner has not come for long"
