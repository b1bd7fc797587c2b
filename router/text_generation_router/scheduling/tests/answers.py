"""Answers the steps of a scheduler as shards would."""

from collections.abc import Callable, Collection, Mapping

from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import NO_FAILURES, Applied, ForwardStep, Step, StepAnswer


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
