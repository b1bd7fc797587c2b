"""When a child is started again, after which wait, and when it is not started again, with a clock that only the test
moves."""

from text_generation_launcher.restarts import MAX_DEATHS, Restarts


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def fail_after(restarts: Restarts, clock: Clock, up_s: float) -> float | None:
    """Lets the child become ready, run for `up_s` seconds and fail."""
    restarts.came_up()
    clock.now_s += up_s
    return restarts.failed()


def test_waits_double_and_the_fifth_failure_is_the_last():
    restarts, clock = Restarts(clock := Clock()), clock
    assert [fail_after(restarts, clock, 90.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_three_losses_wait_for_nothing_where_something_stands_by_and_the_record_counts_them():
    restarts = Restarts(Clock(), max_failures=MAX_DEATHS)
    assert [restarts.failed(True) for _ in range(4)] == [0.0, 0.0, 0.0, 4.0]
    restarts.succeeded()
    assert [restarts.failed(stands_by) for stands_by in (True, False, True)] == [0.0, 1.0, 0.0]


def test_a_success_clears_the_record_and_the_wait():
    restarts = Restarts(clock := Clock())
    for _ in range(20):
        assert [fail_after(restarts, clock, 90.0) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
        restarts.succeeded()


def test_a_success_that_is_reported_after_the_failure_counts():
    restarts = Restarts(clock := Clock())
    waits = []
    for _ in range(10):
        waits.append(fail_after(restarts, clock, 1.0))
        restarts.succeeded()
    assert waits == [0.5] * 10


def test_a_long_run_clears_the_record_without_a_success():
    restarts = Restarts(clock := Clock())
    for _ in range(4):
        fail_after(restarts, clock, 1.0)
    assert fail_after(restarts, clock, 600.0) == 0.5
    assert [fail_after(restarts, clock, 599.0) for _ in range(4)] == [1.0, 2.0, 4.0, None]


def test_fewer_than_five_failed_starts_since_the_last_success_are_never_the_end():
    """Starts that are killed from outside do not make the launcher give up if starts before and after them
    succeeded."""
    restarts = Restarts(clock := Clock(), max_failures=MAX_DEATHS)
    for _ in range(20):
        assert None not in [restarts.failed() for _ in range(4)]
        assert fail_after(restarts, clock, 1.0) is not None
        restarts.succeeded()


def test_the_fifth_failed_start_in_a_row_is_the_end_although_deaths_are_allowed_more():
    restarts = Restarts(Clock(), max_failures=MAX_DEATHS)
    assert [restarts.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_shards_that_came_up_may_die_more_often_than_starts_may_fail():
    restarts = Restarts(clock := Clock(), max_failures=MAX_DEATHS)
    waits = [fail_after(restarts, clock, 1.0) for _ in range(MAX_DEATHS)]
    assert None not in waits[:-1] and waits[-1] is None


def test_no_wait_is_longer_than_thirty_seconds():
    restarts = Restarts(clock := Clock())
    waits = [wait_s for _ in range(4) if (wait_s := fail_after(restarts, clock, 1.0)) is not None]
    assert max(waits) <= 30.0
