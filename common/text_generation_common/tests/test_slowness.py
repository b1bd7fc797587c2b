"""The helper of limits in seconds can fail, and a slow machine has more time."""

import pytest

from text_generation_common.tests import slowness
from text_generation_common.tests.slowness import IDLE, Seconds, assert_within, is_within


def test_what_takes_longer_than_its_limit_fails_unless_the_machine_is_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    times_slower = IDLE
    monkeypatch.setattr(slowness, "slowness", lambda: times_slower)
    for taken in (Seconds(2.5, 0.0), Seconds(0.0, 2.5)):
        with pytest.raises(AssertionError, match=r"more than 2\.0 s"):
            assert_within(lambda taken=taken: taken, clock=2.0, cpu=2.0)
    times_slower = Seconds(1.5, 1.5)
    assert_within(lambda: Seconds(2.5, 2.5), clock=2.0, cpu=2.0)
    later = iter([Seconds(9.0, 0.0), Seconds(1.0, 0.0)])
    assert_within(lambda: next(later), clock=2.0)


@pytest.mark.parametrize(("before", "after"), [(1.0, 1.5), (1.5, 1.0)])
def test_seconds_that_cannot_be_taken_again_are_within_a_limit_of_the_slower_of_two_moments(
    monkeypatch: pytest.MonkeyPatch, before: float, after: float
) -> None:
    monkeypatch.setattr(slowness, "slowness", lambda: Seconds(after, 9.0))
    slow = Seconds(before, 9.0)
    assert is_within(2.0, 2.0) and is_within(3.0, 2.0, slow) and not is_within(3.1, 2.0, slow)
    assert is_within(3.0, 2.0) is (after > 1.0)


def test_a_work_that_takes_longer_is_a_slower_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "WORK", "import time; time.sleep(0.5)")
    slow = slowness.slowness()
    assert slow.clock > 2.5 > slow.cpu
