"""Waits that double."""

from text_generation_common.backoff import Backoff


def test_waits_double_up_to_the_greatest_and_begin_anew_when_they_are_reset() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.failed(0.0) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert (backoff.failures, backoff.failed(0.0)) == (0, 1.0)


def test_waits_begin_anew_after_a_long_run_only() -> None:
    backoff = Backoff(1.0, 30.0, long_run_s=10.0)
    backoff.failed(0.0)
    backoff.came_up(1.0)
    assert backoff.failed(10.9) == 2.0
    backoff.came_up(20.0)
    backoff.came_up(29.0)  # the run began before
    assert backoff.failed(30.0) == 1.0
    assert backoff.failures == 1


def test_a_failure_ends_the_run() -> None:
    backoff = Backoff(1.0, 30.0, long_run_s=10.0)
    backoff.came_up(0.0)
    assert backoff.is_up
    backoff.failed(1.0)
    assert not backoff.is_up
    assert backoff.failed(100.0) == 2.0
