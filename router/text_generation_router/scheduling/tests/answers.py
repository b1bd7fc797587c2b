"""Makes schedulers, and answers their steps as shards would."""

from collections.abc import Callable, Collection, Mapping

from text_generation_common.flags.declaration import with_flags
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import NO_FAILURES, Applied, ForwardStep, Step, StepAnswer

CAPACITY = 64


def make_request(length: int, new: int, first: int = 0) -> GenerationRequest:
    return GenerationRequest(tuple(range(first, first + length)), new)


def make_scheduler(end_tokens: frozenset[int] = frozenset(), **limits: object) -> Scheduler:
    return Scheduler(with_flags(Limits(CAPACITY, 8, 16), **limits), end_tokens=end_tokens)


def sampled(step: Step) -> list[int]:
    """The ids of the requests that get a token from the step."""
    if not isinstance(step, ForwardStep):
        return []
    return [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]


def answer(
    scheduler: Scheduler,
    step: Step | None,
    token_of: Callable[[int], int] = lambda request_id: 0,
    failures: Mapping[int, str] = NO_FAILURES,
    complete: Collection[int] = (),
) -> Applied:
    """Answers the step with one token for each request that it samples. `token_of` returns the token for a request
    id."""
    assert step is not None, "the scheduler has no step to send"
    ids = sampled(step)
    tokens = [token_of(request_id) for request_id in ids]
    return scheduler.apply(StepAnswer(step.number, ids, tokens, failures=failures, complete_ids=complete))


def run_to_end(scheduler: Scheduler) -> list[Step]:
    """Runs until no step is left to send. Answers every step at once with token 0."""
    steps = []
    while step := scheduler.next_step():
        steps.append(step)
        answer(scheduler, step)
    return steps


def steps_until(scheduler: Scheduler, request: Running) -> int:
    """Number of steps before the first step of `request`."""
    for steps in range(10):
        step = scheduler.next_step()
        answer(scheduler, step)
        if isinstance(step, ForwardStep) and request.id in step.request_ids:
            return steps
    raise AssertionError("it does not begin")
