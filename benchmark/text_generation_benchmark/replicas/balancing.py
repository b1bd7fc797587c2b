"""Policies of fronts, simulated and then live: what share of the prompts caches have, and tokens per second.

The live side has engines and fronts in processes of their own and pretended shards, whose steps take what the simulated
steps cost. Both sides get the same requests at the same times.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop

from text_generation_benchmark.output import aligned_table, say
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.replicas.chats import ChatLoad, steady_arrivals
from text_generation_benchmark.replicas.deployment import Deployment, FleetPlan
from text_generation_benchmark.replicas.front import Policy
from text_generation_benchmark.replicas.live_chats import ChatWords, LiveAnswer, play_chats
from text_generation_benchmark.replicas.processes import live_replicas
from text_generation_benchmark.simulation.cost import SimulatedModel, StepCost
from text_generation_benchmark.simulation.workloads import LogNormal
from text_generation_router.fleet.policies import PlacementPolicy
from text_generation_router.scheduling.limits import Limits

# The chats of `ChatLoad`, with a quarter of the tokens.
PART = 4
LOAD = ChatLoad(
    system_tokens=1200 // PART,
    num_chats=400,
    user=LogNormal(150 / PART, 0.8, 8, 1000 // PART),
    output=LogNormal(150 / PART, 0.6, 2, 512 // PART),
    most_tokens=5500 // PART,
    max_new_tokens=512 // PART,
    exact=True,
)
# Slow enough for two cores to carry four of them. A pretended shard does not know what attention costs.
COST = StepCost(0.04, 0.0, 0.0, 0.0005, 0.0, 0.0004, 0.0)
NUM_ENGINES, SLOTS = 4, 200_000 // PART
MODEL = SimulatedModel("pretended", COST, SLOTS, 0.0, "invented")
ROWS, CHUNK = 64, 1024


@dataclass(frozen=True, slots=True)
class Balance:
    """How one policy did. Times in seconds."""

    cached: float  # part of all prompt tokens that caches had
    first_mean_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class BalanceRow:
    policy: Policy
    fronts: int
    simulated: Balance
    live: Balance


def compare_policies(
    model: Path, shares: bool, rate: float, seconds: float, fronts: Sequence[int], seed: int
) -> list[BalanceRow]:
    load = replace(LOAD, shares=shares)
    arrivals_s = steady_arrivals(rate, seconds, seed)
    limits = Limits(MODEL.slots, ROWS, CHUNK)
    arguments = ["--max-batch-size", str(ROWS), "--max-batch-prefill-tokens", str(CHUNK)]
    prompts, rows = Prompts(model), list[BalanceRow]()
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as name:
        cost = Path(name) / "cost.json"
        MODEL.write(cost)
        with live_replicas(model, Path(name), NUM_ENGINES, str(cost), arguments) as replicas:
            for count in fronts:
                for policy in Policy:
                    moves = policy is Policy.SCORE
                    plan = FleetPlan(load, arrivals_s, MODEL, limits, policy, NUM_ENGINES, count, (), moves, seed)
                    simulated = _simulated(plan)
                    words = ChatWords(prompts, salt=len(rows))
                    with replicas.fronts(count, PlacementPolicy(policy.value.replace(" ", "-"))) as started:
                        ports = [front.port for front in started]
                        answers = uvloop.run(play_chats(ports, load, arrivals_s, words, seed))
                    rows.append(BalanceRow(policy, count, simulated, _live(answers)))
                    say(" | ".join(_cells(rows[-1])))
    return rows


def _simulated(plan: FleetPlan) -> Balance:
    deployment = Deployment(plan)
    deployment.run()
    done = deployment.done
    return Balance(
        deployment.cached_tokens / deployment.prompt_tokens,
        float(np.mean([sent.progress.first_s - sent.arrival_s for sent in done])),
        sum(sent.turn.output_tokens for sent in done) / max(sent.progress.last_s for sent in done),
    )


def _live(answers: Sequence[LiveAnswer]) -> Balance:
    return Balance(
        sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers),
        float(np.mean([answer.first_s for answer in answers])),
        sum(answer.output_tokens for answer in answers) / max(answer.end_s for answer in answers),
    )


HEAD = (
    "policy", "fronts", "cached: simulated", "live", "first token s: simulated", "live", "tokens/s: simulated", "live",
)  # fmt: skip


def balance_table(rows: Sequence[BalanceRow]) -> str:
    return aligned_table([HEAD, *map(_cells, rows)])


def _cells(row: BalanceRow) -> list[str]:
    simulated, live = row.simulated, row.live
    return [
        row.policy.value,
        str(row.fronts),
        f"{simulated.cached:.1%}",
        f"{live.cached:.1%}",
        f"{simulated.first_mean_s:.2f}",
        f"{live.first_mean_s:.2f}",
        f"{simulated.tokens_per_s:.1f}",
        f"{live.tokens_per_s:.1f}",
    ]
