import random

import pytest

from text_generation_router.scheduling.admission import ENOUGH
from text_generation_router.scheduling.look_ahead import Stay, steps_until_start
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep
from text_generation_router.scheduling.tests.answers import answer

END_TOKEN = 2000


def steps(
    running: list[Stay], waiting: list[Stay], capacity: int = 1000, max_rows: int = 8, budget: int = 100
) -> float:
    return steps_until_start(running, waiting, capacity, max_rows, budget)


def test_with_free_rows_and_slots_a_request_starts_at_once() -> None:
    assert steps([], []) == steps([Stay(0, 50, 100)], []) == 0


def test_without_a_free_row_a_request_waits_for_the_first_request_to_end() -> None:
    running = [Stay(0, left, 10) for left in (30, 7, 12)]
    assert steps(running, [], max_rows=3) == 7
    assert steps(running, [Stay(0, 1, 10)], max_rows=3) == 8  # the waiting request makes one token and ends
    assert steps(running, [Stay(0, 100, 10)], max_rows=3) == 12


def test_without_free_slots_a_request_waits_until_enough_slots_are_free() -> None:
    running = [Stay(0, left, 300) for left in (10, 20, 30)]
    assert steps(running, [Stay(0, 5, 100)]) == 0
    assert steps(running, [Stay(0, 5, 500)]) == 20 and steps(running, [Stay(0, 5, 1000)]) == 30


def test_a_request_waits_until_all_prompts_before_it_are_computed() -> None:
    assert steps([Stay(250, 9, 300)], [Stay(150, 9, 300)]) == 4.0


def simulated(limits: Limits, seed: int, prompt: int, output: int) -> tuple[float, int]:
    """Forecast and true number of steps until the start of a request that arrives while others run and wait. Each
    request may make 500 tokens, and makes between 1 and 2 × `output`."""
    draw = random.Random(seed)
    scheduler = Scheduler(limits, end_tokens=frozenset({END_TOKEN}))
    requests: dict[int, Running] = {}
    lengths: dict[int, int] = {}

    def add() -> Running:
        size = draw.randint(1, 2 * prompt)
        running = scheduler.add(GenerationRequest(tuple(draw.choices(range(1000), k=size)), 500))
        requests[running.id], lengths[running.id] = running, draw.randint(1, 2 * output)
        return running

    def token_of(request_id: int) -> int:
        return END_TOKEN if len(requests[request_id].output_ids) == lengths[request_id] - 1 else 0

    def run_one() -> ForwardStep:
        while step := scheduler.next_step():
            answer(scheduler, step, token_of)
            if isinstance(step, ForwardStep):
                return step
        raise AssertionError("nothing to do")

    waiting = [add() for _ in range(2 * ENOUGH)]
    while sum(request.ended for request in waiting) < ENOUGH + 8:
        run_one()
    for _ in range(40):
        add()
    forecast, newcomer, truth = scheduler.steps_until_start(), add(), 0
    while all(chunk.request_id != newcomer.id for chunk in run_one().chunks):
        truth += 1
    return forecast, truth


REGIMES = {
    "rows": (Limits(capacity=100_000, max_rows=6, max_batch_prefill_tokens=4096), 20, 40),
    "slots": (Limits(capacity=2_000, max_rows=64, max_batch_prefill_tokens=4096), 60, 40),
    "prompts": (Limits(capacity=100_000, max_rows=64, max_batch_prefill_tokens=64), 300, 8),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("regime", REGIMES)
def test_the_forecast_is_within_half_of_the_truth(regime: str, seed: int) -> None:
    forecast, truth = simulated(REGIMES[regime][0], seed, *REGIMES[regime][1:])
    assert truth > 30, "the newcomer hardly waited"
    assert 0.5 <= forecast / truth <= 1.5


def test_a_forecast_changes_no_decision() -> None:
    limits = REGIMES["slots"][0]
    with_forecasts, without = (Scheduler(limits, seed=3) for _ in range(2))
    for scheduler in (with_forecasts, without):
        for _ in range(ENOUGH):
            scheduler._admission.learn(20)
        for first in range(60):
            scheduler.add(GenerationRequest((first, *range(50)), 30))
    while (step := without.next_step()) is not None:
        with_forecasts.steps_until_start()
        other = with_forecasts.next_step()
        assert type(other) is type(step) and other.number == step.number
        for scheduler in (with_forecasts, without):
            answer(scheduler, step)
        if isinstance(step, ForwardStep):
            assert isinstance(other, ForwardStep) and other.request_ids == step.request_ids
