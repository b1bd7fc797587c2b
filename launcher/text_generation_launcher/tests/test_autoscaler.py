"""The number of replicas follows what fronts tell of their clients. The policy itself has tests of its own."""

from math import inf

import pytest

from text_generation_common.autoscaling import Demand, ReplicaPolicy, ScalingPace
from text_generation_common.link import ReplicaNote, ReplicaReport, ReplicaState
from text_generation_launcher.autoscaler import Autoscaler

PACE = ScalingPace(up_s=5.0, down_s=60.0)
BUSY, IDLE = Demand(wait_s=9.0, requests=40, used=0.9), Demand(wait_s=0.0, requests=0)


class PretendedSet:
    """Replicas that are ready as soon as they are wanted, but for the last `starting` of them, which have `state`."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.starting = 0
        self.state = ReplicaState.STARTING
        self.scaled: list[int] = []

    def scale(self, wanted: int) -> None:
        self.scaled.append(wanted)
        self.wanted = wanted

    @property
    def report(self) -> ReplicaReport:
        ready = [ReplicaNote(str(number), ReplicaState.READY) for number in range(self.wanted - self.starting)]
        late = [ReplicaNote(f"late {number}", self.state) for number in range(self.starting)]
        return ReplicaReport(self.wanted, (*ready, *late))


class World:
    def __init__(self, least: int, most: int) -> None:
        self.set = PretendedSet(least)
        self.demand: Demand | None = None
        self.now_s = 0.0
        policy = ReplicaPolicy(least, most, PACE)
        self.autoscaler = Autoscaler(self.set, lambda: self.demand, policy, lambda: self.now_s)  # type: ignore[arg-type]

    def live(self, seconds: int, demand: Demand | None) -> list[int]:
        """Lets the time pass. Returns the numbers of replicas that were asked for meanwhile."""
        self.demand, before = demand, len(self.set.scaled)
        for _ in range(seconds):
            self.now_s += 1.0
            self.autoscaler.ask()
        return self.set.scaled[before:]


def test_waits_add_replicas_up_to_the_greatest_number_and_calm_takes_them_away_one_by_one():
    world = World(1, 3)
    assert world.live(4, BUSY) == []
    assert world.live(60, BUSY) == [2, 3]
    assert world.live(600, IDLE) == [2, 1]
    assert world.live(600, IDLE) == []


def test_replicas_that_start_are_waited_for():
    world = World(1, 8)
    world.live(10, BUSY)
    world.set.starting = world.set.wanted - 1
    assert world.live(60, BUSY) == []
    world.set.starting = 0
    assert world.live(60, BUSY) != []


@pytest.mark.parametrize("demand", [None, Demand(wait_s=inf, requests=9)])
def test_nothing_is_decided_before_fronts_tell_anything_or_a_replica_is_ready(demand):
    world = World(2, 8)
    world.set.starting = 2
    assert world.live(600, demand) == []


def test_no_more_replicas_are_asked_for_while_some_have_no_room():
    world = World(4, 8)
    assert world.live(6, BUSY) == [5]
    world.set.state, world.set.starting = ReplicaState.PENDING, 1
    twice = Demand(wait_s=9.0, requests=80, used=0.9)
    assert world.live(60, twice) == []
    world.set.state = ReplicaState.STARTING
    assert world.live(60, twice)[0] == 6


def test_a_server_that_ends_is_not_scaled():
    world = World(1, 3)
    world.autoscaler.stop()
    assert world.live(60, BUSY) == []
