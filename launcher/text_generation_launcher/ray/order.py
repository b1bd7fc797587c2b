"""What actors are to run, made of the launcher's plan."""

import os
from dataclasses import replace
from ipaddress import ip_address

from text_generation_launcher import commands
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.ray.values import EngineOrder, FrontOrder

# Seconds that an engine gets to end in addition to the time in which its requests may end.
DRAIN_MARGIN_S = 30.0
# Seconds without any front after which an engine ends by itself: its server was killed, or has replaced it.
LONELY_S = 120.0


def engine_order(plan: LaunchPlan) -> EngineOrder:
    """Keys and tokens are not in it: each machine has its own certificates and, for hubs, its own environment."""
    drain_s = plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
    argv, cores = commands.engine_only(with_whole_paths(plan), LONELY_S), plan.cluster.on_ray.replica_cores
    return EngineOrder(argv, shards=plan.num_shard, cores=cores, drain_s=drain_s)


def front_order(plan: LaunchPlan, port: int) -> FrontOrder:
    """`port`: the command's own. Keys are not in it, but a file of digests may be."""
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
