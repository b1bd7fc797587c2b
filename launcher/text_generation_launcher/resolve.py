"""Makes the plan from the flags: checks them, and derives further values from flags, environment and model."""

import logging
import subprocess
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from text_generation_common.adapters.listed import check_names, checked, listed, real_folders
from text_generation_common.addresses import address_of
from text_generation_common.errors import ArgumentValidation, ModelError, WrongUsage
from text_generation_common.flags.cluster import ClusterFlags, Way
from text_generation_common.flags.http import view_refusal
from text_generation_common.flags.kinds import RopeScalingKind, TrueFalse
from text_generation_common.flags.model import AdapterFlags, NameFlags
from text_generation_common.flags.requests import PREFILL_TOKENS
from text_generation_common.model_files import served_name
from text_generation_launcher import checks, model
from text_generation_launcher.cluster_plan import resolve_cluster, shards_of_each, share_out, visible_devices
from text_generation_launcher.config import LauncherConfig, LaunchPlan
from text_generation_launcher.errors import NotEnoughCUDADevices

logger = logging.getLogger("text_generation_launcher")

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def resolve(config: LauncherConfig, environ: Mapping[str, str]) -> LaunchPlan:
    """Checks everything that can be checked before a process starts, and derives the other values of the plan."""
    checks.check_numbers(config)
    checks.check_input_aliases(config)
    longest_input = (
        config.max_input_length if config.tokens.max_input_tokens is None else config.tokens.max_input_tokens
    )
    tokens = replace(config.tokens, max_input_tokens=longest_input)
    checks.check_cuda_graphs(config)
    checks.check_limits(tokens)
    checks.check_api_keys(config.access, config.http.closed_routes)
    cluster = resolve_cluster(config.cluster)
    checks.check_keys_elsewhere(config.access, cluster.on_ray.fronts_on_every_node)
    checks.check_adapters(config, cluster)
    num_shard, devices = _shares(config, cluster, environ)
    checks.refuse_unsupported(config)
    rope_scaling, rope_factor = resolve_rope(config.shard.rope_scaling, config.shard.rope_factor)
    hostname = address_of(config.http.hostname, logger)
    checks.check_paths(config)
    checks.check_tracing(config.tracing)
    http = replace(config.http, hostname=hostname)
    if (refused := view_refusal(http, config.access.trusted_proxy)) is not None:
        raise ArgumentValidation(*refused)
    checks.mention_without_effect(config)
    name = served_name(config.names.served_model_name, config.model.model_id)
    return LaunchPlan(
        model_id=model.locate(config.model.model_id, config.cache.weights_cache_override),
        num_shard=num_shard,
        load_format=config.model.load_format,
        names=NameFlags(served_model_name=name),
        files=config.files,
        cache=config.cache,
        compute=config.compute,
        adapters=resolve_adapters(config.adapters, config.cache.huggingface_hub_cache, (name, config.model.model_id)),
        shard=replace(config.shard, rope_scaling=rope_scaling, rope_factor=rope_factor),
        standby=config.standby,
        requests=config.requests,
        formats=config.formats,
        tokens=tokens,
        scheduling=config.scheduling,
        http=http,
        cluster=cluster,
        devices=devices,
        access=config.access,
        tracing=config.tracing,
        process=config.process,
    )


def resolve_adapters(flags: AdapterFlags, cache: str | None, of_model: Collection[str]) -> AdapterFlags:
    """Names each adapter by an absolute folder and the digest of its files, so that every process has the same ones.
    `of_model`: the model's own names."""
    try:
        check_names([adapter.name for adapter in listed(flags.lora_adapters)], of_model)
        found = checked(flags.lora_adapters, cache, flags.max_lora_rank)
        folders = real_folders(flags.lora_dirs)
    except ModelError as error:
        raise ArgumentValidation(str(error)) from None
    return replace(flags, lora_adapters=",".join(map(str, found)) or None, lora_dirs=folders)


def _shares(config: LauncherConfig, cluster: ClusterFlags, environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """Number of shards of each replica, and the GPUs that replicas share out."""
    if cluster.way is Way.RAY:  # The GPUs of this machine say nothing of those of the cluster.
        return shard_count(config.sharded, config.num_shard, lambda: 1), ()
    if cluster.replica_limit is None:
        return shard_count(config.sharded, config.num_shard, lambda: count_devices(environ)), ()
    devices = visible_devices(environ, count_nvidia_cards)
    each = shards_of_each(cluster.replica_limit, len(devices))
    num_shard = shard_count(config.sharded, config.num_shard, lambda: each)
    share_out(cluster, num_shard, devices)
    return num_shard, devices


def shard_count(sharded: TrueFalse | None, num_shard: int | None, count_devices: Callable[[], int]) -> int:
    """Number of shards, by TGI's rules: --num-shard counts even with `--sharded false`; without either flag there is
    one shard for each visible device."""
    if sharded is TrueFalse.true:
        return _sharded_count(num_shard, count_devices)
    if num_shard is None:
        return 1 if sharded is TrueFalse.false else max(1, count_devices())
    if num_shard < 1:
        raise WrongUsage("`num_shard` cannot be < 1", "choose --num-shard 1, or leave it out")
    return num_shard


def _sharded_count(num_shard: int | None, count_devices: Callable[[], int]) -> int:
    if num_shard is None:
        found = count_devices()
        if found <= 1:
            raise NotEnoughCUDADevices(
                f"`sharded` is true but only found {found} CUDA devices",
                "leave --sharded out, or set CUDA_VISIBLE_DEVICES",
            )
        return found
    if num_shard <= 1:
        raise ArgumentValidation("`sharded` is true but `num_shard` <= 1", "leave --sharded out, or raise --num-shard")
    return num_shard


def count_devices(environ: Mapping[str, str], count_cards: Callable[[], int] | None = None) -> int:
    """Number of devices that the environment names. `count_cards` is called only if the environment says "all"."""
    for name in DEVICE_VARIABLES:
        if name in environ:
            value = environ[name]
            if name == "NVIDIA_VISIBLE_DEVICES" and value in ("all", "void"):
                return (count_cards or count_nvidia_cards)()
            return len([device for device in value.split(",") if device.strip()])
    return 0


def count_nvidia_cards() -> int:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.splitlines())


def resolve_rope(scaling: RopeScalingKind | None, factor: float | None) -> tuple[RopeScalingKind | None, float | None]:
    if scaling is None and factor is None:
        return None, None
    return scaling or RopeScalingKind.linear, 1.0 if factor is None else factor


def with_prefill_budget(plan: LaunchPlan, model_config: Mapping[str, Any]) -> LaunchPlan:
    """Fills in `max_batch_prefill_tokens`: at most the model's context and the tokens of the whole batch."""
    tokens = plan.tokens
    if tokens.max_batch_prefill_tokens is not None:
        return plan
    lengths = (model_config.get(key) for key in ("max_position_embeddings", "max_seq_len", "n_positions"))
    context = next((length for length in lengths if isinstance(length, int) and length > 0), PREFILL_TOKENS)
    budget = min(PREFILL_TOKENS, context)
    budget = min(budget, tokens.max_batch_total_tokens or budget)
    logger.info("Default `max_batch_prefill_tokens` to %d", budget)
    return replace(plan, tokens=replace(tokens, max_batch_prefill_tokens=budget))
