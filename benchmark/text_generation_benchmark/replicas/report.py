"""The table of simulated deployments, in Markdown."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.replicas.deployment import Deployment, FleetPlan
from text_generation_benchmark.simulation.metrics import Targets

if TYPE_CHECKING:
    from text_generation_benchmark.replicas.news_speed import NewsCost

HEAD = (
    "policy",
    "fronts",
    "requests/s",
    "cached",
    "first token s mean, p99",
    "good",
    "good requests/s",
    "tokens/s",
    "moved",
    "resumed",
)


@dataclass(frozen=True, slots=True)
class DeploymentSummary:
    """What one simulation showed. Times in seconds."""

    rate: float
    cached: float  # part of all prompt tokens that caches had
    first_mean_s: float
    first_p99_s: float
    good: float  # part of the requests within the targets
    goodput: float  # good requests per second
    tokens_per_s: float
    moves: int
    resumed: int
    requests: int
    hashing_s: float  # median, for a request
    choosing_s: float
    choosing_p99_s: float
    news_share: float  # part of one core that the news take of a front
    news_bytes_per_s: float  # bytes of news that one front gets
    loads_per_s: float  # Load messages that one front gets
    caches_per_s: float
    hashes: float  # mean number of hashes of a Cache message
    fronts: int
    engines: int


def run(plan: FleetPlan, targets: Targets) -> DeploymentSummary:
    deployment = Deployment(plan)
    deployment.run()
    done, duration_s = deployment.done, float(plan.arrivals_s[-1])
    first_s = np.array([sent.progress.first_s - sent.arrival_s for sent in done]) + plan.model.overhead_s
    longest_s = np.array([sent.progress.longest_gap_s for sent in done])
    end_s = max(sent.progress.last_s for sent in done)
    times = [front.times for front in deployment.fronts]
    choosing_s = np.concatenate([each.choosing_s for each in times])
    good = (first_s <= targets.first_token_s) & (longest_s <= targets.gap_s)
    traffic, num_fronts = deployment.traffic, len(times)
    return DeploymentSummary(
        rate=len(done) / duration_s,
        cached=deployment.cached_tokens / deployment.prompt_tokens,
        first_mean_s=float(first_s.mean()),
        first_p99_s=float(np.quantile(first_s, 0.99)),
        good=float(good.mean()),
        goodput=float(good.sum()) / duration_s,
        tokens_per_s=sum(sent.turn.output_tokens for sent in done) / end_s,
        moves=deployment.num_moves,
        resumed=deployment.num_resumed,
        requests=len(done),
        hashing_s=float(np.median(np.concatenate([each.hashing_s for each in times]))),
        choosing_s=float(np.median(choosing_s)),
        choosing_p99_s=float(np.quantile(choosing_s, 0.99)),
        news_share=sum(each.news_s for each in times) / len(times) / end_s,
        news_bytes_per_s=traffic.bytes / num_fronts / end_s,
        loads_per_s=traffic.loads / num_fronts / end_s,
        caches_per_s=traffic.caches / num_fronts / end_s,
        hashes=traffic.hashes / max(1, traffic.caches),
        fronts=num_fronts,
        engines=plan.num_engines,
    )


def as_markdown(runs: list[tuple[FleetPlan, DeploymentSummary]]) -> str:
    return aligned_table([HEAD, *(_cells(plan, summary) for plan, summary in runs)])


def _cells(plan: FleetPlan, summary: DeploymentSummary) -> list[str]:
    return [
        plan.policy.value,
        str(plan.num_fronts),
        f"{summary.rate:.1f}",
        f"{summary.cached:.1%}",
        f"{summary.first_mean_s:.2f}, {summary.first_p99_s:.2f}",
        f"{summary.good:.1%}",
        f"{summary.goodput:.1f}",
        f"{summary.tokens_per_s:,.0f}",
        f"{summary.moves:,}",
        f"{summary.resumed:,}",
    ]


def costs_as_text(summary: DeploymentSummary, load: "NewsCost", cache: "NewsCost") -> str:
    """What choices and news cost. `load`, `cache`: what one message costs on each side, measured with gRPC."""
    front_part = summary.loads_per_s * load.front_s + summary.caches_per_s * cache.front_s
    engine_loads, engine_caches = (
        each * summary.fronts / summary.engines for each in (summary.loads_per_s, summary.caches_per_s)
    )
    engine_part = engine_loads * load.engine_s + engine_caches * cache.engine_s
    front_bytes = summary.loads_per_s * load.bytes + summary.caches_per_s * cache.bytes
    engine_bytes = engine_loads * load.bytes + engine_caches * cache.bytes
    return (
        f"A front took {summary.hashing_s * 1e6:.0f} µs (median) to hash a prompt, {summary.choosing_s * 1e6:.0f} µs to"
        f" choose an engine (99 %: {summary.choosing_p99_s * 1e6:.0f} µs), and {summary.news_share:.2%} of a core for"
        f" decoded news.\n\n"
        f"News: a front gets {summary.loads_per_s:,.0f} Loads and {summary.caches_per_s:,.0f} Cache messages of"
        f" {summary.hashes:.0f} hashes a second ({front_bytes / 1e3:,.0f} kB/s); an engine sends"
        f" {engine_loads + engine_caches:,.0f} messages a second to {summary.fronts} fronts ({engine_bytes / 1e3:,.1f}"
        f" kB/s). Measured over gRPC one message at a time, a Load costs {load.front_s * 1e6:.0f} µs at a front and"
        f" {load.engine_s * 1e6:.0f} µs at an engine, a Cache message {cache.front_s * 1e6:.0f} and"
        f" {cache.engine_s * 1e6:.0f} µs: {front_part:.1%} of a core of a front, {engine_part:.2%} of an engine's."
    )
