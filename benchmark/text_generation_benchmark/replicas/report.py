"""The tables of simulated deployments, in Markdown."""

from itertools import pairwise

import numpy as np

from text_generation_benchmark.replicas.deployment import Deployment, FleetPlan
from text_generation_benchmark.replicas.fleet import ReplicaScaler, ScalingPlan
from text_generation_benchmark.simulation.engine import Targets


def run(plan: FleetPlan) -> Deployment:
    deployment = Deployment(plan)
    deployment.run()
    return deployment


def deployment_cells(deployment: Deployment, targets: Targets) -> dict[str, str]:
    first_s, plan = deployment.first_token_s, deployment.plan
    good, duration_s = targets.met(first_s, deployment.longest_gap_s), float(plan.arrivals_s[-1])
    return {
        "policy": plan.policy.value,
        "fronts": str(plan.num_fronts),
        "requests/s": f"{len(first_s) / duration_s:.1f}",
        "cached": f"{deployment.cached:.1%}",
        "first token s mean, p99": f"{first_s.mean():.2f}, {np.quantile(first_s, 0.99):.2f}",
        "good": f"{good.mean():.1%}",
        "good requests/s": f"{good.sum() / duration_s:.1f}",
        "tokens/s": f"{deployment.tokens_per_s:,.0f}",
        "moved": f"{deployment.num_moves:,}",
        "resumed": f"{deployment.num_resumed:,}",
    }


def run_scaled(plan: FleetPlan, scaling: ScalingPlan, targets: Targets) -> dict[str, str]:
    """The cells of one simulation with a changing number of replicas."""
    scaler = ReplicaScaler(plan, scaling)
    deployment = scaler.deployment
    deployment.run()
    first_s = deployment.first_token_s
    good = targets.met(first_s, deployment.longest_gap_s)
    return {
        "replicas": str(scaling),
        "good requests/s": f"{good.sum() / float(plan.arrivals_s[-1]):.2f}",
        "good": f"{good.mean():.1%}",
        "first token s p99": f"{np.quantile(first_s, 0.99):.2f}",
        "cached": f"{deployment.cached:.1%}",
        "replica-hours": f"{scaler.replica_s / 3600:.1f}",  # includes replicas that start or drain
        "most": str(scaler.most),
        "added": str(sum(max(0, change) for change in scaler.changes)),
        "removed": str(sum(max(0, -change) for change in scaler.changes)),
        # additions after a removal, and removals after an addition
        "turns": str(sum(before * after < 0 for before, after in pairwise(scaler.changes))),
    }


def costs_as_text(deployment: Deployment, messages: int) -> str:
    """What choices and news cost. `messages` messages of each kind are sent over gRPC to measure what one costs."""
    from text_generation_benchmark.micro.news import measure_news

    fronts, end_s = deployment.fronts, deployment.end_s
    hashes = deployment.num_hashes / max(1, deployment.num_caches)  # mean number of a Cache message
    load, cache = measure_news(0, messages), measure_news(max(1, round(hashes)), messages)
    hashing_s, choosing_s = (
        np.concatenate([getattr(each, kind) for each in fronts]) for kind in ("hashing_s", "choosing_s")
    )
    loads, caches = deployment.num_loads / end_s, deployment.num_caches / end_s  # each second, at one front
    share = (
        len(fronts) / deployment.plan.num_engines
    )  # factor from the messages at one front to those of one engine to all fronts
    front_part = loads * load.front_s + caches * cache.front_s
    engine_part = share * (loads * load.engine_s + caches * cache.engine_s)
    num_bytes = loads * load.bytes + caches * cache.bytes
    return (
        f"A front took {np.median(hashing_s) * 1e6:.0f} µs (median) to hash a prompt,"
        f" {np.median(choosing_s) * 1e6:.0f} µs to choose an engine (99 %: {np.quantile(choosing_s, 0.99) * 1e6:.0f}"
        " µs), and"
        f" {np.mean([each.news_s for each in fronts]) / end_s:.2%} of a core for decoded news.\n\n"
        f"News: a front gets {loads:,.0f} Loads and {caches:,.0f} Cache messages of {hashes:.0f} hashes a"
        f" second ({num_bytes / 1e3:,.0f} kB/s); an engine sends {share * (loads + caches):,.0f} messages a second to"
        f" {len(fronts)} fronts ({share * num_bytes / 1e3:,.1f} kB/s). Measured over gRPC one message at a time, a Load"
        f" costs {load.front_s * 1e6:.0f} µs at a front and {load.engine_s * 1e6:.0f} µs at an engine, a Cache message"
        f" {cache.front_s * 1e6:.0f} and {cache.engine_s * 1e6:.0f} µs: {front_part:.1%} of a core of a front,"
        f" {engine_part:.2%} of an engine's."
    )
