"""`text-generation-engine`: an engine without HTTP, for fronts in other processes. The launcher starts it for
--api-workers, --replicas and --engine-only.
"""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass
from typing import Any

from text_generation_common.flags.cluster import EngineOnlyFlags, SecurityFlags
from text_generation_common.flags.declaration import REQUIRED, borrowed, flag, from_values
from text_generation_common.flags.http import HttpFlags
from text_generation_common.flags.kinds import LoadFormat, Topic
from text_generation_common.flags.model import CacheFlags, ComputeFlags, FileFlags, ModelFlags, ShardFlags
from text_generation_common.flags.process import InheritedFlags, ProcessFlags
from text_generation_common.flags.programs import ROUTER
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags
from text_generation_common.logs import setup_logging
from text_generation_common.typer_command import ReportingCommand, lasting, make_app, taking
from text_generation_router.cli_errors import fail, set_up_faults
from text_generation_router.config import RouterFlags
from text_generation_router.errors import ShardsError, StartError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The engine's command line."""

    tokenizer_name: str = borrowed(RouterFlags, "tokenizer_name")
    address: str = flag(REQUIRED, "Where fronts connect: unix:///PATH or HOST:PORT.", topic=Topic.CLUSTER, env=False)
    files: FileFlags = FileFlags()
    weights_cache_override: str | None = borrowed(CacheFlags, "weights_cache_override")
    load_format: LoadFormat = borrowed(ModelFlags, "load_format")
    max_concurrent_requests: int = borrowed(RequestFlags, "max_concurrent_requests")
    tokens: TokenFlags = TokenFlags()
    scheduling: SchedulingFlags = SchedulingFlags()
    compute: ComputeFlags = ComputeFlags()
    shard: ShardFlags = ShardFlags()
    tgi_buckets: bool = borrowed(HttpFlags, "tgi_buckets")
    graceful_termination_timeout: float = borrowed(HttpFlags, "graceful_termination_timeout")
    master_shard_uds_path: str | None = borrowed(RouterFlags, "master_shard_uds_path")
    block_hash_key: str = borrowed(RouterFlags, "block_hash_key")
    launcher_fd: int | None = borrowed(RouterFlags, "launcher_fd")
    metrics_file: str | None = borrowed(RouterFlags, "metrics_file")
    engine_metrics_port: int | None = borrowed(EngineOnlyFlags, "engine_metrics_port")
    engine_metrics_tries: int = borrowed(EngineOnlyFlags, "engine_metrics_tries")
    end_without_fronts: float = borrowed(EngineOnlyFlags, "end_without_fronts")
    security: SecurityFlags = SecurityFlags()
    process: ProcessFlags = ProcessFlags()
    log_level: str = borrowed(RouterFlags, "log_level")
    inherited: InheritedFlags = InheritedFlags()


def serve(values: dict[str, Any]) -> None:
    flags = from_values(EngineFlags, values)
    setup_logging(flags.log_level, flags.process.json_output)
    if flags.master_shard_uds_path is None:
        fail("an engine has no port to find its shards by: give --master-shard-uds-path")
    with lasting():
        from text_generation_router.resolve import block_hash_key_of
        from text_generation_router.serve_engine import EngineSettings, run
    try:
        block_hash_key = block_hash_key_of(flags.block_hash_key)
    except StartError as error:
        fail(str(error))
    settings = EngineSettings(
        model=flags.tokenizer_name,
        revision=flags.files.revision,
        weights_cache_override=flags.weights_cache_override,
        load_format=flags.load_format,
        address=flags.address,
        max_concurrent_requests=flags.max_concurrent_requests,
        tokens=flags.tokens,
        scheduling=flags.scheduling,
        compute=flags.compute,
        shard=flags.shard,
        tgi_buckets=flags.tgi_buckets,
        patience_s=flags.graceful_termination_timeout,
        master_shard_uds_path=flags.master_shard_uds_path,
        block_hash_key=block_hash_key,
        launcher_fd=flags.launcher_fd,
        metrics_file=flags.metrics_file,
        metrics_ports=metrics_ports(flags.engine_metrics_port, flags.engine_metrics_tries),
        end_without_fronts_s=flags.end_without_fronts,
        security=flags.security,
    )
    try:
        set_up_faults(flags.inherited.failpoints, flags.process.testing)
        run(settings)
    except (StartError, ShardsError) as error:
        fail(str(error))


def metrics_ports(first: int | None, tries: int) -> range:
    return range(0) if first is None else range(first, min(first + tries, 65536))


HELP = """Own the queue and the token slots of a model, for routers in other processes."""
app = make_app()
app.command(cls=ReportingCommand, help=HELP)(taking(serve, ROUTER, EngineFlags))


def main() -> None:
    app()
