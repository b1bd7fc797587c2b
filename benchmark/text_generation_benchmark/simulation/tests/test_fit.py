"""A fit finds the cost model from which a log was made."""

import json

import numpy as np
import pytest

from text_generation_benchmark.simulation.cost import FEWEST_STEPS, SKIPPED_STEPS, StepCost, fit, joined, read_log

COST = StepCost(2e-3, 0, 0, 1e-4, 1e-7, 3e-5, 1e-8)


def log(count: int, noise: float = 0.0, late_ns: int = 0, seed: int = 0) -> list[str]:
    """A log of steps that cost COST, with idle times between them. `late_ns` is a delay of the router, which adds to
    steps with rows."""
    random = np.random.default_rng(seed)
    at_ns, lines = 0, []
    for step in range(count):
        rows, prompt_tokens = int(random.integers(0, 30)), int(random.integers(0, 2) * random.integers(1, 500))
        load = {"rows": rows, "kv_tokens": rows * int(random.integers(10, 300)), "prompt_tokens": prompt_tokens}
        load["prompt_positions"] = prompt_tokens * int(random.integers(1, 100))
        seconds = COST.seconds(*load.values()) * (1 + noise * random.standard_normal())
        gap_ns = late_ns if rows else int(random.integers(0, 10**9))
        at_ns += int(seconds * 1e9) + gap_ns
        lines.append(json.dumps({"step": step, **load, "gap_ns": gap_ns, "at_ns": at_ns}))
    return lines


def test_the_cost_is_found_whatever_the_idle_times() -> None:
    found = fit(read_log(log(400))).cost
    loads = [(1, 100, 0, 0), (30, 9000, 0, 0), (0, 0, 500, 20_000), (10, 1000, 100, 5000)]
    assert [found.seconds(*load) for load in loads] == pytest.approx([COST.seconds(*load) for load in loads], rel=1e-4)


def test_a_late_router_counts_where_rows_wait_for_it() -> None:
    punctual, late = read_log(log(400)), read_log(log(400, late_ns=10**6))
    added = np.where(punctual.loads[:, 0] > 0, 1e-3, 0)
    assert (late.seconds - punctual.seconds).tolist() == pytest.approx(added.tolist(), abs=1e-8)


def test_noise_leaves_the_sum_of_all_steps_right() -> None:
    times = joined([read_log(log(1500, noise=0.2, seed=seed)) for seed in (1, 2)])
    found = fit(times)
    predicted = sum(found.cost.seconds(*map(int, load)) for load in times.loads)
    assert predicted == pytest.approx(times.seconds.sum(), rel=0.02) and 0.1 < found.error < 0.2


def test_a_short_log_is_refused() -> None:
    with pytest.raises(ValueError, match="run more requests"):
        read_log(log(SKIPPED_STEPS + FEWEST_STEPS - 1))
