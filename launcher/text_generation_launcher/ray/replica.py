"""Replicas on machines of a Ray cluster, as the launcher sees them: a replica of its set, and the orders that it makes
of its plan."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address

from text_generation_launcher import commands
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.errors import RayFailed
from text_generation_launcher.ray.client import RayClient
from text_generation_launcher.ray.values import EngineOrder, FrontOrder, RayPhase, RayStatus

logger = logging.getLogger("text_generation_launcher")

# Starts in a row without serving after which the replica counts as failed. Ray may have tried other machines by then.
MAX_FAILURES = 5
CHECK_S = 1.0
# Seconds without an answer of Ray after which a server that stops no longer waits for a replica's end.
GIVE_UP_S = 30.0
# Seconds that an engine gets to end in addition to the time in which its requests may end.
DRAIN_MARGIN_S = 30.0
# Seconds without any front after which an engine ends by itself, because its server was killed or has replaced it.
LONELY_S = 120.0


class RayReplica:
    """Implements AnyReplica. `on_change` is called when its endpoint or readiness changes."""

    def __init__(self, number: int, client: RayClient, on_change: Callable[[], None]) -> None:
        self.name = f"replica {number}"
        self._number = number
        self._client = client
        self._on_change = on_change
        self._status: RayStatus | None = None
        self._over = asyncio.Event()  # set when the replica is gone or has failed
        self._is_stopping = False

    @property
    def endpoint(self) -> str | None:
        return (self._status.address or None) if self._status is not None else None

    @property
    def is_ready(self) -> bool:
        return self._status is not None and self._status.phase is RayPhase.SERVING

    @property
    def is_pending(self) -> bool:
        return self._status is not None and self._status.phase is RayPhase.PENDING

    @property
    def waits_for(self) -> str:
        if self._status is None or self.is_ready:
            return ""
        return "no machine of the Ray cluster has room" if self.is_pending else self._status.why

    async def run(self) -> None:
        """Keeps the replica until it is gone (see AnyReplica). Raises RayFailed after MAX_FAILURES starts without
        serving."""
        self._client.want(self._number, self._take)
        try:
            while not self._over.is_set():
                try:
                    await asyncio.wait_for(self._over.wait(), CHECK_S)
                except TimeoutError:
                    if self._is_stopping and self._client.silent_s > GIVE_UP_S:
                        where = self.endpoint or "an unknown address"
                        logger.warning("%s: Ray does not answer; its engine (%s) ends without fronts", self.name, where)
                        return
            if self._status is not None:
                raise RayFailed(f"{self.name} did not serve in {MAX_FAILURES} starts: {self._status.why}")
        finally:
            self._client.forget(self._number)

    def stop(self) -> None:
        """Lets the replica drain and end (see AnyReplica)."""
        self._is_stopping = True
        self._client.drop(self._number)

    def _take(self, status: RayStatus | None) -> None:
        self._status = status
        if status is None or (status.failures >= MAX_FAILURES and not self._is_stopping):
            self._over.set()
        self._on_change()


def engine_order(plan: LaunchPlan) -> EngineOrder:
    """The order for an engine. It has no keys and tokens: each machine has its own certificates and, for the hub's
    token, its own environment."""
    drain_s = plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
    argv, cores = commands.engine_only(with_whole_paths(plan), LONELY_S), plan.cluster.on_ray.replica_cores
    return EngineOrder(argv, shards=plan.num_shard, cores=cores, drain_s=drain_s)


def front_order(plan: LaunchPlan, port: int) -> FrontOrder:
    """The order for the fronts of a machine. `port`: the port of the fronts beside the launch command. The order has no
    API keys, but may name a file with digests of keys."""
    listens_everywhere = ip_address(plan.http.hostname).is_unspecified
    argv = commands.fronts_only(with_whole_paths(plan))
    drain_s = plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
    return FrontOrder(argv, port, plan.http.hostname if listens_everywhere else "", drain_s)


def with_whole_paths(plan: LaunchPlan) -> LaunchPlan:
    """The plan with paths that mean the same in another working directory, as actors have it."""
    security = replace(plan.cluster.security, tls_dir=_whole(plan.cluster.security.tls_dir))
    files = replace(plan.files, tokenizer_config_path=_whole(plan.files.tokenizer_config_path))
    cache = replace(
        plan.cache,
        huggingface_hub_cache=_whole(plan.cache.huggingface_hub_cache),
        weights_cache_override=_whole(plan.cache.weights_cache_override),
    )
    access = replace(plan.access, api_key_file=_whole(plan.access.api_key_file))
    return replace(plan, files=files, cache=cache, access=access, cluster=replace(plan.cluster, security=security))


def _whole(path: str | None) -> str | None:
    return os.path.abspath(path) if path else path
