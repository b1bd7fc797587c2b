"""A deployment in simulated time whose number of replicas follows its load, as the launcher's autoscaling does."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.replicas.deployment import TICK_S, Deployment, FleetPlan
from text_generation_benchmark.simulation.metrics import Targets
from text_generation_common.autoscaling import Demand, ReplicaPolicy, ScalingPace

ASK_TICKS = round(1.0 / TICK_S)  # the policy is asked once a second


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """`least` == `most`: a fixed number of replicas."""

    least: int
    most: int
    start_s: float  # seconds from a replica's start until it serves
    pace: ScalingPace | None = None

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.most} always"
        return f"{self.least} to {self.most}, start {self.start_s:g} s"


@dataclass(frozen=True, slots=True)
class ScalingSummary:
    """What one simulation with a changing number of replicas showed."""

    goodput: float  # good requests per second
    good: float  # part of the requests within the targets
    first_p99_s: float
    cached: float
    replica_s: float  # seconds of all replicas, those that start or drain included
    added: int
    removed: int
    turns: int  # additions after a removal, and removals after an addition
    most: int  # greatest number of replicas


class ReplicaScaler:
    """Starts and drains the engines of a deployment, as a policy says."""

    def __init__(self, plan: FleetPlan, scaling: ScalingPlan) -> None:
        self.deployment = Deployment(plan, scaling.least, self._tick)
        self.replica_s = 0.0
        self.changes: list[int] = []  # how many replicas were added (above 0) or removed
        self.most = scaling.least
        self._policy = ReplicaPolicy(scaling.least, scaling.most, scaling.pace)
        self._rows, self._start_s = plan.limits.max_running, scaling.start_s
        self._starting: dict[int, float] = {}  # when each engine that starts will serve
        self._ticks = 0

    def _tick(self, now_s: float) -> None:
        replicas = self.deployment.replicas
        for engine, ready_s in list(self._starting.items()):
            if ready_s <= now_s:
                del self._starting[engine]
                self.deployment.start(engine)
        held = {sent.engine for sent in self.deployment.sent.values()}
        for engine, replica in enumerate(replicas):
            if replica is not None and replica.is_draining and engine not in held:
                self.deployment.stop(engine)
        count = sum(replica is not None for replica in replicas) + len(self._starting)
        self.replica_s += count * TICK_S
        self.most = max(self.most, count)
        self._ticks += 1
        if self._ticks % ASK_TICKS == 0:
            self._follow(now_s)

    def _follow(self, now_s: float) -> None:
        serving = {i: each for i, each in enumerate(self.deployment.replicas) if each and not each.is_draining}
        loads = {engine: each.load for engine, each in serving.items()}
        demand = Demand(
            wait_s=min((load.wait_s for load in loads.values()), default=inf),
            requests=len(self.deployment.sent),
            used=sum(load.running for load in loads.values()) / (self._rows * len(loads)) if loads else 1.0,
        )
        wanted = self._policy.wanted(now_s, demand, len(serving))
        change = wanted - len(serving) - len(self._starting)
        if change > 0:
            replicas = self.deployment.replicas
            free = [i for i, each in enumerate(replicas) if each is None and i not in self._starting]
            change = min(change, len(free))  # engines that drain still hold their machines
            self._starting |= dict.fromkeys(free[:change], now_s + self._start_s)
        for _ in range(-change):
            if self._starting:
                self._starting.popitem()
            else:
                engine = min(serving, key=lambda each: (loads[each].tokens, each))
                serving.pop(engine).is_draining = True
        if change:
            self.changes.append(change)


def run_scaled(plan: FleetPlan, scaling: ScalingPlan, targets: Targets) -> ScalingSummary:
    scaler = ReplicaScaler(plan, scaling)
    deployment = scaler.deployment
    deployment.run()
    done = deployment.done
    first_s = np.array([sent.progress.first_s - sent.arrival_s for sent in done]) + plan.model.overhead_s
    longest_s = np.array([sent.progress.longest_gap_s for sent in done])
    good = (first_s <= targets.first_token_s) & (longest_s <= targets.gap_s)
    return ScalingSummary(
        goodput=float(good.sum()) / float(plan.arrivals_s[-1]),
        good=float(good.mean()),
        first_p99_s=float(np.quantile(first_s, 0.99)),
        cached=deployment.cached_tokens / deployment.prompt_tokens,
        replica_s=scaler.replica_s,
        added=sum(max(0, change) for change in scaler.changes),
        removed=sum(max(0, -change) for change in scaler.changes),
        turns=sum(before * after < 0 for before, after in pairwise(scaler.changes)),
        most=scaler.most,
    )


SCALING_HEAD = (
    "replicas", "good requests/s", "good", "first token s p99", "cached", "replica-hours", "most", "added", "removed",
    "turns",
)  # fmt: skip


def scaling_table(runs: list[tuple[ScalingPlan, ScalingSummary]]) -> str:
    return aligned_table([SCALING_HEAD, *(_scaling_cells(plan, summary) for plan, summary in runs)])


def _scaling_cells(plan: ScalingPlan, summary: ScalingSummary) -> list[str]:
    return [
        str(plan),
        f"{summary.goodput:.2f}",
        f"{summary.good:.1%}",
        f"{summary.first_p99_s:.2f}",
        f"{summary.cached:.1%}",
        f"{summary.replica_s / 3600:.1f}",
        str(summary.most),
        str(summary.added),
        str(summary.removed),
        str(summary.turns),
    ]
