"""Replicas follow the load: soon enough, no further than needed, within their bounds, and without flapping."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.autoscaling import Demand, ReplicaPolicy, ScalingPace, joint_demand

PACE = ScalingPace()
CALM, WAITS = Demand(0.0, 4, 0.05), Demand(8.0, 60, 0.3)


class FluidFleet:
    """Replicas that serve `carried` requests a second each, where a request alone takes `alone_s` seconds. Work beyond
    that piles up in one queue."""

    def __init__(self, policy: ReplicaPolicy, running: int, start_s: float, carried: float, alone_s: float) -> None:
        self.running, self.wanted = running, [running]
        self._policy, self._start_s, self._carried, self._alone_s = policy, start_s, carried, alone_s
        self._queued = self._now_s = 0.0
        self._ready_s: list[float] = []  # when each replica that starts will serve
        self.waits_s: list[float] = []

    def run(self, seconds: int, rate: float) -> None:
        for _ in range(seconds):
            self._second(rate)

    def _second(self, rate: float) -> None:
        self._now_s += 1
        self.running += sum(ready_s <= self._now_s for ready_s in self._ready_s)
        self._ready_s = [ready_s for ready_s in self._ready_s if ready_s > self._now_s]
        all_carry = self.running * self._carried
        self._queued = max(0.0, self._queued + rate - all_carry)
        busy = min(1.0, rate / all_carry)
        aboard = min(rate, all_carry) * self._alone_s * (1 + busy**4)
        wait_s = self._queued / all_carry
        self.waits_s.append(wait_s)
        demand = Demand(wait_s, round(aboard + self._queued), 0.3 * busy)
        wanted = self._policy.wanted(self._now_s, demand, self.running)
        self.wanted.append(wanted)
        surplus = self.running + len(self._ready_s) - wanted
        for _ in range(surplus):
            if self._ready_s:
                self._ready_s.pop()
            else:
                self.running -= 1
        self._ready_s += [self._now_s + self._start_s] * -surplus

    @property
    def changes(self) -> list[int]:
        return [after - before for before, after in pairwise(self.wanted) if after != before]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000), st.floats(0, 1), st.integers(0, 9)), max_size=60))
def test_the_number_stays_within_its_bounds_whatever_is_told(told: list[tuple[float, int, float, int]]) -> None:
    policy = ReplicaPolicy(2, 6)
    for number, (wait_s, requests, used, running) in enumerate(told):
        assert 2 <= policy.wanted(100.0 * number, Demand(wait_s, requests, used), running) <= 6


def test_a_wait_has_to_last_before_replicas_are_added() -> None:
    policy = ReplicaPolicy(1, 8)
    for second in range(50):
        demand = WAITS if second % 4 else CALM
        assert policy.wanted(float(second), demand, 1) == 1
    assert [policy.wanted(50.0 + second, WAITS, 1) for second in range(7)][-1] == 2


def test_permits_that_are_used_up_add_replicas_like_a_wait() -> None:
    policy = ReplicaPolicy(1, 8)
    wanted = [policy.wanted(float(second), Demand(0.0, 128, 1.0), 1) for second in range(10)]
    assert wanted[0] == 1 and wanted[-1] == 2


def test_replicas_that_start_count_so_a_wait_that_goes_on_adds_no_more() -> None:
    policy = ReplicaPolicy(2, 50)
    wanted = [policy.wanted(float(second), Demand(3.0, 40, 0.3), 2) for second in range(600)]
    assert wanted[-1] == 3 == max(wanted)


def test_requests_that_pile_up_add_at_most_half_of_the_replicas_that_serve_at_a_time() -> None:
    policy = ReplicaPolicy(4, 50)
    wanted = [policy.wanted(float(second), Demand(2.0 + second, 100 + 20 * second, 0.9), 4) for second in range(300)]
    assert wanted[-1] == 6


def test_while_no_replica_serves_nothing_is_known_and_nothing_changes() -> None:
    policy = ReplicaPolicy(1, 8)
    for second in range(10):
        before = policy.wanted(float(second), WAITS, 1)
    assert [policy.wanted(10.0 + second, Demand(inf, 500, 1.0), 0) for second in range(900)] == [before] * 900


def test_replicas_leave_one_at_a_time_slowly_when_the_load_is_gone() -> None:
    fleet = FluidFleet(ReplicaPolicy(1, 8), 1, 10.0, 1.0, 10.0)
    fleet.run(3000, 5.5)
    assert fleet.running >= 6
    before = len(fleet.wanted)
    fleet.run(20_000, 0.05)
    assert fleet.running == 1
    steps = [second for second in range(before, len(fleet.wanted)) if fleet.wanted[second] < fleet.wanted[second - 1]]
    assert all(fleet.wanted[second] == fleet.wanted[second - 1] - 1 for second in steps)
    assert all(later - earlier >= PACE.down_s for earlier, later in pairwise(steps))


def test_a_replica_stays_while_the_others_would_not_carry_its_load() -> None:
    policy = ReplicaPolicy(1, 8)
    for second in range(10):
        policy.wanted(float(second), Demand(2.0, 20, 0.3), 1)
    carried = Demand(0.0, round(2 * 20 * PACE.rest) + 1, 0.1)
    assert {policy.wanted(10.0 + second, carried, 3) for second in range(100)} == {2}
    busy_rows = Demand(0.0, 1, 0.9)
    assert policy.wanted(5000.0, busy_rows, 2) == policy.wanted(9000.0, busy_rows, 2) == 2


@pytest.mark.parametrize("start_s", [5.0, 300.0])
@pytest.mark.parametrize("carried,alone_s", [(0.2, 30.0), (15.0, 2.0)])
@pytest.mark.parametrize("replicas_busy", [0.3, 0.99, 2.02, 3.5, 7.4])
def test_under_a_steady_load_the_number_settles(
    start_s: float, carried: float, alone_s: float, replicas_busy: float
) -> None:
    """A load that `replicas_busy` replicas carry. The growth overshoots, and what is too much leaves. A removal too
    many costs a wait for one start, and for what has piled up meanwhile."""
    fleet = FluidFleet(ReplicaPolicy(1, 20), 1, start_s, carried, alone_s)
    fleet.run(3 * 3600, replicas_busy * carried)
    turns = sum(before * after < 0 for before, after in pairwise(fleet.changes))
    assert turns <= 5
    assert replicas_busy < fleet.running <= 2.5 * replicas_busy + 2
    assert sum(wait_s > PACE.wait_s for wait_s in fleet.waits_s[3600:]) <= 1.5 * start_s + 60


def test_while_a_replica_has_no_room_no_more_are_wanted_and_its_removal_is_not_a_mistake() -> None:
    policy = ReplicaPolicy(1, 8)
    wanted = [policy.wanted(float(second), Demand(2.0 + second, 900, 0.9), 4, 1) for second in range(60)]
    assert set(wanted) == {1}
    policy = ReplicaPolicy(1, 8)
    for second in range(7):
        policy.wanted(float(second), WAITS, 1)
    for second in range(7, 400):
        last = policy.wanted(float(second), CALM, 1, 1)
    assert last == 1
    for second in range(400, 407):
        last = policy.wanted(float(second), WAITS, 1)
    assert last == 2
    # A removal that was a mistake would not be repeated for hours under this load.
    for second in range(407, 800):
        last = policy.wanted(float(second), CALM, 1, 1)
    assert last == 1


@pytest.mark.parametrize("most", [1, 8])
def test_more_load_than_the_greatest_number_carries_brings_that_number(most: int) -> None:
    fleet = FluidFleet(ReplicaPolicy(1, most), 1, 60.0, 1.0, 10.0)
    fleet.run(3600, 20.0)
    assert fleet.wanted[-1] == most


def test_the_demand_of_several_fronts_is_their_sum_and_the_longest_wait_that_one_knows() -> None:
    assert joint_demand([]) is None
    assert joint_demand([Demand(0.5, 3, 0.25), Demand(2.0, 4, 0.5)]) == Demand(2.0, 7, 0.75)
    assert joint_demand([Demand(0.5, 3, 0.25), Demand(inf, 4, 0.0)]) == Demand(0.5, 7, 0.25)
    assert joint_demand([Demand(inf, 4, 0.0)]) == Demand(inf, 4, 0.0)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="0 to 3 replicas"):
        ReplicaPolicy(0, 3)
    with pytest.raises(ValueError, match="5 to 3 replicas"):
        ReplicaPolicy(5, 3)
