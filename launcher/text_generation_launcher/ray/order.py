"""What actors are to run, made of the launcher's plan."""

from text_generation_launcher import commands
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.ray.values import EngineOrder

# Seconds that an engine gets to end in addition to the time in which its requests may end.
DRAIN_MARGIN_S = 30.0


def engine_order(plan: LaunchPlan) -> EngineOrder:
    """Keys and tokens are not in it: each machine has its own certificates and, for hubs, its own environment."""
    drain_s = plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
    return EngineOrder(
        commands.engine_only(plan), shards=plan.num_shard, cores=plan.cluster.on_ray.replica_cores, drain_s=drain_s
    )
