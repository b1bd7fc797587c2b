"""The summary of several engines' outcomes."""

import numpy as np
import pytest

from text_generation_benchmark.figures import percentile
from text_generation_benchmark.simulation.engine import ClusterSummary, Outcome, Targets, summarize
from text_generation_benchmark.simulation.trace import NO_PREFIX, Trace
from text_generation_router.scheduling.scheduler import SchedulerCounters


def outcome(*requests: tuple[float, float, float, float, int], held: tuple[float, ...] = (50.0, 25.0)) -> Outcome:
    """An outcome with the given requests, each as (arrival, first token, last token, longest gap, number of tokens),
    times in seconds."""
    arrival_s, first_s, last_s, longest_gap_s, tokens = (np.array(column) for column in zip(*requests, strict=True))
    none = np.zeros(len(requests), dtype=np.int64)
    found = Outcome(Trace(arrival_s, none + 1, tokens, tokens, none + NO_PREFIX, none, none), 100, 1.0)
    found.first_s, found.last_s, found.longest_gap_s = first_s, last_s, longest_gap_s
    found.end_s, found.held_slot_s, found.max_held, found.steps, found.wasted_rows = 10.0, list(held), 60, 7, 2
    found.counters = SchedulerCounters(1, 3, 10, 40)
    return found


def summary(*outcomes: Outcome, overhead_s: float = 0.0) -> ClusterSummary:
    return summarize(outcomes, 5.0, 1.0, overhead_s, Targets(first_token_s=1.0, gap_s=0.5))


GOOD = (0.0, 1.0, 2.0, 0.5, 6)
LATE = (0.0, 1.1, 2.0, 0.5, 6)
HALTING = (0.0, 1.0, 2.0, 0.6, 6)


def test_a_request_is_good_if_it_meets_both_limits_and_goodput_is_of_the_time_of_arrivals() -> None:
    assert summary(outcome(GOOD, LATE, HALTING)).goodput == pytest.approx(1 / 5)
    assert summary(outcome(GOOD, GOOD), outcome(GOOD)).goodput == pytest.approx(3 / 5)


def test_time_outside_the_steps_counts_for_the_first_token() -> None:
    late = summary(outcome(GOOD), overhead_s=0.1)
    assert late.goodput == 0 and late.first_token_s.tolist() == pytest.approx([1.1])


def test_throughput_is_of_the_time_until_the_last_step() -> None:
    both = summary(outcome(GOOD, LATE), outcome(GOOD))
    assert both.output_tokens_per_s == pytest.approx(18 / 10) and both.requests_per_s == pytest.approx(3 / 10)


def test_a_request_with_one_token_has_no_time_between_tokens() -> None:
    one = summary(outcome((0.0, 1.0, 1.0, 0.0, 1), GOOD))
    assert one.mean_gap_s.tolist() == pytest.approx([0.2]) and one.longest_gap_s.tolist() == [0.5]


def test_memory_in_use_is_a_share_of_all_slots() -> None:
    both = summary(outcome(GOOD), outcome(GOOD, held=(50.0,)))
    assert both.kv_use_over_time.tolist() == pytest.approx([0.5, 0.125]) and both.max_kv_use == 0.6
    assert both.kv_use == pytest.approx(125 / (10 * 200))


def test_counts_add_up() -> None:
    both = summary(outcome(GOOD), outcome(GOOD))
    assert both.counters == SchedulerCounters(
        preemptions=2, recomputed_tokens=6, prefix_hit_tokens=20, prefilled_tokens=80
    )
    assert (both.steps, both.wasted_rows) == (14, 4)


def test_a_percentile_is_one_of_the_values() -> None:
    values = np.arange(100.0)
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50, 99, 99)
    assert percentile(np.empty(0), 50) == 0
