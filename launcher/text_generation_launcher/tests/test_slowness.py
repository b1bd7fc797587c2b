"""The helper of limits in seconds can fail, and a slow machine has more time."""

import pytest

from text_generation_launcher.tests import slowness
from text_generation_launcher.tests.slowness import Seconds, assert_within


def test_what_takes_longer_than_its_limit_fails_unless_the_machine_is_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    times_slower = Seconds(1.0, 1.0)
    monkeypatch.setattr(slowness, "slowness", lambda: times_slower)
    for taken in (Seconds(2.5, 0.0), Seconds(0.0, 2.5)):
        with pytest.raises(AssertionError, match=r"more than 2\.0 s"):
            assert_within(lambda taken=taken: taken, clock=2.0, cpu=2.0)
    times_slower = Seconds(1.5, 1.5)
    assert_within(lambda: Seconds(2.5, 2.5), clock=2.0, cpu=2.0)
    later = iter([Seconds(9.0, 0.0), Seconds(1.0, 0.0)])
    assert_within(lambda: next(later), clock=2.0)


def test_a_work_that_takes_longer_is_a_slower_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "WORK", "import time; time.sleep(0.5)")
    slow = slowness.slowness()
    assert slow.clock > 2.5 > slow.cpu
