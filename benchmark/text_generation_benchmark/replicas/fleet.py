"""A day of 1,000 GPUs: 125 replicas of a large model, peaks in the morning and the evening, and a rack that is lost.
And a small day, on which the number of replicas follows the load, as the launcher's autoscaling does."""

from dataclasses import dataclass, replace
from math import inf

from text_generation_benchmark.replicas.chats import ChatLoad, day_arrivals
from text_generation_benchmark.replicas.deployment import TICK_S, Deployment, FleetPlan, ReplicaLoss
from text_generation_benchmark.replicas.front import Policy
from text_generation_benchmark.shapes import LLAMA_405B
from text_generation_benchmark.simulation.cost import H200, derive
from text_generation_benchmark.simulation.engine import Targets
from text_generation_benchmark.simulation.trace import LogNormal
from text_generation_common.autoscaling import Demand, ReplicaPolicy, ScalingPace
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling.request import Limits

GPUS_PER_REPLICA, RACK = 8, 9  # a rack of 72 GPUs
MODEL = derive("h200-405b", "Llama 3.1 405B", LLAMA_405B, H200, GPUS_PER_REPLICA)
LOAD = ChatLoad(
    num_systems=200,
    system_tokens=2000,
    num_chats=4000,
    user=LogNormal(400, 0.8, 16, 2000),
    output=LogNormal(250, 0.6, 1, 1024),
    max_tokens=10_000,
    max_new_tokens=1024,
)
TARGETS = Targets(10.0, 2.0)
SLOTS, ROWS, CHUNK = 200_000, 128, 4096  # slots: half of what is left beside the weights, which saves memory here
SLOWDOWN = 30.0  # fewer and larger chunks of prompts than by default, for shorter simulations


# A tenth of the chats and system prompts, for a handful of replicas.
SMALL_LOAD = replace(LOAD, num_systems=20, num_chats=400)


def small_day(replicas: int, day_s: float, rate: float, seed: int) -> FleetPlan:
    """A day with peaks and without losses, on at most `replicas` replicas of the same model."""
    plan = day(Policy.SCORE, 2, replicas, day_s, rate, seed)
    return replace(plan, load=SMALL_LOAD, losses=())


def day(policy: Policy, num_fronts: int, replicas: int, day_s: float, rate: float, seed: int) -> FleetPlan:
    """A day of `day_s` seconds with `rate` requests a second on average. At 11 o'clock, in the first peak, a rack is
    lost, and it comes back two hours later."""
    hour_s = day_s / 24
    rack = max(1, replicas * RACK // 125)
    return FleetPlan(
        LOAD,
        day_arrivals(rate, day_s, seed),
        MODEL,
        Limits(min(SLOTS, MODEL.slots), ROWS, CHUNK, SchedulingFlags(max_prefill_slowdown=SLOWDOWN)),
        policy,
        replicas,
        num_fronts,
        [ReplicaLoss(11 * hour_s, 13 * hour_s, 0, rack)],
        seed=seed,
    )


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
