"""Lets the number of replicas follow the load: asks the policy each second, and scales."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from text_generation_common.autoscaling import Demand, ReplicaPolicy
from text_generation_common.link import ReplicaState
from text_generation_launcher.replica_set import ReplicaSet

logger = logging.getLogger("text_generation_launcher")

# Seconds between two questions to the policy. Fronts tell what their clients want as often.
ASK_S = 1.0


class Autoscaler:
    """`run` is to be started as a task, and cancelled when the replicas have ended."""

    def __init__(
        self,
        replicas: ReplicaSet,
        demand: Callable[[], Demand | None],
        policy: ReplicaPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`demand`: what all clients want now; None: no front has told anything yet."""
        self._replicas = replicas
        self._demand = demand
        self._policy = policy
        self._clock = clock
        self._is_stopped = False

    def stop(self) -> None:
        """From now on the number of replicas stays as it is: the server ends."""
        self._is_stopped = True

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(ASK_S)
            self.ask()

    def ask(self) -> None:
        """Scales if the policy wants another number of replicas."""
        demand = self._demand()
        if demand is None or self._is_stopped:
            return
        report = self._replicas.report
        ready, pending = report.count(ReplicaState.READY), report.count(ReplicaState.PENDING)
        wanted = self._policy.wanted(self._clock(), demand, ready, pending)
        if wanted != report.wanted:
            logger.info(
                "The load asks for %d replicas: %d are ready, %d requests, the least expected wait is %.1fs",
                wanted,
                ready,
                demand.requests,
                demand.wait_s,
            )
            self._replicas.scale(wanted)
