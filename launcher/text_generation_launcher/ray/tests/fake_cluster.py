"""A fake Ray cluster that records the driver's calls."""

from collections.abc import Mapping, Sequence

from text_generation_launcher.ray.keeping import ActorCall, Answer
from text_generation_launcher.ray.values import EngineOrder, EnginePhase, EngineState, FrontOrder

ORDER = EngineOrder(("--model-id", "m"), cores=1.0)


class FakeReplicaCluster:
    """Records the calls, and answers with the values that the test sets."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.open: dict[str, ActorCall] = {}
        self.ready: dict[ActorCall, Answer] = {}
        self.room: set[str] = set()
        self.actors: set[str] = set()
        self.nodes: dict[str, str] = {}  # by address: Ray's node id of each other machine
        self.fronts: set[str] = set()
        self.told: list[tuple[str, tuple[str, ...]]] = []  # report_engines: machine, addresses of engines
        self.restarts: list[tuple[str, str]] = []  # report_engines: machine, id of the restart last asked for
        self.started_on: list[tuple[str, str]] = []  # start_fronts: machine, Ray's node id
        self._number = 0

    def start(self, name: str, order: EngineOrder) -> ActorCall:
        assert order == ORDER
        self.actors.add(name)
        return self._call("start", name)

    def watch(self, name: str, known: EngineState, seconds: float) -> ActorCall:
        return self._call("watch", name)

    def end(self, name: str) -> None:
        self.asked.append(("end", name))

    def remove(self, name: str) -> None:
        self.asked.append(("remove", name))
        self.actors.discard(name)
        self.fronts.discard(name)

    def has_room(self, name: str) -> bool:
        return name in self.room

    def names(self) -> list[str]:
        return sorted(self.actors)

    def answers(self, calls: Sequence[ActorCall], seconds: float) -> dict[ActorCall, Answer]:
        return {call: self.ready.pop(call) for call in calls if call in self.ready}

    def answer(self, name: str, answer: Answer) -> None:
        self.ready[self.open[name]] = answer

    def _call(self, what: str, name: str) -> ActorCall:
        self.asked.append((what, name))
        self._number += 1
        self.open[name] = ActorCall(name, self._number)
        return self.open[name]

    def other_nodes(self) -> Mapping[str, str]:
        return dict(self.nodes)

    def front_names(self) -> list[str]:
        return sorted(self.fronts)

    def start_fronts(self, name: str, order: FrontOrder, node: str) -> ActorCall:
        self.started_on.append((name.rpartition("-")[2], node))
        self.fronts.add(name)
        return self._call("start", name)

    def report_engines(self, name: str, engines: Sequence[str], restart: str) -> None:
        self.told.append((name.rpartition("-")[2], tuple(engines)))
        self.restarts.append((name.rpartition("-")[2], restart))


def serving(address: str) -> EngineState:
    return EngineState(EnginePhase.SERVING, address, 7, address.partition(":")[0])
