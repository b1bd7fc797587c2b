"""Makes the command lines and environments of the children from the plan. No input or output."""

import os
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from text_generation_common.cluster import block_key
from text_generation_common.flags.cluster import RAY_METRICS_PORTS, Way
from text_generation_common.flags.declaration import env_name, flag_name, flags_of, values_of
from text_generation_common.flags.http import HttpFlags
from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.logs import LEVELS
from text_generation_common.places import ServerPlace
from text_generation_common.secret_values import without_secrets
from text_generation_launcher import service_manager
from text_generation_launcher.checks import unread_flags
from text_generation_launcher.config import LaunchPlan, ReplicaSite
from text_generation_launcher.errors import DownloadError, WebserverCannotStart

# Variables with keys of clients, and that of the digests of these keys, which only routers get.
KEYS = ("API_KEY", "ADMIN_API_KEY", "USAGE_KEY")
# Seconds between two lines in which a download tells its progress to the launcher.
PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Programs:
    server: str
    router: str
    engine: str = "text-generation-engine"


@dataclass(frozen=True, slots=True)
class Command:
    name: str  # name of the child; also the target of log lines that name no target
    argv: tuple[str, ...]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    log_fields: Mapping[str, object] = field(default_factory=dict)
    replica: int = 0  # number of the replica of an engine or a shard


def find_programs(directories: Sequence[Path], path: str | None) -> Programs:
    """The children's programs, searched in `directories` first (the launcher's own environment), then along `path`."""
    search = os.pathsep.join([*map(str, directories), *([path] if path else [])])
    server = shutil.which("text-generation-server", path=search)
    router = shutil.which("text-generation-router", path=search)
    if server is None:
        raise DownloadError("text-generation-server not found in PATH: install tgi-py")
    if router is None:
        raise WebserverCannotStart("text-generation-router not found in PATH: install tgi-py")
    # Only replicas need it, so its absence is told by its start.
    engine = shutil.which("text-generation-engine", path=search)
    return Programs(server, router, engine or "text-generation-engine")


def download(plan: LaunchPlan, programs: Programs, environ: Mapping[str, str]) -> Command:
    options = _options(
        extension=".safetensors",
        logger_level="INFO",
        json_output=True,
        revision=plan.files.revision,
        progress_interval=PROGRESS_S,
    )
    options += _load_format(plan)
    argv = (programs.server, "download-weights", plan.model_id, *options)
    return Command("download", argv, _server_env(plan, environ))


def file_check(plan: LaunchPlan, environ: Mapping[str, str], folder: Path) -> Command:
    """The process that checks the tokenizer and the chat templates in `folder`, as the router would. It runs a module
    of its own, because the router's other modules take a second to load."""
    config = plan.files.tokenizer_config_path
    argv = (sys.executable, "-P", "-m", "text_generation_router.text.templates.file_check", str(folder))
    return Command("check", (*argv, config) if config else argv, without_secrets(_inherited(plan, environ)))


def shard(
    plan: LaunchPlan,
    programs: Programs,
    environ: Mapping[str, str],
    site: ReplicaSite,
    rank: int,
    epoch: int,
    cores: int,
    replicas: int = 1,
) -> Command:
    """The command of the shard of `rank`. `cores` is the number of cores that all shards of `replicas` replicas
    share."""
    options = _options(
        uds_path=site.place.prefix,
        logger_level=most_verbose(environ.get("LOG_LEVEL", "info")),
        json_output=True,
        sharded=plan.num_shard > 1,
        revision=plan.files.revision,
        max_input_tokens=plan.tokens.max_input_tokens,
        disable_grammar_support=plan.requests.disable_grammar_support,
        testing=plan.process.testing,
    )
    options += _flags(plan.compute) + _load_format(plan)
    # The user's environment comes after these defaults, and so overrides them. GOMP_SPINCOUNT is short: a thread of
    # torch that waits for another soon gives its core away, because the other may be waiting for a core itself.
    # Shards of several replicas take fewer of these threads: how many, they see from MACHINE_SHARDS.
    env = {"OMP_NUM_THREADS": str(max(1, cores // plan.num_shard)), "GOMP_SPINCOUNT": "1000"}
    env |= without_secrets(_server_env(plan, environ)) | _variables(values_of(plan.shard) | values_of(plan.adapters))
    env |= _variables({"max_total_tokens": plan.tokens.max_total_tokens})
    env |= {"GLOO_SOCKET_IFNAME": "lo"}  # shards accept connections from this machine only
    env |= {"RANK": str(rank), "WORLD_SIZE": str(plan.num_shard), "TGI_EPOCH": str(epoch)}
    env |= {"MACHINE_SHARDS": str(plan.num_shard * replicas)} if replicas > 1 else {}
    env |= {"CUDA_VISIBLE_DEVICES": ",".join(site.devices)} if site.devices else {}
    argv = (programs.server, "serve", plan.model_id, *options)
    return Command("shard", argv, env, log_fields={**site.log_fields, "rank": rank}, replica=site.number)


def router(
    plan: LaunchPlan,
    programs: Programs,
    environ: Mapping[str, str],
    place: ServerPlace,
    listen_fd: int,
    port: int,
    launcher_fd: int,
    probed_tokenizer: str | None = None,
) -> Command:
    """The router's command. `listen_fd` is the bound API socket and `port` its number, which the kernel has chosen if
    --port was 0. `launcher_fd` is the router's end of the line to the launcher.
    """
    options = _options(
        master_shard_uds_path=place.socket(0),
        probed_tokenizer=probed_tokenizer,
        **_of_router(plan, listen_fd, launcher_fd),
    )
    options += _router_flags(plan, replace(plan.http, port=port))
    env = _router_env(plan, environ)
    return Command("router", (programs.router, *options), env, pass_fds=(listen_fd, launcher_fd))


def front(
    plan: LaunchPlan,
    programs: Programs,
    environ: Mapping[str, str],
    place: ServerPlace,
    number: int,
    listen_fd: int,
    port: int,
    launcher_fd: int,
    connections_fd: int | None = None,
    probed_tokenizer: str | None = None,
) -> Command:
    """The command of front `number`: a router whose engines are other processes. `connections_fd`: a file of
    `connection_counts.py`, by which the fronts share out connections; None: this one does not."""
    options = _options(
        connections_fd=connections_fd,
        front_number=number if connections_fd is not None else None,
        engines_by_launcher=plan.cluster.way in (Way.REPLICAS, Way.RAY),
        metrics_file=place.metrics_file(f"front{number}"),
        probed_tokenizer=probed_tokenizer,
        **_of_router(plan, listen_fd, launcher_fd),
    )
    options += _router_flags(plan, replace(plan.http, port=port))
    argv = (programs.router, *options)
    fds = (listen_fd, launcher_fd, *([connections_fd] if connections_fd is not None else []))
    # A front logs by itself why it cannot reach an engine, and gRPC need not write it once more.
    env = {"GRPC_VERBOSITY": "NONE"} | _router_env(plan, environ) | {"USAGE_KEY": environ.get("USAGE_KEY", "")}
    return Command("router", argv, env, fds, log_fields={"worker": number})


def engine(
    plan: LaunchPlan,
    programs: Programs,
    environ: Mapping[str, str],
    site: ReplicaSite,
    address: str,
    launcher_fd: int,
    metrics_file: str | None = None,
) -> Command:
    """The command of the engine whose fronts are other processes, which connect to `address`. `launcher_fd`: see
    `router`."""
    options = _options(
        address=address,
        launcher_fd=launcher_fd,
        master_shard_uds_path=site.place.socket(0),
        metrics_file=metrics_file,
        engine_metrics_port=plan.cluster.engine.engine_metrics_port,
        engine_metrics_tries=plan.cluster.engine.engine_metrics_tries,
        end_without_fronts=plan.cluster.engine.end_without_fronts or None,
        tokenizer_name=plan.model_id,
        json_output=True,
        testing=plan.process.testing,
        max_concurrent_requests=plan.requests.max_concurrent_requests,
        tgi_buckets=plan.http.tgi_buckets,
        graceful_termination_timeout=plan.http.graceful_termination_timeout,
    )
    for group in (plan.files, plan.tokens, plan.scheduling, plan.compute, plan.cluster.security):
        options += _flags(group)
    options += _load_format(plan)
    env = _inherited(plan, environ, *KEYS) | _token(environ) | _variables(values_of(plan.cache))
    env |= _variables(values_of(plan.shard))
    argv = (programs.engine, *options)
    return Command("engine", argv, env, (launcher_fd,), log_fields=site.log_fields, replica=site.number)


def engine_only(plan: LaunchPlan, end_without_fronts: float) -> tuple[str, ...]:
    """Flags of a launcher that runs one replica on another machine, without those of the engine's address."""
    metrics_port = plan.cluster.engine.engine_metrics_port
    options = _options(model_id=plan.model_id, num_shard=plan.num_shard) + _load_format(plan)
    options += _options(
        max_concurrent_requests=plan.requests.max_concurrent_requests,
        disable_grammar_support=plan.requests.disable_grammar_support,
        standby=plan.standby,
        graceful_termination_timeout=plan.http.graceful_termination_timeout,
        json_output=plan.process.json_output,
        testing=plan.process.testing,
        end_without_fronts=end_without_fronts,
        engine_metrics_port=metrics_port,
        engine_metrics_tries=RAY_METRICS_PORTS if metrics_port is not None else None,
    )
    for group in (
        plan.files, plan.cache, plan.compute, plan.shard, plan.adapters, plan.tokens, plan.scheduling,
        plan.cluster.security,
    ):  # fmt: skip
        options += _flags(group)
    return tuple(options)


def fronts_only(plan: LaunchPlan) -> tuple[str, ...]:
    """Flags of a launcher that runs fronts on another machine, without those of its port and its engines."""
    options = _options(
        model_id=plan.model_id,
        api_workers=plan.cluster.api_workers,
        resume_across_builds=plan.cluster.engine_list.resume_across_builds,
        standby=plan.standby,
        json_output=plan.process.json_output,
        testing=plan.process.testing,
    )
    for group in (
        plan.names, plan.files, plan.cache, plan.requests, plan.formats, plan.adapters, plan.tokens, plan.scheduling,
        plan.access, plan.tracing, plan.cluster.security,
    ):  # fmt: skip
        options += _flags(group, without=unread_flags(Way.FRONTS))
    return tuple(options + _flags(plan.http, without=("hostname", "port")))


def ray_driver(plan: LaunchPlan, environ: Mapping[str, str], port: int, launcher_fd: int) -> Command:
    """The process that asks Ray for replicas. The replicas of one server, found again by its next launcher, are those
    of its host's name and its API port."""
    node = environ.get("RAY_NODE_IP_ADDRESS", "")
    namespace = "-".join(filter(None, ("tgi", socket.gethostname(), node, str(port))))
    arguments = (str(launcher_fd), plan.cluster.on_ray.ray or "auto", namespace, node)
    argv = (sys.executable, "-m", "text_generation_launcher.ray.driver", *arguments)
    env = {"RAY_USAGE_STATS_ENABLED": "0"} | _inherited(plan, environ, *KEYS, block_key.VARIABLE)
    return Command("ray", argv, env, pass_fds=(launcher_fd,))


def _of_router(plan: LaunchPlan, listen_fd: int, launcher_fd: int) -> dict[str, object]:
    return {
        "listen_fd": listen_fd,
        "launcher_fd": launcher_fd,
        "tokenizer_name": plan.model_id,
        "json_output": True,
        "testing": plan.process.testing,
    }


def _router_flags(plan: LaunchPlan, http: HttpFlags) -> list[str]:
    groups = (
        plan.names,
        plan.files,
        plan.requests,
        plan.formats,
        plan.adapters,
        plan.tokens,
        plan.scheduling,
        http,
        plan.access,
        plan.tracing,
        plan.cluster.engine_list,
        plan.cluster.security,
    )
    return [word for group in groups for word in _flags(group)]


def _router_env(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    env = _inherited(plan, environ, *KEYS) | _token(environ) | _variables(values_of(plan.cache))
    # Keys are not flags: every user of the machine can read command lines.
    if plan.access.api_key:
        env["API_KEY"] = " ".join(plan.access.api_key)
    if plan.access.admin_api_key:
        env["ADMIN_API_KEY"] = plan.access.admin_api_key
    return env


def most_verbose(log_level: str) -> str:
    """The level at which a shard must log. A filter like `info,text_generation_router=debug` has several levels; the
    shard takes the most verbose, so that no target lacks lines.
    """
    names = [part.rpartition("=")[2].strip().lower() for part in log_level.split(",")]
    levels = {LEVELS.get(name, "INFO") for name in names}
    return next(level for level in ("DEBUG", "INFO", "WARNING", "ERROR") if level in levels)


def _load_format(plan: LaunchPlan) -> list[str]:
    return [] if plan.load_format is LoadFormat.auto else _options(load_format=plan.load_format)


def _flags(group: object, without: Collection[str] = ()) -> list[str]:
    """Command line of a group of flags. Defaults are included, because an option overrides the child's environment."""
    values = values_of(group)
    flags = [flag for flag in flags_of(type(group)) if not flag.secret and flag.name not in without]
    words = _options(**{flag.name: values[flag.name] for flag in flags})
    return words + [flag.off_name for flag in flags if flag.off_name and values[flag.name] is False]


def _options(**values: object) -> list[str]:
    """Command line of the flags in `values`: True gives a bare switch, a tuple repeats its flag, None and False are
    left out.
    """
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(flag_name(name))
        elif isinstance(value, tuple):
            words += [word for item in value for word in (flag_name(name), str(item))]
        elif value is not None and value is not False:
            words += [flag_name(name), str(value)]
    return words


def _server_env(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    inherited = _inherited(plan, environ, "LOG_LEVEL", *KEYS, block_key.VARIABLE)
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # progress bars redraw a line, which makes no sense in a log
    return inherited | quiet | _token(environ) | _variables(values_of(plan.cache))


def _inherited(plan: LaunchPlan, environ: Mapping[str, str], *without: str) -> dict[str, str]:
    """The launcher's environment without the variables `without`. FAILPOINTS is left out unless testing: the launcher
    has warned that it has no effect, and children need not repeat the warning. The launcher alone reports to the
    service manager.
    """
    dropped = (*without, *service_manager.VARIABLES, *(() if plan.process.testing else ("FAILPOINTS",)))
    return {name: value for name, value in environ.items() if name not in dropped}


def _variables(values: Mapping[str, object]) -> dict[str, str]:
    return {env_name(name): str(value) for name, value in values.items() if value is not None}


def _token(environ: Mapping[str, str]) -> dict[str, str]:
    """HF_TOKEN for the children. TGI still reads it from HF_API_TOKEN, its older name."""
    return {"HF_TOKEN": environ["HF_API_TOKEN"]} if environ.get("HF_API_TOKEN") else {}
