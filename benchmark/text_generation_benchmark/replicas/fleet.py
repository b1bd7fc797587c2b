"""A day of 1,000 GPUs: 125 replicas of a large model, peaks in the morning and the evening, and a rack that is lost."""

from dataclasses import replace

from text_generation_benchmark.replicas.chats import ChatLoad, day_arrivals
from text_generation_benchmark.replicas.deployment import FleetPlan, ReplicaLoss
from text_generation_benchmark.replicas.front import Policy
from text_generation_benchmark.shapes import LLAMA_405B
from text_generation_benchmark.simulation.devices import H200, derive
from text_generation_benchmark.simulation.metrics import Targets
from text_generation_benchmark.simulation.workloads import LogNormal
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling.limits import Limits

GPUS_PER_REPLICA, RACK = 8, 9  # a rack of 72 GPUs
MODEL = derive("h200-405b", "Llama 3.1 405B", LLAMA_405B, H200, GPUS_PER_REPLICA)
LOAD = ChatLoad(
    num_systems=200,
    system_tokens=2000,
    num_chats=4000,
    user=LogNormal(400, 0.8, 16, 2000),
    output=LogNormal(250, 0.6, 1, 1024),
    most_tokens=10_000,
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
        moves=policy is Policy.SCORE,
        seed=seed,
    )
