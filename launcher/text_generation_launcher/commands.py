"""Makes the command lines and environments of the children from a resolved config. Pure."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from text_generation_common.flags import env_name, flag_name, off_flag_name
from text_generation_common.logs import LEVELS
from text_generation_common.places import socket_path
from text_generation_launcher.config import LauncherConfig, LoadFormat
from text_generation_launcher.errors import DownloadError, WebserverCannotStart

# Flags that the router gets under the same name. Flags without effect are not passed on.
ROUTER_FLAGS = (
    "revision",
    "tokenizer_config_path",
    "validation_workers",
    "max_concurrent_requests",
    "max_best_of",
    "max_stop_sequences",
    "max_top_n_tokens",
    "max_input_tokens",
    "max_total_tokens",
    "waiting_served_ratio",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_waiting_tokens",
    "max_batch_size",
    "max_queued_tokens",
    "admission",
    "prefix_caching",
    "prefix_cache_scope",
    "priority_between_tenants",
    "max_client_batch_size",
    "payload_limit",
    "hostname",
    "cors_allow_origin",
    "disable_grammar_support",
    "api_key_file",
    "closed_routes",
    "trusted_proxy",
    "max_connections",
    "stream_write_timeout",
    "graceful_termination_timeout",
)

# Flags that every shard gets as environment variables, under their names in capitals.
SHARD_VARIABLES = (
    "max_total_tokens",
    "max_batch_size",
    "rope_scaling",
    "rope_factor",
    "watermark_gamma",
    "watermark_delta",
    "cuda_graphs",
    "cuda_memory_fraction",
)
CACHE_VARIABLES = ("huggingface_hub_cache", "weights_cache_override")


@dataclass(frozen=True, slots=True)
class Programs:
    server: str
    router: str


@dataclass(frozen=True, slots=True)
class Command:
    name: str  # the child's name; also the target of its log lines that name no target
    argv: tuple[str, ...]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    log_fields: Mapping[str, object] = field(default_factory=dict)


def find_programs(directories: Sequence[Path], path: str | None) -> Programs:
    """Looks in `directories` first (the launcher's own environment), then along `path`."""
    search = os.pathsep.join([*map(str, directories), *([path] if path else [])])
    server = shutil.which("text-generation-server", path=search)
    router = shutil.which("text-generation-router", path=search)
    if server is None:
        raise DownloadError("text-generation-server not found in PATH: install tgi-py")
    if router is None:
        raise WebserverCannotStart("text-generation-router not found in PATH: install tgi-py")
    return Programs(server, router)


def download(config: LauncherConfig, programs: Programs, environ: Mapping[str, str]) -> Command:
    options = _options(extension=".safetensors", logger_level="INFO", json_output=True, revision=config.revision)
    options += _load_format(config)
    argv = (programs.server, "download-weights", config.model_id, *options)
    return Command("download", argv, _server_env(config, environ))


def shard(
    config: LauncherConfig, programs: Programs, environ: Mapping[str, str], rank: int, epoch: int, cores: int
) -> Command:
    """`cores` is the number of cores that all shards share."""
    assert config.num_shard is not None, "the config is not resolved"
    options = _options(
        uds_path=config.shard_uds_path,
        logger_level=most_verbose(environ.get("LOG_LEVEL", "info")),
        json_output=True,
        sharded=config.num_shard > 1,
        quantize=config.quantize,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        revision=config.revision,
        max_input_tokens=config.max_input_tokens,
        testing=config.testing,
    )
    options += _load_format(config)
    # The user's environment comes after these defaults, and so overrides them. GOMP_SPINCOUNT is short: a thread that
    # waits for another soon gives its core away, because the other thread may be waiting for a core itself.
    env = {"OMP_NUM_THREADS": str(max(1, cores // config.num_shard)), "GOMP_SPINCOUNT": "1000"}
    env |= _server_env(config, environ) | _variables(config, SHARD_VARIABLES)
    env |= {"GLOO_SOCKET_IFNAME": "lo"}  # shards accept connections from this machine only
    env |= {"RANK": str(rank), "WORLD_SIZE": str(config.num_shard), "TGI_EPOCH": str(epoch)}
    argv = (programs.server, "serve", config.model_id, *options)
    return Command("shard", argv, env, log_fields={"rank": rank})


def router(
    config: LauncherConfig,
    programs: Programs,
    environ: Mapping[str, str],
    listen_fd: int,
    port: int,
    launcher_fd: int,
) -> Command:
    """`listen_fd` is the bound API socket and `port` its number, which the kernel has chosen if --port was 0.
    `launcher_fd` is the router's end of the line to the launcher."""
    assert config.shard_uds_path is not None, "the place is not claimed"
    options = _options(
        listen_fd=listen_fd,
        launcher_fd=launcher_fd,
        port=port,
        master_shard_uds_path=socket_path(config.shard_uds_path, 0),
        tokenizer_name=config.model_id,
        json_output=True,
        testing=config.testing,
        **{name: getattr(config, name) for name in ROUTER_FLAGS},
    )
    if not config.prefix_caching:
        options.append(off_flag_name("prefix_caching"))
    env = _inherited(config, environ, "API_KEY") | _token(environ) | _variables(config, CACHE_VARIABLES)
    if config.api_key:
        env["API_KEY"] = " ".join(config.api_key)  # not a flag: every user of the machine can read command lines
    return Command("router", (programs.router, *options), env, pass_fds=(listen_fd, launcher_fd))


def most_verbose(log_level: str) -> str:
    """The level at which a shard must log, so that no target of a filter like `info,text_generation_router=debug` lacks
    lines."""
    names = [part.rpartition("=")[2].strip().lower() for part in log_level.split(",")]
    levels = {LEVELS.get(name, "INFO") for name in names}
    return next(level for level in ("DEBUG", "INFO", "WARNING", "ERROR") if level in levels)


def _load_format(config: LauncherConfig) -> list[str]:
    return [] if config.load_format is LoadFormat.auto else _options(load_format=config.load_format)


def _options(**values: object) -> list[str]:
    """Command line of these flags: True gives a bare switch, a list repeats its flag, None and False are left out."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(flag_name(name))
        elif isinstance(value, list):
            words += [word for item in value for word in (flag_name(name), str(item))]
        elif value is not None and value is not False:
            words += [flag_name(name), str(value)]
    return words


def _server_env(config: LauncherConfig, environ: Mapping[str, str]) -> dict[str, str]:
    inherited = _inherited(config, environ, "LOG_LEVEL", "API_KEY")
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # progress bars redraw a line, which makes no sense in a log
    return inherited | quiet | _token(environ) | _variables(config, CACHE_VARIABLES)


def _inherited(config: LauncherConfig, environ: Mapping[str, str], *without: str) -> dict[str, str]:
    """The environment without the variables `without`. FAILPOINTS is left out unless testing: the launcher has warned
    that it has no effect, and children need not repeat the warning."""
    dropped = without if config.testing else (*without, "FAILPOINTS")
    return {name: value for name, value in environ.items() if name not in dropped}


def _variables(config: LauncherConfig, names: Sequence[str]) -> dict[str, str]:
    values = {name: getattr(config, name) for name in names}
    return {env_name(name): str(value) for name, value in values.items() if value is not None}


def _token(environ: Mapping[str, str]) -> dict[str, str]:
    """HF_TOKEN from HF_API_TOKEN, the older name, which TGI still reads."""
    return {"HF_TOKEN": environ["HF_API_TOKEN"]} if environ.get("HF_API_TOKEN") else {}
