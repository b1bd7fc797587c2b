"""Simulated time follows the rules of steps in flight, and jumping over steps changes no result."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_benchmark.simulation.cost import StepCost
from text_generation_benchmark.simulation.engine import Outcome, SimulatedEngine
from text_generation_benchmark.simulation.trace import NO_PREFIX, LogNormal, Trace, TraceWorkload, Uniform, generate
from text_generation_common.flags.declaration import with_flags
from text_generation_common.flags.kinds import AdmissionMode
from text_generation_common.tests.examples import examples
from text_generation_router.scheduling.request import Limits

# Cost of a step in these tests: 1 s, and 0.01 s for each token of a prompt.
SECONDS = StepCost(1, 0, 0, 0, 0, 0.01, 0)
EVERYTHING = StepCost(1e-3, 4e-3, 2e-5, 1e-5, 1e-7, 1e-5, 1e-9)


def trace_of(*requests: tuple[float, int, int, int]) -> Trace:
    """A trace of requests, each given as (arrival in seconds, prompt tokens, output tokens, max_new_tokens)."""
    arrival_s, *columns = (np.array(column) for column in zip(*requests, strict=True))
    none = np.zeros(len(requests), dtype=np.int64)
    return Trace(arrival_s.astype(np.float64), *columns, none + NO_PREFIX, none, none)


def run(trace: Trace, jumps: bool = True, cost: StepCost = SECONDS, **limits: object) -> Outcome:
    return SimulatedEngine(trace, cost, with_flags(Limits(1000, 8, 100), **limits), 1.0, jumps).run()


def test_the_first_token_ends_the_prefill_and_every_step_makes_one_more() -> None:
    outcome = run(trace_of((3.0, 50, 5, 5)))
    assert outcome.first_s.tolist() == [4.5] and outcome.last_s.tolist() == [8.5]
    assert outcome.longest_gap_s.tolist() == [1.0] and outcome.steps == 5 and outcome.wasted_rows == 0


def test_a_request_that_arrives_during_a_step_runs_after_the_next_step_which_is_decided_already() -> None:
    # Steps end at 1.1, 2.1, 3.1, … s. At 2.5 s the third step runs, and the fourth has been decided.
    outcome = run(trace_of((0.0, 10, 9, 9), (2.5, 20, 1, 1)), waiting_served_ratio=0.0)
    assert outcome.first_s.tolist() == pytest.approx([1.1, 4.1 + 1.2])
    assert outcome.longest_gap_s.tolist() == pytest.approx([1.2, 0])


def test_a_text_that_ends_before_its_limit_costs_a_row() -> None:
    outcome = run(trace_of((0.0, 10, 4, 50)))
    assert outcome.wasted_rows == 1 and outcome.last_s.tolist() == pytest.approx([4.1])
    assert outcome.end_s == pytest.approx(5.1)


def test_slots_are_held_from_the_prompt_to_the_end() -> None:
    # In the first of two steps, 10 slots are held for the prompt and one for the second step, which is decided already.
    outcome = run(trace_of((0.0, 10, 2, 2)))
    assert outcome.max_held == 11 and outcome.held_slot_s == pytest.approx([11 * 1.1, 11 * 1.0])


def test_a_request_that_can_never_be_held_is_named() -> None:
    with pytest.raises(ValueError, match=r"request 2 .* 1001 token slots, and there are 1000"):
        run(trace_of((0.0, 1, 1, 1), (0.0, 501, 1, 500)))


def assert_same(one: Outcome, other: Outcome) -> None:
    for column in fields(one):
        values = [getattr(each, column.name) for each in (one, other)]
        if column.name != "trace":
            assert np.array_equal(*values), column.name


def test_too_little_memory_is_survived_by_preempting() -> None:
    # The last requests make more tokens than the recorded output lengths predict.
    requests = [(0.5 * i, 4, 3, 90) for i in range(40)] + [(30.0, 4, 90, 90)] * 8
    stepped, jumped = (run(trace_of(*requests), jumps, capacity=300) for jumps in (False, True))
    assert stepped.counters.preemptions > 0 and stepped.max_held <= 300
    assert_same(stepped, jumped)


WORKLOADS = st.builds(
    TraceWorkload,
    prompt=st.sampled_from([Uniform(1, 30), LogNormal(40, 0.8, 1, 200)]),
    output=st.sampled_from([Uniform(1, 60), LogNormal(20, 1.0, 1, 150)]),
    max_new_tokens=st.sampled_from([1, 150, 400]),
    num_prefixes=st.sampled_from([0, 2]),
    prefix=st.just(Uniform(20, 60)),
)


@examples(30)
@given(
    workload=WORKLOADS,
    rate=st.sampled_from([0.5, 5, 50, 400]),
    seed=st.integers(0, 1000),
    admission=st.sampled_from(AdmissionMode),
    capacity=st.sampled_from([700, 1500, 10_000]),
    max_rows=st.sampled_from([2, 8, 64]),
    ratio=st.sampled_from([0.0, 0.3, 1.2]),
    prefix_caching=st.booleans(),
)
def test_a_simulation_that_jumps_has_exactly_the_same_outcome(
    workload: TraceWorkload,
    rate: float,
    seed: int,
    admission: AdmissionMode,
    capacity: int,
    max_rows: int,
    ratio: float,
    prefix_caching: bool,
) -> None:
    trace = generate(workload, rate, 15 / rate + 1, seed)
    stepped, jumped = (
        run(
            trace,
            jumps,
            EVERYTHING,
            capacity=capacity,
            max_rows=max_rows,
            admission=admission,
            waiting_served_ratio=ratio,
            prefix_caching=prefix_caching,
        )
        for jumps in (False, True)
    )
    assert_same(stepped, jumped)


def test_jumping_saves_most_decisions() -> None:
    decided = []

    class Counting(SimulatedEngine):
        def _finish_oldest(self) -> None:
            decided.append(1)
            super()._finish_oldest()

    limits = Limits(1000, 8, 100)
    outcome = Counting(trace_of((0.0, 10, 400, 400)), SECONDS, limits, 1.0).run()
    assert outcome.steps == 400 and len(decided) < 10
