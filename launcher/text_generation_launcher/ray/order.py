"""What actors are to run, made of the launcher's plan."""

from text_generation_launcher import commands
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.ray.values import EngineOrder

# Seconds that an engine gets to end in addition to the time in which its requests may end.
DRAIN_MARGIN_S = 30.0
# Seconds without any front after which an engine ends by itself: its server was killed, or has replaced it.
LONELY_S = 120.0


def engine_order(plan: LaunchPlan) -> EngineOrder:
    """Keys and tokens are not in it: each machine has its own certificates and, for hubs, its own environment."""
    drain_s = plan.http.graceful_termination_timeout + DRAIN_MARGIN_S
    argv, cores = commands.engine_only(plan, LONELY_S), plan.cluster.on_ray.replica_cores
    return EngineOrder(argv, shards=plan.num_shard, cores=cores, drain_s=drain_s)
