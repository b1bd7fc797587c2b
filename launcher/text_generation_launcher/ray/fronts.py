"""Keeps the fronts of a server on the machines of a cluster: one actor on each living machine, except the machine of
the launch command, whose launcher has fronts of its own. Decides what to ask Ray for, without input, output or a clock.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from text_generation_launcher.ray.keeping import ActorCall, Answer, ReplicaKeeper
from text_generation_launcher.ray.values import EngineState, FrontOrder, Order, RayStatus, digest_of

# Seconds between two lists of the cluster's machines, and after which unchanged addresses of engines are sent again.
LOOK_S, REMIND_S = 2.0, 5.0
# Beginning of the names of actors with fronts. A replica's name begins with a digest.
FRONT = "front-"


class FrontCluster(Protocol):
    """The calls of Ray for fronts. Each method may raise ClusterLost, which ends the driver."""

    def other_nodes(self) -> Mapping[str, str]:
        """Ray's names of the machines that are alive, without this one, by their addresses."""

    def front_names(self) -> list[str]:
        """Names of the actors that have fronts."""

    def start_fronts(self, name: str, order: FrontOrder, node: str) -> ActorCall: ...

    def report_engines(self, name: str, engines: Sequence[str], restart: str) -> None:
        """Sends fronts the addresses of the engines, and the newest restart's name. See `FrontHost.report_engines`."""

    def watch(self, name: str, known: EngineState, seconds: float) -> ActorCall: ...

    def end(self, name: str) -> None: ...

    def remove(self, name: str) -> None: ...


class _OneMachine:
    """A ReplicaCluster whose replicas are the fronts of one machine, so that a ReplicaKeeper can keep them."""

    def __init__(self, cluster: FrontCluster, node: str) -> None:
        self.node = node
        self._cluster = cluster
        self.watch, self.end, self.remove = cluster.watch, cluster.end, cluster.remove

    def start(self, name: str, order: Order) -> ActorCall:
        assert isinstance(order, FrontOrder)
        return self._cluster.start_fronts(name, order, self.node)

    def has_room(self, name: str) -> bool:
        return True

    def names(self) -> list[str]:
        return self._cluster.front_names()

    def answers(self, calls: Sequence[ActorCall], seconds: float) -> dict[ActorCall, Answer]:
        raise AssertionError("the driver waits for the answers of all keepers together")


class NodeFronts:
    """Keeps the fronts of all other machines. `keepers`: for each actor with fronts, by the actor's name, its
    ReplicaKeeper; the driver gives each keeper the answers to its calls."""

    def __init__(self, cluster: FrontCluster) -> None:
        self.keepers: dict[str, ReplicaKeeper] = {}
        self._cluster = cluster
        self._machines: dict[str, _OneMachine] = {}
        self._order: FrontOrder | None = None
        self._sent: tuple[str, ...] = ()
        self._restart = ""
        self._looked_s = self._reminded_s = float("-inf")

    @property
    def statuses(self) -> tuple[RayStatus, ...]:
        return tuple(keeper.status for keeper in self.keepers.values())

    def want(self, order: FrontOrder | None, restart: str = "") -> None:
        """From now on each other machine is to have the fronts of `order`; None: no fronts. Fronts of other orders are
        drained, also those of an earlier driver. Fronts that are older than the restart of this name are replaced."""
        if restart != self._restart:
            self._restart, self._reminded_s = restart, float("-inf")
        if order != self._order:
            self._looked_s = float("-inf")
        self._order = order
        for name in {*self.keepers, *self._cluster.front_names()}:
            if order is None or not name.startswith(_beginning(order)):
                if name not in self.keepers:
                    self._keep(name, "", order or FrontOrder((), 0))
                self.keepers[name].drain()

    def turn(self, now_s: float, engines: Sequence[str]) -> None:
        """Makes the calls that are due. `engines`: addresses of the engines that serve now."""
        if self._order is not None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._follow_machines(self._order)
        for keeper in list(self.keepers.values()):
            keeper.turn(now_s)
        if tuple(engines) != self._sent or now_s - self._reminded_s >= REMIND_S:
            self._sent, self._reminded_s = tuple(engines), now_s
            for name in self.keepers:
                self._cluster.report_engines(name, self._sent, self._restart)

    def drop_those_gone(self) -> None:
        for name in [name for name, keeper in self.keepers.items() if keeper.is_gone]:
            self._forget(name)

    def _follow_machines(self, order: FrontOrder) -> None:
        living = {f"{_beginning(order)}{address}": node for address, node in self._cluster.other_nodes().items()}
        for name, node in living.items():
            if name not in self.keepers:
                self._keep(name, node, order)
            self._machines[name].node = node  # A machine that joins again has another node id.
        for name in [name for name in self.keepers if name.startswith(_beginning(order)) and name not in living]:
            self._forget(name)

    def _keep(self, name: str, node: str, order: FrontOrder) -> None:
        self._machines[name] = _OneMachine(self._cluster, node)
        self.keepers[name] = ReplicaKeeper(name, order, self._machines[name])
        self._reminded_s = float("-inf")

    def _forget(self, name: str) -> None:
        del self.keepers[name], self._machines[name]


def _beginning(order: FrontOrder) -> str:
    return f"{FRONT}{digest_of(order)}-"
