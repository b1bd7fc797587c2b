"""The confidence interval of a median; two servers measured in turns, of which each goes first every second time; and
the guard, which fails on a loss that noise does not explain, and on no other."""

import math
import random
from pathlib import Path
from statistics import median

import pytest

from text_generation_benchmark.figures import FEWEST_TURNS, median_interval
from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.turns import GUARD_WORKLOADS, as_markdown, launcher_of, take_turns, verdicts
from text_generation_benchmark.workload import Workload


def test_the_interval_of_nine_values_leaves_one_out_on_each_side():
    interval = median_interval([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0])
    assert (interval.low, interval.median, interval.high) == (2.0, 5.0, 8.0)


def test_too_few_values_have_no_interval():
    with pytest.raises(ValueError, match="5 values"):
        median_interval([1.0] * 5)


@pytest.mark.parametrize("n", [6, 9, 15, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_says(n):
    rng = random.Random(n)
    trials = 2000
    held = 0
    for _ in range(trials):
        interval = median_interval([rng.lognormvariate(0, 1) for _ in range(n)])
        held += interval.low <= 1.0 <= interval.high
    assert held / trials > 0.95 - 3 * math.sqrt(0.05 * 0.95 / trials)


class Server:
    """Makes tokens at a speed with noise, and records the times of its calls."""

    def __init__(self, name: str, speed: float, calls: list[str], noise: float = 0.0) -> None:
        self.name, self.speed, self.calls, self.noise, self.random = name, speed, calls, noise, random.Random(name)

    def __call__(self, workload: Workload) -> LoadResult:
        self.calls.append(self.name)
        speed = self.speed * self.random.lognormvariate(0, self.noise)
        times = StreamTimes(first=1 / speed, last=workload.new_tokens / speed, tokens=workload.new_tokens)
        return LoadResult((times,), times.last)


def test_both_versions_begin_equally_often_and_the_ratio_is_of_pairs():
    calls: list[str] = []
    [turns] = take_turns(Server("before", 100.0, calls), Server("now", 97.0, calls), [Workload(1)], 10)
    pairs = calls[2:]
    assert [pairs[0::2].count(name) for name in ("before", "now")] == [5, 5]
    assert turns.speed.median == pytest.approx(0.97) and turns.first_token.median == pytest.approx(100 / 97)
    assert "0.970 (0.970 to 0.970)" in as_markdown([turns])
    assert median(result.tokens_per_s for result in turns.before) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("speed", "noise", "lost", "sure"),
    [(1.0, 0.01, False, True), (0.96, 0.002, False, True), (0.90, 0.01, True, True), (0.97, 0.5, False, False)],
    ids=["equal", "little", "lost", "noise"],
)
def test_a_loss_of_more_than_5_percent_outside_the_noise_fails(
    speed: float, noise: float, lost: bool, sure: bool
) -> None:
    servers = Server("before", 100.0, [], noise), Server("now", 100.0 * speed, [], noise)
    measured = take_turns(*servers, GUARD_WORKLOADS, FEWEST_TURNS)
    assert [len(turns.now) for turns in measured] == [FEWEST_TURNS] * len(GUARD_WORKLOADS)
    assert {turns.has_lost for turns in measured} == {lost}
    assert all(turns.is_sure for turns in measured) == sure
    words = {"SLOWER": lost, "kept": sure and not lost, "noise could hide": not sure}
    assert [word for word in words if word in verdicts(measured)] == [word for word, said in words.items() if said]


def test_a_checkout_without_an_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run `make install`"):
        launcher_of(tmp_path)
    launcher = tmp_path / ".venv" / "bin" / "text-generation-launcher"
    launcher.parent.mkdir(parents=True)
    launcher.touch()
    assert launcher_of(tmp_path) == launcher_of(launcher) == launcher
