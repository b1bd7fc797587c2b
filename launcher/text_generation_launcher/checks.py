"""Refuses, before any process starts, flags whose feature is missing and values that contradict each other."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from text_generation_common.errors import ArgumentValidation
from text_generation_common.flags import flag_name
from text_generation_launcher.config import OTLP_SERVICE_NAME, KvCacheDtype, LauncherConfig, Quantize

logger = logging.getLogger("text_generation_launcher")

# Flags whose feature is missing, each with the values that do not ask for the feature.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "speculate": (None, 0),
    "trust_remote_code": (False,),
    "lora_adapters": (None, ""),
    "enable_prefill_logprobs": (False,),
    "ngrok": (False,),
    "ngrok_authtoken": (None,),
    "ngrok_edge": (None,),
    "otlp_endpoint": (None,),
}

# Flags of which only some of TGI's values are supported, each with the supported values.
SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "quantize": (Quantize.int8,),
    "kv_cache_dtype": (KvCacheDtype.fp8_e4m3fn, KvCacheDtype.int8),
}

# Flags that are accepted because TGI's users pass them, and have no effect: the value that means "not given", and why
# there is no effect.
WITHOUT_EFFECT: Mapping[str, tuple[object, str]] = {
    "prometheus_port": (None, "metrics are served on --port at /metrics"),
    "usage_stats": (None, "no usage is ever sent"),
    "disable_custom_kernels": (False, "there are no custom kernels to disable"),
    "master_addr": ("localhost", "shards meet through a file"),
    "master_port": (29500, "shards meet through a file"),
    "otlp_service_name": (OTLP_SERVICE_NAME, "the name is for traces, which need --otlp-endpoint"),
}


def refuse_unsupported(config: LauncherConfig) -> None:
    for name, neutral in UNSUPPORTED.items():
        if getattr(config, name) not in neutral:
            raise ArgumentValidation(f"{flag_name(name)} is not supported yet: start without it")
    for name, values in SUPPORTED.items():
        value = getattr(config, name)
        if value is not None and value not in values:
            instead = " or ".join(values)
            raise ArgumentValidation(f"{flag_name(name)} {value} is not supported yet: use {instead}, or start without")


def mention_without_effect(config: LauncherConfig) -> None:
    for name, (not_given, why) in WITHOUT_EFFECT.items():
        if getattr(config, name) != not_given:
            logger.info("%s has no effect: %s", flag_name(name), why)


def check_input_aliases(config: LauncherConfig) -> None:
    new, old = config.max_input_tokens, config.max_input_length
    if new is not None and old is not None:
        raise ArgumentValidation(
            f"Both `max_input_tokens` ({new}) and `max_input_length` ({old}) are set. Please define only "
            "`max_input_tokens` as `max_input_length is deprecated for naming consistency."
        )


def check_counts(config: LauncherConfig) -> None:
    if config.validation_workers == 0:
        raise ArgumentValidation("`validation_workers` must be > 0")
    if config.max_batch_size == 0:
        raise ArgumentValidation("`max_batch_size` must be > 0")


def check_gpu_options(config: LauncherConfig) -> None:
    sizes = config.cuda_graphs
    if sizes and not re.fullmatch(r"\d+(,\d+)*", sizes):
        raise ArgumentValidation(f"--cuda-graphs {sizes} is not a list of batch sizes: write it as 1,2,4 or 0")
    if not 0 < config.cuda_memory_fraction <= 1:
        raise ArgumentValidation("`cuda_memory_fraction` must be > 0 and <= 1")


def check_api_keys(config: LauncherConfig) -> None:
    """Refuses keys with spaces: the router gets all keys in one variable, split at spaces. No message shows a key."""
    for key in config.api_key or ():
        if not key or any(character.isspace() for character in key):
            raise ArgumentValidation("--api-key is empty or contains a space: choose a key without spaces")
    if config.closed_routes and not config.api_key and config.api_key_file is None:
        raise ArgumentValidation(
            "--closed-routes needs a key that opens these routes: pass --api-key or --api-key-file as well"
        )


def check_limits(config: LauncherConfig) -> None:
    """TGI's rules between limits, in TGI's words. A limit that is not given is not compared."""
    longest_input, longest = config.max_input_tokens, config.max_total_tokens
    prefill, batch = config.max_batch_prefill_tokens, config.max_batch_total_tokens
    if longest_input is not None and longest is not None and longest_input >= longest:
        raise ArgumentValidation(f"`max_input_tokens`({longest_input}) must be < `max_total_tokens`({longest})")
    if prefill is not None and longest_input is not None and prefill < longest_input:
        raise _contradiction("max_batch_prefill_tokens", prefill, ">=", "max_input_tokens", longest_input)
    if prefill is not None and batch is not None and prefill > batch:
        raise _contradiction("max_batch_prefill_tokens", prefill, "<=", "max_batch_total_tokens", batch)
    if longest is not None and batch is not None and longest > batch:
        raise _contradiction("max_total_tokens", longest, "<=", "max_batch_total_tokens", batch)


def _contradiction(name: str, given: int, relation: str, other: str, other_given: int) -> ArgumentValidation:
    return ArgumentValidation(f"`{name}` must be {relation} `{other}`. Given: {given} and {other_given}")


def check_paths(config: LauncherConfig) -> None:
    """Refuses missing files and folders at once: a child would report them only after minutes of loading."""
    template = config.tokenizer_config_path
    if template is not None and not Path(template).is_file():
        raise ArgumentValidation(f"--tokenizer-config-path {template} is not a file: check the path")
    keys = config.api_key_file
    if keys is not None and not Path(keys).is_file():
        raise ArgumentValidation(f"--api-key-file {keys} is not a file: check the path")
    override = config.weights_cache_override
    if override is not None and not Path(override).is_dir():
        raise ArgumentValidation(f"--weights-cache-override {override} is not a directory: check the path")
