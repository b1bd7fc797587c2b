"""What serves requests: a router with its shards; or fronts, replicas, or both."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from text_generation_common.autoscaling import Demand, ReplicaPolicy, joint_demand
from text_generation_common.flags.cluster import MAX_LOCAL_REPLICAS, Way
from text_generation_common.link import LinkEvent, LinkMessage, ReplicaReport
from text_generation_common.places import ServerPlace
from text_generation_common.tasks import cancelled
from text_generation_launcher.address_file import AddressFile
from text_generation_launcher.autoscaler import Autoscaler
from text_generation_launcher.errors import ScaleRefused
from text_generation_launcher.fronts import Fronts
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.local_replica import LocalReplica
from text_generation_launcher.owned_shards import OwnedShards
from text_generation_launcher.ray.client import RayClient
from text_generation_launcher.ray.order import engine_order, front_order
from text_generation_launcher.ray.replica import GIVE_UP_S, RayReplica
from text_generation_launcher.replica_set import ReplicaSet
from text_generation_launcher.replica_site import ReplicaSite, slices
from text_generation_launcher.spawner import Spawner

logger = logging.getLogger("text_generation_launcher")

# Seconds that a draining router gets in addition to its own timeout: it may need twice 5 s for its last answers.
DRAIN_MARGIN_S = 12.0
# Seconds in which Ray has to take away what a server that ends early has there.
WITHDRAW_S = 30.0


class Serving(Protocol):
    """`run` is to be started as a task, once."""

    @property
    def has_listened(self) -> bool:
        """Whether requests were served."""

    @property
    def replicas(self) -> ReplicaSet | None:
        """The replicas that can be scaled; None: there are none."""

    @property
    def demand(self) -> Demand | None:
        """What clients want now; None: that is not known here, or not yet."""

    def scale(self, wanted: int) -> None:
        """From now on there are to be `wanted` replicas. ScaleRefused if there cannot be."""

    def stop(self) -> None:
        """Lets the processes end when their requests are done; then `run` returns."""

    def restart_fronts(self) -> None:
        """Replaces the fronts one after another, without the loss of a request."""

    async def run(self) -> None:
        """Keeps the processes running until `stop`. Raises a CommandError when another start would not help. When the
        task is cancelled, or raises, processes live on: the supervisor stops them, and calls `withdraw`."""

    async def withdraw(self) -> None:
        """Ends what `run` has left on other machines. To be called once, after `run`."""


def serving_of(spawner: Spawner, place: ServerPlace) -> Serving:
    """What the plan of `spawner` asks for."""
    way, cluster = spawner.plan.cluster.way, spawner.plan.cluster
    if way is Way.ROUTER:
        return RouterAndShards(spawner, ReplicaSite(place))
    if way is Way.ENGINE:
        return EngineAlone(spawner, place)
    if way is Way.FRONTS:
        return FrontsAndReplicas(spawner, cluster.api_workers, None)
    if way is Way.RAY:
        client = RayClient(spawner.start_ray_driver, engine_order(spawner.plan))
        if cluster.on_ray.fronts_on_every_node:
            client.want_fronts(front_order(spawner.plan, spawner.port))
        on_ray = ReplicaSet(lambda number, on_change: RayReplica(number, client, on_change), cluster.replicas or 1)
        return FrontsAndReplicas(spawner, cluster.api_workers, on_ray, client)
    site_of, most, few = local_sites(spawner, place)

    def make(number: int, on_change: Callable[[], None]) -> LocalReplica:
        site, metrics_file = site_of(number), place.metrics_file(f"engine{number}")
        return LocalReplica(spawner, site, f"unix://{site.place.engine_socket}", metrics_file, on_change)

    replicas = ReplicaSet(make, cluster.replicas or 1, most, few=few)
    return FrontsAndReplicas(spawner, cluster.api_workers, replicas)


def local_sites(spawner: Spawner, place: ServerPlace) -> tuple[Callable[[int], ReplicaSite], int, str]:
    """The site of each number, how many there can be, and why not more."""
    plan = spawner.plan
    if plan.cluster.replicas is None:
        return lambda number: ReplicaSite(place), 1, ": start the server with --replicas to have several"
    if not plan.devices:
        return lambda number: ReplicaSite(place.replica(number), number, True), MAX_LOCAL_REPLICAS, ""
    shares = slices(plan.devices, plan.num_shard)
    few = f": {len(plan.devices)} GPUs are visible, and each replica needs {plan.num_shard}"
    return lambda number: ReplicaSite(place.replica(number), number, True, shares[number]), len(shares), few


class RouterAndShards:
    """One process is front and engine."""

    def __init__(self, spawner: Spawner, site: ReplicaSite) -> None:
        self.replicas = self.demand = None
        self._shards = OwnedShards(spawner, site, "Webserver", spawner.start_router)

    @property
    def has_listened(self) -> bool:
        return self._shards.owner.has_listened

    def stop(self) -> None:
        self._shards.stop()

    def scale(self, wanted: int) -> None:
        raise _not_scalable()

    def restart_fronts(self) -> None:
        logger.warning("The webserver is not restarted: only --api-workers has others that serve meanwhile")

    async def run(self) -> None:
        await self._shards.run()

    async def withdraw(self) -> None:
        pass


class EngineAlone:
    """A replica whose fronts are elsewhere."""

    def __init__(self, spawner: Spawner, place: ServerPlace) -> None:
        flags = spawner.plan.cluster.engine
        assert flags.engine_address is not None
        self.replicas = self.demand = None
        self._file = AddressFile(flags.engine_address_file)
        self._replica = LocalReplica(spawner, ReplicaSite(place), flags.engine_address, None, self._on_change)

    @property
    def has_listened(self) -> bool:
        return self._replica.endpoint is not None

    def stop(self) -> None:
        self._replica.stop()

    def scale(self, wanted: int) -> None:
        raise _not_scalable()

    def restart_fronts(self) -> None:
        logger.warning("There are no fronts here to be restarted: --engine-only serves fronts elsewhere")

    async def run(self) -> None:
        try:
            await self._replica.run()
        finally:
            self._file.remove()

    async def withdraw(self) -> None:
        pass

    def _on_change(self) -> None:
        if self._replica.endpoint is not None:
            self._file.write(self._replica.endpoint)


class FrontsAndReplicas:
    """Fronts end before replicas do. Replicas may be elsewhere (None). `ray` has the replicas on a Ray cluster."""

    def __init__(
        self,
        spawner: Spawner,
        num_fronts: int,
        replicas: ReplicaSet | None,
        ray: RayClient | None = None,
    ) -> None:
        self.replicas = replicas
        self._ray = ray
        self._asking_ray: asyncio.Task[NoReturn] | None = None
        self._autoscaler: Autoscaler | None = None
        self._demands: dict[KeptProcess, Demand] = {}  # what each front told last
        self._spawner = spawner
        patience_s = spawner.plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
        self._fronts = Fronts(spawner.start_front, num_fronts, patience_s, self._take)
        if replicas is not None:
            replicas.watch(self._on_change)
            cluster = spawner.plan.cluster
            if cluster.max_replicas is not None:
                policy = ReplicaPolicy(cluster.replicas or 1, cluster.max_replicas)
                self._autoscaler = Autoscaler(replicas, lambda: self.demand, policy)

    @property
    def has_listened(self) -> bool:
        return self._fronts.has_listened

    def stop(self) -> None:
        if self._autoscaler is not None:
            self._autoscaler.stop()
        self._fronts.stop()
        if self._ray is not None:
            self._ray.drop_fronts()

    def scale(self, wanted: int) -> None:
        if self.replicas is None:
            raise ScaleRefused(
                "this server does not start its engines, so it cannot start more of them", "scale where they start"
            )
        if self._autoscaler is not None:
            raise ScaleRefused(
                "the number of replicas follows the load",
                "start the server with other --min-replicas, or with --replicas",
            )
        self.replicas.scale(wanted)

    def restart_fronts(self) -> None:
        self._fronts.restart()
        if self._ray is not None:
            self._ray.restart_fronts()

    async def run(self) -> None:
        fronts = asyncio.create_task(self._fronts.run())
        replicas = asyncio.create_task(self.replicas.run()) if self.replicas is not None else None
        ours: list[asyncio.Task[Any]] = [fronts, *([replicas] if replicas is not None else [])]
        if self._autoscaler is not None:
            ours.append(asyncio.create_task(self._autoscaler.run()))
        if self._ray is not None:
            self._asking_ray = asyncio.create_task(self._ray.run())
        others = [*ours, *([self._asking_ray] if self._asking_ray is not None else [])]
        try:
            await _first_ended(fronts, *others)
            if self._ray is not None:
                elsewhere = asyncio.create_task(self._ray.fronts_gone(GIVE_UP_S))
                ours.append(elsewhere)
                await _first_ended(elsewhere, *others)
            if self.replicas is not None and replicas is not None:
                self.replicas.stop()
                await _first_ended(replicas, *others)
        finally:
            await cancelled(*ours)

    async def withdraw(self) -> None:
        """What is on Ray after a failed start, or a signal before its end."""
        if self._ray is None or self._asking_ray is None:
            return
        clearing = asyncio.create_task(self._ray.clear())
        try:
            await asyncio.wait([clearing, self._asking_ray], timeout=WITHDRAW_S, return_when=asyncio.FIRST_COMPLETED)
            if not clearing.done() and not self._asking_ray.done():
                logger.warning("Ray has not taken all replicas away in %.0fs; they end without fronts", WITHDRAW_S)
        finally:
            await cancelled(clearing, self._asking_ray)

    @property
    def demand(self) -> Demand | None:
        """What the clients of all fronts want, those on other machines included."""
        self._demands = {front: demand for front, demand in self._demands.items() if front.listening.is_set()}
        return joint_demand([*self._demands.values(), *(self._ray.demands if self._ray is not None else ())])

    def _take(self, front: KeptProcess, message: LinkMessage) -> None:
        if message.event is LinkEvent.SCALE:
            front.send(LinkMessage(LinkEvent.SCALED, reason=self._scale(message.replicas)))
        elif message.event is LinkEvent.DEMAND and message.demand is not None:
            self._demands[front] = message.demand

    def _scale(self, wanted: int) -> str:
        """Asks for `wanted` replicas. Returns why they are refused, or ""."""
        try:
            self.scale(wanted)
        except ScaleRefused as error:
            return error.reason
        return ""

    def _on_change(self, deployment: ReplicaReport) -> None:
        self._spawner.num_replicas = deployment.wanted
        self._fronts.tell_engines(deployment)


def _not_scalable() -> ScaleRefused:
    return ScaleRefused("this server starts no replicas", "start it with --replicas N")


async def _first_ended(awaited: "asyncio.Task[None]", *others: "asyncio.Task[Any]") -> None:
    """Waits for the end of one task. Raises what it raises, or what another raises meanwhile."""
    while not awaited.done():
        done, _ = await asyncio.wait({awaited, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
