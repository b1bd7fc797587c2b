"""Fronts on the machines of a cluster that the test plays: which machines get them, and how the fronts end."""

from math import inf

from text_generation_common.autoscaling import Demand
from text_generation_common.json_values import as_json, from_json
from text_generation_launcher.ray.driver import Driver
from text_generation_launcher.ray.fronts import LOOK_S, REMIND_S
from text_generation_launcher.ray.keeping import FIRST_WAIT_S, ActorLost
from text_generation_launcher.ray.tests.fake_cluster import ORDER, FakeReplicaCluster, serving
from text_generation_launcher.ray.values import (
    EnginePhase,
    EngineState,
    FrontOrder,
    RayPhase,
    RayReport,
    RayStatus,
    Wanted,
    digest_of,
)

FRONTS = FrontOrder(("--api-workers", "2"), 3000)
OTHERS = FrontOrder(("--api-workers", "3"), 3000)


class FrontBench:
    """A driver with one replica, `a`, and the machines of `nodes`."""

    def __init__(self, order: FrontOrder | None = FRONTS, **nodes: str) -> None:
        self.cluster = FakeReplicaCluster()
        self.cluster.nodes = dict(nodes)
        self.reports: list[RayReport] = []
        self.now_s = 0.0
        self.driver = Driver(self.cluster, self.reports.append, lambda: self.now_s)
        self.want(order)

    def want(self, order: FrontOrder | None, restart: str = "") -> None:
        self.driver.want(Wanted(ORDER, {"a": ""}, fronts=order, front_restart=restart))
        self.driver.turn()

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.driver.turn()

    def answer(self, name: str, answer: EngineState | ActorLost) -> None:
        self.cluster.answer(name, answer)
        self.driver.turn()
        self.driver.turn()

    def front(self, machine: str, order: FrontOrder = FRONTS) -> str:
        return f"front-{digest_of(order)}-{machine}"

    @property
    def statuses(self) -> dict[str, RayStatus]:
        return {status.name.rpartition("-")[2]: status for status in self.reports[-1].fronts}

    def told(self) -> list[tuple[str, tuple[str, ...]]]:
        told, self.cluster.told = self.cluster.told, []
        return told


def fronts_serve(demand: Demand | None = None) -> EngineState:
    return EngineState(EnginePhase.SERVING, "m1:3000", 7, "m1", demand=demand)


def test_each_machine_has_fronts_also_one_that_joins_later_or_again() -> None:
    bench = FrontBench(m1="n1")
    assert bench.cluster.started_on == [("m1", "n1")]
    bench.cluster.nodes["m2"] = "n2"
    bench.after(LOOK_S)
    assert bench.cluster.started_on[1:] == [("m2", "n2")]
    bench.answer(bench.front("m1"), fronts_serve())
    bench.cluster.nodes["m1"] = "n3"
    bench.after(LOOK_S)
    bench.answer(bench.front("m1"), ActorLost("the raylet is gone"))
    bench.after(FIRST_WAIT_S)
    assert bench.cluster.started_on[2:] == [("m1", "n3")]


def test_a_machine_that_is_lost_leaves_the_report_and_nothing_else_changes() -> None:
    bench = FrontBench(m1="n1", m2="n2")
    del bench.cluster.nodes["m1"]
    bench.after(LOOK_S)
    assert set(bench.statuses) == {"m2"}
    assert [status.name for status in bench.reports[-1].replicas] == ["a"]


def test_fronts_are_told_the_engines_at_each_change_and_again_and_again() -> None:
    bench = FrontBench(m1="n1", m2="n2")
    bench.told()
    bench.cluster.room.add("a")
    bench.answer("a", serving("h:1"))
    assert sorted(bench.told()) == [("m1", ("h:1",)), ("m2", ("h:1",))]
    bench.after(1.0)
    assert bench.told() == []
    bench.after(REMIND_S)
    assert sorted(bench.told()) == [("m1", ("h:1",)), ("m2", ("h:1",))]


def test_what_clients_of_fronts_elsewhere_want_is_reported() -> None:
    bench = FrontBench(m1="n1")
    bench.answer(bench.front("m1"), fronts_serve(Demand(2.0, 7, 0.5)))
    status = bench.statuses["m1"]
    assert (status.phase, status.address, status.demand) == (RayPhase.SERVING, "m1:3000", Demand(2.0, 7, 0.5))
    assert from_json(RayReport, as_json(bench.reports[-1])) == bench.reports[-1]


def test_fronts_that_are_not_wanted_drain_and_are_gone_only_when_they_have_ended() -> None:
    bench = FrontBench(m1="n1")
    bench.answer(bench.front("m1"), fronts_serve())
    bench.want(None)
    assert bench.statuses["m1"].phase is RayPhase.DRAINING
    assert ("end", bench.front("m1")) in bench.cluster.asked
    bench.answer(bench.front("m1"), EngineState(EnginePhase.ENDED))
    assert bench.statuses == {}


def test_fronts_that_start_when_they_are_no_longer_wanted_are_ended_and_not_forgotten() -> None:
    bench = FrontBench(m1="n1")
    bench.want(None)
    bench.answer(bench.front("m1"), EngineState(EnginePhase.STARTING))
    assert ("end", bench.front("m1")) in bench.cluster.asked
    assert bench.statuses["m1"].phase is RayPhase.DRAINING


def test_fronts_of_another_order_that_a_driver_has_left_are_drained() -> None:
    bench = FrontBench(None, m1="n1")
    bench.cluster.fronts.add(bench.front("m1", OTHERS))
    bench.want(FRONTS)
    phases = {status.name: status.phase for status in bench.reports[-1].fronts}
    assert phases == {bench.front("m1"): RayPhase.STARTING, bench.front("m1", OTHERS): RayPhase.DRAINING}


def test_fronts_are_told_the_newest_restart_at_once_and_again_and_again() -> None:
    bench = FrontBench(m1="n1", m2="n2")
    assert set(bench.cluster.restarts) == {("m1", ""), ("m2", "")}
    for seconds in (0.0, REMIND_S):
        bench.cluster.restarts.clear()
        bench.want(FRONTS, "r1")
        bench.after(seconds)
        assert sorted(bench.cluster.restarts) == [("m1", "r1"), ("m2", "r1")]


def test_orders_and_wishes_arrive_as_they_were_sent() -> None:
    order = FrontOrder(("--a", "b"), 3000, "0.0.0.0", 5.0, ("program",))
    wish = Wanted(ORDER, {"a": "h:1"}, 7, order, "r")
    for value in (order, ORDER, wish, Wanted(ORDER, {}), fronts_serve(Demand(inf, 7))):
        assert from_json(type(value), as_json(value)) == value
