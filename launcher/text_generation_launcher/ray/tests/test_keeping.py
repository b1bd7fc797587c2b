"""The driver's decisions about replicas, with a cluster that the test plays."""

from text_generation_launcher.ray.driver import Driver, end_with_node
from text_generation_launcher.ray.keeping import (
    ACTOR_START_S,
    FIRST_WAIT_S,
    LONG_RUN_S,
    LOOK_S,
    MAX_WAIT_S,
    PLACING_S,
    ActorLost,
    ActorUnsure,
    Answer,
)
from text_generation_launcher.ray.tests.fake_cluster import ORDER, FakeReplicaCluster, serving
from text_generation_launcher.ray.values import EnginePhase, EngineState, RayPhase, RayReport, RayStatus, Wanted


class Bench:
    """A driver, its cluster and a clock that the test sets."""

    def __init__(self, **addresses: str) -> None:
        self.cluster = FakeReplicaCluster()
        self.now_s = 0.0
        self.reports: list[RayReport] = []
        self.driver = Driver(self.cluster, self.reports.append, lambda: self.now_s)
        if addresses:
            self.want(**addresses)

    def want(self, **addresses: str) -> None:
        self.driver.want(Wanted(ORDER, addresses))
        self.driver.turn()

    def answer(self, name: str, answer: Answer) -> None:
        self.cluster.answer(name, answer)
        self.driver.turn()

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.driver.turn()

    def serve(self, name: str, address: str) -> None:
        self.cluster.room.add(name)
        self.answer(name, serving(address))
        self.driver.turn()  # this turn makes the next call

    def status(self, name: str) -> RayStatus:
        return {status.name: status for status in self.reports[-1].replicas}[name]

    def asked(self) -> list[tuple[str, str]]:
        asked, self.cluster.asked = self.cluster.asked, []
        return asked


def test_a_replica_without_room_is_pending_then_starts_then_serves() -> None:
    bench = Bench(a="")
    assert bench.status("a").phase is RayPhase.STARTING  # Ray may still find a machine
    bench.after(PLACING_S)
    assert bench.status("a").phase is RayPhase.PENDING
    bench.cluster.room.add("a")
    bench.after(1.0)
    assert bench.status("a").phase is RayPhase.STARTING
    bench.answer("a", EngineState(EnginePhase.STARTING))
    assert bench.status("a").phase is RayPhase.STARTING
    bench.after(0.0)
    bench.answer("a", serving("h:1"))
    assert bench.status("a") == RayStatus("a", RayPhase.SERVING, "h:1", "h")


def test_an_actor_that_ray_never_starts_is_replaced_by_another() -> None:
    bench = Bench(a="h:1")
    bench.after(2 * ACTOR_START_S)
    assert bench.asked() == [("start", "a")]  # Without room the replica waits without a limit.
    bench.cluster.room.add("a")
    bench.after(LOOK_S)
    bench.after(ACTOR_START_S - 1.0)
    assert bench.asked() == []
    bench.after(1.0)
    assert bench.asked() == [("remove", "a")]
    assert bench.status("a").address == "h:1"
    bench.after(FIRST_WAIT_S)
    assert bench.asked() == [("start", "a")]
    bench.serve("a", "i:2")
    assert bench.status("a").address == "i:2"


def test_the_address_of_an_engine_whose_actor_is_lost_stands_until_another_serves() -> None:
    bench = Bench(a="")
    bench.serve("a", "h:1")
    bench.answer("a", ActorLost("the node is gone"))
    assert (bench.status("a").address, bench.status("a").why) == ("h:1", "the node is gone")
    bench.after(FIRST_WAIT_S)
    bench.answer("a", EngineState(EnginePhase.STARTING))
    assert bench.status("a").address == "h:1"
    bench.after(0.0)
    bench.answer("a", serving("i:2"))
    assert bench.status("a").address == "i:2"


def test_an_engine_that_has_ended_has_no_address_and_gives_its_room_back() -> None:
    bench = Bench(a="")
    bench.serve("a", "h:1")
    bench.asked()
    bench.answer("a", EngineState(EnginePhase.ENDED, why="Error: no memory"))
    assert bench.status("a").address == ""
    assert "Error: no memory" in bench.status("a").why
    assert bench.asked() == [("remove", "a")]
    bench.after(FIRST_WAIT_S)
    assert bench.asked() == [("start", "a")]


def test_a_new_engine_that_ends_before_it_serves_leaves_the_lost_one_s_address() -> None:
    bench = Bench(a="")
    bench.serve("a", "h:1")
    bench.answer("a", ActorLost("gone"))
    bench.after(FIRST_WAIT_S)
    bench.answer("a", EngineState(EnginePhase.STARTING))
    bench.after(0.0)
    bench.answer("a", EngineState(EnginePhase.ENDED, why="x"))
    assert (bench.status("a").address, bench.status("a").failures) == ("h:1", 1)


def test_waits_double_up_to_the_longest_and_begin_anew_after_a_long_run() -> None:
    bench = Bench(a="")
    wait_s = FIRST_WAIT_S
    for number in range(8):
        bench.asked()
        bench.answer("a", ActorLost("no"))
        bench.after(wait_s - 0.01)
        assert ("start", "a") not in bench.asked()
        bench.after(0.02)
        assert ("start", "a") in bench.asked()
        assert bench.status("a").failures == number + 1
        wait_s = min(2 * wait_s, MAX_WAIT_S)
    assert wait_s == MAX_WAIT_S
    bench.serve("a", "h:1")
    bench.now_s += LONG_RUN_S
    bench.serve("a", "h:1")
    bench.answer("a", ActorLost("no"))
    bench.asked()
    bench.after(FIRST_WAIT_S)
    assert ("start", "a") in bench.asked()


def test_a_lost_call_is_asked_again_and_loses_nothing() -> None:
    bench = Bench(a="")
    bench.serve("a", "h:1")
    bench.answer("a", ActorUnsure())
    assert bench.status("a").phase is RayPhase.SERVING
    bench.asked()
    bench.after(1.0)
    assert bench.asked() == [("watch", "a")]


def test_a_replica_that_is_not_wanted_drains_and_then_gives_its_room_back() -> None:
    bench = Bench(a="", b="")
    bench.serve("a", "h:1")
    bench.serve("b", "h:2")
    bench.asked()
    bench.want(b="")
    assert bench.status("a") == RayStatus("a", RayPhase.DRAINING, "h:1", "h")
    assert bench.asked() == [("end", "a")]
    bench.answer("a", EngineState(EnginePhase.ENDED))
    assert [status.name for status in bench.reports[-1].replicas] == ["b"]
    assert bench.asked() == [("remove", "a")]


def test_a_pending_replica_that_is_not_wanted_any_more_is_gone_at_once() -> None:
    bench = Bench(a="")
    bench.want()
    assert bench.reports[-1].replicas == ()
    assert ("remove", "a") in bench.asked()


def test_a_new_driver_finds_the_actors_and_keeps_the_known_addresses_meanwhile() -> None:
    bench = Bench()
    bench.cluster.actors = {"a", "old"}
    bench.want(a="h:1")
    assert bench.status("a").address == "h:1"
    assert bench.status("old").phase is RayPhase.DRAINING
    assert bench.asked() == [("start", "a"), ("watch", "old")]
    bench.answer("old", serving("h:9"))
    assert ("end", "old") in bench.asked()
    bench.after(0.0)
    bench.answer("old", EngineState(EnginePhase.ENDED))
    assert [status.name for status in bench.reports[-1].replicas] == ["a"]


def test_reports_are_repeated_as_a_sign_of_life() -> None:
    bench = Bench(a="")
    count = len(bench.reports)
    bench.after(0.5)
    assert len(bench.reports) == count
    bench.after(0.5)
    assert len(bench.reports) == count + 1


def test_a_driver_ends_once_its_node_is_dead_and_not_while_that_is_unknown() -> None:
    answers = iter([True, None, None, True, False])
    ends: list[str] = []
    end_with_node(lambda: next(answers), lambda: ends.append("end"), lambda seconds: None)
    assert ends == ["end"]
    assert next(answers, None) is None
