"""What serves requests: a router with its shards; or fronts, replicas, or both."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from text_generation_common.autoscaling import Demand, ReplicaPolicy, joint_demand
from text_generation_common.flags.cluster import MAX_LOCAL_REPLICAS, Way
from text_generation_common.link import LinkEvent, LinkMessage, ReplicaReport
from text_generation_common.places import ServerPlace
from text_generation_common.tasks import cancelled
from text_generation_launcher.adapter_list import AdapterList
from text_generation_launcher.autoscaler import Autoscaler
from text_generation_launcher.config import ReplicaSite, slices
from text_generation_launcher.errors import ScaleRefused
from text_generation_launcher.fronts import Fronts
from text_generation_launcher.kept_process import KeptProcess
from text_generation_launcher.local_replica import LocalReplica, OwnedShards
from text_generation_launcher.ray.client import RayClient
from text_generation_launcher.ray.replica import GIVE_UP_S, RayReplica, engine_order, front_order
from text_generation_launcher.replica_set import ReplicaSet
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

    def stop(self) -> None:
        """Lets the processes end when their requests are done; then `run` returns."""

    async def run(self) -> None:
        """Keeps the processes running until `stop`. Raises a CommandError when another start would not help. When the
        task is cancelled, or raises, processes live on: the supervisor stops them."""


def serving_of(spawner: Spawner, place: ServerPlace) -> Serving:
    """What the plan of `spawner` asks for."""
    way, cluster = spawner.plan.cluster.way, spawner.plan.cluster
    if way is Way.ROUTER:
        return RouterAndShards(spawner, ReplicaSite(place))
    if way is Way.ENGINE:
        return EngineAlone(spawner, place)
    if way is Way.FRONTS:
        return FrontsAndReplicas(spawner, place, None)
    if way is Way.RAY:
        client = RayClient(spawner.start_ray_driver, engine_order(spawner.plan))
        if cluster.on_ray.fronts_on_every_node:
            client.want_fronts(front_order(spawner.plan, spawner.port))
        on_ray = ReplicaSet(lambda number, on_change: RayReplica(number, client, on_change), cluster.replicas or 1)
        return FrontsAndRay(spawner, place, on_ray, client)
    site_of, most, few = local_sites(spawner, place)

    def make(number: int, on_change: Callable[[], None]) -> LocalReplica:
        site, metrics_file = site_of(number), place.metrics_file(f"engine{number}")
        return LocalReplica(spawner, site, f"unix://{site.place.engine_socket}", metrics_file, on_change)

    replicas = ReplicaSet(make, cluster.replicas or 1, most, few=few)
    return FrontsAndReplicas(spawner, place, replicas)


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
        listed = spawner.plan.adapters.lora_adapters
        adapters = AdapterList(site.place.adapters_file, listed, lambda: [self._shards.owner])
        self._shards = OwnedShards(
            spawner,
            site,
            "Webserver",
            spawner.start_router,
            on_other=lambda message: adapters.take(self._shards.owner, message),
            adapters=lambda: adapters.latest,
        )

    @property
    def has_listened(self) -> bool:
        return self._shards.owner.has_listened

    def stop(self) -> None:
        self._shards.stop()

    async def run(self) -> None:
        await self._shards.run()


class EngineAlone:
    """A replica whose fronts are elsewhere."""

    def __init__(self, spawner: Spawner, place: ServerPlace) -> None:
        flags = spawner.plan.cluster.engine
        assert flags.engine_address is not None
        self._file = AddressFile(flags.engine_address_file)
        self._replica = LocalReplica(spawner, ReplicaSite(place), flags.engine_address, None, self._on_change)

    @property
    def has_listened(self) -> bool:
        return self._replica.endpoint is not None

    def stop(self) -> None:
        self._replica.stop()

    async def run(self) -> None:
        try:
            await self._replica.run()
        finally:
            self._file.remove()

    def _on_change(self) -> None:
        if self._replica.endpoint is not None:
            self._file.write(self._replica.endpoint)


class AddressFile:
    """The file in which a launcher tells where its engine serves, for scripts that let the kernel choose the port: it
    has the whole address, or is not there. `path` None: there is no file."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._written = ""

    def write(self, address: str) -> None:
        """An address that cannot be written is logged: the engine serves, and fronts that know it go on."""
        if self._path is None or address == self._written:
            return
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(f"{address}\n")
            partial.replace(self._path)
        except OSError as error:
            logger.error("--engine-address-file %s cannot be written: %s", self._path, error.strerror)
            return
        self._written = address

    def remove(self) -> None:
        """Removes the file that `write` has made."""
        if self._path is not None and self._written:
            with suppress(OSError):
                self._path.unlink()


class FrontsAndReplicas:
    """Fronts end before replicas do. Other launchers may have the replicas (None)."""

    def __init__(self, spawner: Spawner, place: ServerPlace, replicas: ReplicaSet | None) -> None:
        self.replicas = replicas
        self._autoscaler: Autoscaler | None = None
        self._demands: dict[KeptProcess, Demand] = {}  # what each front told last
        self._spawner = spawner
        cluster = spawner.plan.cluster
        patience_s = spawner.plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
        listed = spawner.plan.adapters.lora_adapters
        self._adapters = AdapterList(place.adapters_file, listed, lambda: self._fronts.processes)
        self._fronts = Fronts(
            spawner.start_front,
            cluster.api_workers,
            patience_s,
            self._take,
            adapters=lambda: self._adapters.latest,
            stands_by=lambda: spawner.router_stands_by,
        )
        if replicas is not None:
            replicas.watch(self._on_change)
            if cluster.max_replicas is not None:
                policy = ReplicaPolicy(cluster.replicas or 1, cluster.max_replicas)
                self._autoscaler = Autoscaler(replicas, lambda: self.demand, policy)

    @property
    def has_listened(self) -> bool:
        # A front listens before the first replica is ready: until then no request can have been answered.
        return self._fronts.has_listened and (self.replicas is None or self.replicas.has_served)

    @property
    def demand(self) -> Demand | None:
        """What clients want now; None: no front has told it yet."""
        return joint_demand(self._latest_demands())

    def stop(self) -> None:
        if self._autoscaler is not None:
            self._autoscaler.stop()
        self._fronts.stop()

    def scale(self, wanted: int) -> None:
        """From now on there are to be `wanted` replicas. ScaleRefused if there cannot be."""
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
        """Replaces the fronts one after another, without the loss of a request. The new ones have the code of now."""
        self._spawner.read_code_again()
        self._fronts.restart()

    async def run(self) -> None:
        fronts = asyncio.create_task(self._run_fronts())
        replicas = asyncio.create_task(self.replicas.run()) if self.replicas is not None else None
        ours: list[asyncio.Task[Any]] = [fronts, *([replicas] if replicas is not None else [])]
        if self._autoscaler is not None:
            ours.append(asyncio.create_task(self._autoscaler.run()))
        try:
            await _first_ended(fronts, *ours)
            if self.replicas is not None and replicas is not None:
                self.replicas.stop()
                await _first_ended(replicas, *ours)
        finally:
            await cancelled(*ours)

    async def _run_fronts(self) -> None:
        await self._fronts.run()

    def _latest_demands(self) -> list[Demand]:
        """What the clients of each front want."""
        self._demands = {front: demand for front, demand in self._demands.items() if front.listening.is_set()}
        return [*self._demands.values()]

    def _take(self, front: KeptProcess, message: LinkMessage) -> None:
        if message.event is LinkEvent.SCALE:
            front.send(LinkMessage(LinkEvent.SCALED, reason=self._scale(message.replicas)))
        elif message.event is LinkEvent.DEMAND and message.demand is not None:
            self._demands[front] = message.demand
        else:
            self._adapters.take(front, message)

    def _scale(self, wanted: int) -> str:
        """Asks for `wanted` replicas. Returns why they are refused, or ""."""
        try:
            self.scale(wanted)
        except ScaleRefused as error:
            return error.reason
        return ""

    def _on_change(self, deployment: ReplicaReport) -> None:
        self._spawner.num_replicas = deployment.wanted
        self._fronts.report_engines(deployment)


class FrontsAndRay(FrontsAndReplicas):
    """Replicas are on the machines of a Ray cluster, and fronts may be there too."""

    def __init__(self, spawner: Spawner, place: ServerPlace, replicas: ReplicaSet, ray: RayClient) -> None:
        super().__init__(spawner, place, replicas)
        self._ray = ray
        self._asking: asyncio.Task[NoReturn] | None = None

    def stop(self) -> None:
        super().stop()
        self._ray.drop_fronts()

    def restart_fronts(self) -> None:
        super().restart_fronts()
        self._ray.restart_fronts()

    async def run(self) -> None:
        self._asking = asyncio.create_task(self._ray.run())
        serving = asyncio.create_task(super().run())
        try:
            await _first_ended(serving, self._asking)
        finally:
            await cancelled(serving)

    async def withdraw(self) -> None:
        """Ends what `run` has left on Ray after a failed start, or a signal before its end. To be called once, after
        `run`."""
        if self._asking is None:
            return
        clearing = asyncio.create_task(self._ray.clear())
        try:
            await asyncio.wait([clearing, self._asking], timeout=WITHDRAW_S, return_when=asyncio.FIRST_COMPLETED)
            if not clearing.done() and not self._asking.done():
                logger.warning("Ray has not taken all replicas away in %.0fs; they end without fronts", WITHDRAW_S)
        finally:
            await cancelled(clearing, self._asking)

    async def _run_fronts(self) -> None:
        await super()._run_fronts()
        await self._ray.fronts_gone(GIVE_UP_S)

    def _latest_demands(self) -> list[Demand]:
        return [*super()._latest_demands(), *self._ray.demands]


async def _first_ended(awaited: "asyncio.Task[None]", *others: "asyncio.Task[Any]") -> None:
    """Waits for the end of one task. Raises what it raises, or what another raises meanwhile."""
    while not awaited.done():
        done, _ = await asyncio.wait({awaited, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
