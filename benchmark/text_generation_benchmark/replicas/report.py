"""The table of simulated deployments, in Markdown."""

from dataclasses import dataclass

import numpy as np

from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.replicas.deployment import Deployment, FleetPlan
from text_generation_benchmark.simulation.metrics import Targets

HEAD = (
    "policy",
    "fronts",
    "requests/s",
    "cached",
    "first token s mean, p99",
    "good",
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
    tokens_per_s: float
    moves: int
    resumed: int
    requests: int
    hashing_s: float  # median, for a request
    choosing_s: float
    choosing_p99_s: float
    news_share: float  # part of one core that the news take of a front
    news_bytes_per_s: float  # bytes of news that one front gets


def run(plan: FleetPlan, targets: Targets) -> DeploymentSummary:
    deployment = Deployment(plan)
    deployment.run()
    done, duration_s = deployment.done, float(plan.arrivals_s[-1])
    first_s = np.array([sent.progress.first_s - sent.arrival_s for sent in done]) + plan.model.overhead_s
    longest_s = np.array([sent.progress.longest_gap_s for sent in done])
    end_s = max(sent.progress.last_s for sent in done)
    times = [front.times for front in deployment.fronts]
    choosing_s = np.concatenate([each.choosing_s for each in times])
    return DeploymentSummary(
        rate=len(done) / duration_s,
        cached=deployment.cached_tokens / deployment.prompt_tokens,
        first_mean_s=float(first_s.mean()),
        first_p99_s=float(np.quantile(first_s, 0.99)),
        good=float(((first_s <= targets.first_token_s) & (longest_s <= targets.gap_s)).mean()),
        tokens_per_s=sum(sent.turn.output_tokens for sent in done) / end_s,
        moves=deployment.num_moves,
        resumed=deployment.num_resumed,
        requests=len(done),
        hashing_s=float(np.median(np.concatenate([each.hashing_s for each in times]))),
        choosing_s=float(np.median(choosing_s)),
        choosing_p99_s=float(np.quantile(choosing_s, 0.99)),
        news_share=sum(each.news_s for each in times) / len(times) / end_s,
        news_bytes_per_s=deployment.traffic.bytes / len(times) / end_s,
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
        f"{summary.tokens_per_s:,.0f}",
        f"{summary.moves:,}",
        f"{summary.resumed:,}",
    ]


def costs_as_text(summary: DeploymentSummary) -> str:
    """What the choice cost a front, in one sentence."""
    return (
        f"A front took {summary.hashing_s * 1e6:.0f} µs (median) to hash a prompt, {summary.choosing_s * 1e6:.0f} µs to"
        f" choose an engine (99 %: {summary.choosing_p99_s * 1e6:.0f} µs), and {summary.news_share:.2%} of a core for"
        f" {summary.news_bytes_per_s / 1e3:,.1f} kB/s of news, once they are decoded."
    )
