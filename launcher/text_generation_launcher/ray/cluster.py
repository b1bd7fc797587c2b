"""The driver's calls of Ray. Beside `hosts.py`, the actors, the only file that imports Ray.

Each replica has a placement group of one bundle, which is what Ray's autoscaler scales on, and in it a detached actor:
group and actor outlive the driver, and the next driver finds them by their names."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.util import get_placement_group, list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from text_generation_common.json_values import as_json, from_json
from text_generation_launcher.ray.fronts import FRONT
from text_generation_launcher.ray.hosts import FrontHost, ReplicaHost
from text_generation_launcher.ray.keeping import ActorCall, ActorLost, ActorUnsure, Answer
from text_generation_launcher.ray.values import EngineOrder, EngineState, FrontOrder, Order

# Maximum number of calls that one actor answers at the same time: a few watches of drivers that have ended, a start, an
# end.
MAX_CALLS = 100


class ClusterLost(Exception):
    """Ray cannot be reached, or does not answer. The text is one line."""


class RayReplicas:
    """The replicas of one deployment in a Ray cluster: those in `namespace`."""

    def __init__(self, address: str, namespace: str, node: str) -> None:
        """Connects to the cluster at `address`, or with "auto" to the cluster of which this machine is a part. `node`:
        this machine's address in the cluster, or "" if Ray is to find the address itself."""
        self._namespace = namespace
        self._handles: dict[str, ray.actor.ActorHandle] = {}
        self._open: dict[ActorCall, ray.ObjectRef] = {}
        self._numbers = itertools.count()
        with _raising_cluster_lost():
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level="ERROR",
                **({"_node_ip_address": node} if node else {}),
            )

    def has_node(self) -> bool | None:
        """Whether the node of this driver lives; None: Ray does not answer. May be called on any thread."""
        own = ray.get_runtime_context().get_node_id()
        try:
            with _raising_cluster_lost():
                return any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())
        except ClusterLost:
            return None

    def start(self, name: str, order: Order) -> ActorCall:
        assert isinstance(order, EngineOrder)
        with _raising_cluster_lost():
            cpus, gpus = order.needs(self._has_gpus())
            group = self._group(name)
            if group is None:
                bundle = {"CPU": cpus} if cpus else {"GPU": float(gpus)}
                group = placement_group([bundle], name=self._group_name(name), lifetime="detached")
            actor = ray.remote(ReplicaHost).options(
                name=name,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            handle = self._handles[name] = actor.remote()
            return self._opened(name, handle.start.remote(as_json(order)))

    def watch(self, name: str, known: EngineState, seconds: float) -> ActorCall:
        handle = self._handle(name)
        return self._opened(name, None if handle is None else handle.watch.remote(as_json(known), seconds))

    def end(self, name: str) -> None:
        handle = self._handle(name)
        if handle is not None:
            handle.end.remote()

    def remove(self, name: str) -> None:
        handle = self._handle(name)
        self._handles.pop(name, None)
        with _raising_cluster_lost():
            if handle is not None:
                ray.kill(handle)
            group = self._group(name)
            if group is not None:
                remove_placement_group(group)

    def has_room(self, name: str) -> bool:
        with _raising_cluster_lost():
            group = self._group(name)
            return group is not None and placement_group_table(group).get("state") == "CREATED"

    def names(self) -> list[str]:
        return [name for name in self._actors() if not name.startswith(FRONT)]

    def front_names(self) -> list[str]:
        return [name for name in self._actors() if name.startswith(FRONT)]

    def other_nodes(self) -> Mapping[str, str]:
        with _raising_cluster_lost():
            here = ray.get_runtime_context().get_node_id()
            living = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        return {address: node for node, address in living.items() if address != living.get(here)}

    def start_fronts(self, name: str, order: FrontOrder, node: str) -> ActorCall:
        with _raising_cluster_lost():
            actor = ray.remote(FrontHost).options(
                name=name,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            handle = self._handles[name] = actor.remote()
            return self._opened(name, handle.start.remote(as_json(order)))

    def report_engines(self, name: str, engines: Sequence[str], restart: str) -> None:
        handle = self._handle(name)
        if handle is not None:
            handle.report_engines.remote(",".join(engines), restart)

    def answers(self, calls: Sequence[ActorCall], seconds: float) -> dict[ActorCall, Answer]:
        found: dict[ActorCall, Answer] = {
            call: ActorLost("it has no actor") for call in calls if call not in self._open
        }
        waiting = {self._open[call]: call for call in calls if call in self._open}
        if waiting:
            done, _ = ray.wait(list(waiting), timeout=0.0 if found else seconds)
            found |= {waiting[ref]: self._answer(waiting[ref], ref) for ref in done}
        return found

    def _actors(self) -> list[str]:
        with _raising_cluster_lost():
            return [str(name) for name in list_named_actors()]

    def _has_gpus(self) -> bool:
        return bool(ray.cluster_resources().get("GPU", 0.0) > 0)

    def _answer(self, call: ActorCall, ref: ray.ObjectRef) -> Answer:
        del self._open[call]
        try:
            return from_json(EngineState, ray.get(ref))
        except ray.exceptions.ActorUnavailableError:
            return ActorUnsure()
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
            self._handles.pop(call.name, None)
            return ActorLost(_line(error))
        except ray.exceptions.RayTaskError as error:
            # A fault in our actor: another actor takes its place, and the log has the reason.
            ray.kill(self._handles.pop(call.name))
            return ActorLost(_line(error))

    def _opened(self, name: str, ref: "ray.ObjectRef | None") -> ActorCall:
        call = ActorCall(name, next(self._numbers))
        if ref is not None:
            self._open[call] = ref
        return call

    def _handle(self, name: str) -> "ray.actor.ActorHandle | None":
        if name not in self._handles:
            with _raising_cluster_lost():
                try:
                    self._handles[name] = ray.get_actor(name)
                except ValueError:  # there is no actor of this name
                    return None
        return self._handles[name]

    def _group(self, name: str) -> PlacementGroup | None:
        try:
            return get_placement_group(self._group_name(name))
        except ValueError:  # there is no placement group of this name
            return None

    def _group_name(self, name: str) -> str:
        return f"{self._namespace}/{name}"


@contextmanager
def _raising_cluster_lost() -> Iterator[None]:
    """Turns errors of a cluster that cannot be reached into ClusterLost."""
    try:
        yield
    except (ConnectionError, TimeoutError, ray.exceptions.RaySystemError, ray.exceptions.RpcError) as error:
        raise ClusterLost(_line(error)) from error


def _line(error: Exception) -> str:
    """The first line of an error that is not blank, or the name of the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
