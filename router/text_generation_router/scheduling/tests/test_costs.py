"""What steps cost is learned from their times, whatever the machine, and although some steps are held up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.scheduling.costs import MAX_KINDS, LearnedCosts, StepWork, keys_of, least_squares

# Seconds of a step, of chunks as such, a row, a key of a row, a prompt token, a key of a prompt token, and a key of a
# chunk: about a small model's on a CPU.
COSTS = np.array([6e-3, 1e-3, 2e-4, 4e-7, 2.5e-4, 4e-8, 2e-6])


def seconds(work: StepWork, costs: np.ndarray = COSTS) -> float:
    return float(np.dot(costs, work.columns))


def chunk(tokens: int, depth: int) -> StepWork:
    return StepWork.of((), [(depth, depth + tokens)])


def serve(
    costs: LearnedCosts, random: np.random.Generator, steps: int, speed: float = 1.0, noise: float = 0.05
) -> None:
    """A server's steps: streams come and go, and beside them one prompt after the other."""
    rows, depth = 1, 0
    for number in range(steps):
        rows = int(np.clip(rows + random.integers(-2, 3), 0, 64))
        tokens = int(random.choice([16, 64, 256, 512]))
        depth = 0 if depth > 20_000 else depth + tokens
        work = StepWork(rows, rows * int(random.integers(450, 550)))
        if number % 3:
            work = work.beside(chunk(tokens, depth))
        if rows or number % 3:
            costs.learn(work, seconds(work) * speed * random.lognormal(0, noise))


def test_a_token_of_a_prompt_attends_to_itself_and_those_before_it() -> None:
    assert keys_of(0, 3) == 1 + 2 + 3 and keys_of(3, 5) == 4 + 5


def test_nothing_is_cheaper_than_free() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])
    assert least_squares(matrix, np.array([1.0, 2.0, 3.0])).tolist() == pytest.approx([0.0, 1.0], abs=1e-7)
    assert least_squares(matrix, -np.ones(3)).tolist() == [0.0, 0.0]


@given(st.integers(0, 2**32 - 1))
def test_no_other_solution_without_negative_elements_is_nearer(seed: int) -> None:
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(8, 4)), random.normal(size=8)
    solution = least_squares(matrix, target)
    assert (solution >= 0).all()
    error = np.sum((matrix @ solution - target) ** 2)
    for _ in range(20):
        other = np.maximum(0, solution + random.normal(size=4) * random.choice([0.01, 0.1, 1]))
        assert np.sum((matrix @ other - target) ** 2) >= error - 1e-6


def test_columns_that_are_always_equal_share_their_cost() -> None:
    matrix = np.array([[1.0, 2.0, 2.0], [1.0, 4.0, 4.0], [1.0, 6.0, 6.0]])
    assert matrix @ least_squares(matrix, np.array([3.0, 5.0, 7.0])) == pytest.approx([3.0, 5.0, 7.0], rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_the_time_of_a_step_is_foretold(seed: int) -> None:
    costs, random = LearnedCosts(), np.random.default_rng(seed)
    serve(costs, random, 400)
    streams = StepWork(32, 32 * 500)
    for work in (streams, streams.beside(chunk(64, 18_000)), streams.beside(chunk(16, 18_000)), chunk(512, 0)):
        assert costs.seconds(work) == pytest.approx(seconds(work), rel=0.15)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    costs, random = LearnedCosts(), np.random.default_rng(0)
    serve(costs, random, 400)
    serve(costs, random, 800, speed=2)
    work = StepWork(32, 32 * 500).beside(chunk(256, 10_000))
    assert costs.seconds(work) == pytest.approx(2 * seconds(work), rel=0.15)


def test_a_step_that_something_held_up_teaches_little() -> None:
    costs, random = LearnedCosts(), np.random.default_rng(0)
    serve(costs, random, 400)
    work = StepWork(32, 32 * 500).beside(chunk(256, 10_000))
    costs.learn(work, 10 * seconds(work))
    assert costs.seconds(work) == pytest.approx(seconds(work), rel=0.2)


def test_a_few_steps_that_a_long_text_held_up_do_not_stretch_the_bound() -> None:
    """A long prompt is tokenized beside the last steps before its first chunk."""
    costs, decode = LearnedCosts(), StepWork(32, 32 * 100)
    for number in range(60):
        costs.learn(decode, seconds(decode) * (1.4 if number >= 52 else 1.0))
    costs.learn(chunk(512, 0), seconds(chunk(512, 0)))
    assert costs.seconds(decode) == pytest.approx(seconds(decode), rel=0.01)


def test_nothing_is_foretold_before_steps_of_both_sorts_were_seen() -> None:
    costs, decode, prompt = LearnedCosts(), StepWork(4, 400), chunk(512, 0)
    assert costs.seconds(decode) is None
    costs.learn(decode, seconds(decode))
    assert costs.seconds(decode) is None
    costs.learn(prompt, seconds(prompt))
    assert costs.seconds(decode) == pytest.approx(seconds(decode), rel=0.05)
    assert costs.seconds(decode.beside(prompt)) is not None


def test_the_samples_that_are_kept_are_limited() -> None:
    costs, random = LearnedCosts(), np.random.default_rng(0)
    for _ in range(2000):
        work = StepWork(*(int(2 ** random.uniform(0, 16)) for _ in range(5)))
        costs.learn(work, seconds(work))
    assert len(costs._samples) == MAX_KINDS
