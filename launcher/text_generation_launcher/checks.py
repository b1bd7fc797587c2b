"""Refuses, before any process starts, flags whose feature is missing and values that contradict each other."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from text_generation_common.errors import ArgumentValidation, WrongUsage
from text_generation_common.flags.cluster import ClusterFlags, Way
from text_generation_common.flags.declaration import (
    Flag,
    flag_name,
    flags_of,
    missing_features,
    unsupported_choices,
    values_of,
    without_effect,
    wrong_numbers,
)
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.model import ComputeFlags, FormatFlags, NameFlags, ShardFlags
from text_generation_common.flags.process import TracingFlags, tracing_refusal
from text_generation_common.flags.programs import LAUNCHER
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags
from text_generation_common.model_files import local_folder
from text_generation_launcher.config import LauncherConfig

logger = logging.getLogger("text_generation_launcher")

# Groups of flags that fronts, or engines, read; with the flags that a launcher needs even if it starts none of them.
_OF_FRONTS: Mapping[type, Collection[str]] = {
    NameFlags: (),
    RequestFlags: ("max_concurrent_requests", "disable_grammar_support"),
    FormatFlags: (),
    HttpFlags: ("tgi_buckets", "graceful_termination_timeout"),
    AccessFlags: (),
    TracingFlags: (),
}
_OF_ENGINES: Mapping[type, Collection[str]] = {
    ComputeFlags: (),
    ShardFlags: (),
    TokenFlags: (),
    SchedulingFlags: ("prefix_cache_scope",),  # what fronts make of a request's key and tenant
}
_SHARDS = ("sharded", "num_shard", "load_format", "max_input_length")

_UNREAD = {
    Way.ENGINE: (frozenset[str](), _OF_FRONTS, "with --engine-only: it is for fronts, so give it to them"),
    Way.FRONTS: (
        frozenset(_SHARDS),
        _OF_ENGINES,
        "on a server without engines: it is for them, so give it to each beside --engine-only",
    ),
}


def _flags() -> Iterator[Flag]:
    return LAUNCHER.flags_of(LauncherConfig)


def refuse_unsupported(config: LauncherConfig) -> None:
    for _, refusal in unsupported(config):
        raise refusal


def unsupported(config: LauncherConfig) -> Iterator[tuple[Flag, ArgumentValidation]]:
    """Each flag that asks for what is missing, with its refusal."""
    values = values_of(config)
    for flag in missing_features(_flags(), values):
        yield flag, ArgumentValidation(f"{flag.flag_name} is not supported yet: start without it")
    for flag in unsupported_choices(_flags(), values):
        value, instead = values[flag.name], " or ".join(flag.choices or ())
        reason = f"{flag.flag_name} {value} is not supported yet: use {instead}, or start without"
        yield flag, ArgumentValidation(reason)


def mention_without_effect(config: LauncherConfig) -> None:
    values = values_of(config)
    for line in (*without_effect(_flags(), values), *unread(_flags(), values, config.cluster.way)):
        logger.info("%s", line)


def check_input_aliases(config: LauncherConfig) -> None:
    new, old = config.tokens.max_input_tokens, config.max_input_length
    if new is not None and old is not None:
        raise ArgumentValidation(
            f"Both `max_input_tokens` ({new}) and `max_input_length` ({old}) are set. Please define only "
            "`max_input_tokens` as `max_input_length is deprecated for naming consistency.",
            "leave --max-input-length out",
        )


def check_numbers(config: LauncherConfig) -> None:
    for reason in wrong_numbers(_flags(), values_of(config)):
        raise WrongUsage(reason, "give another number, or leave the flag out")


def check_cuda_graphs(config: LauncherConfig) -> None:
    sizes = config.shard.cuda_graphs
    if sizes and not re.fullmatch(r"\d+(,\d+)*", sizes):
        raise ArgumentValidation(f"--cuda-graphs {sizes} is not a list of batch sizes: write it as 1,2,4 or 0")


def check_api_keys(access: AccessFlags, closed_routes: bool) -> None:
    """Refuses keys with spaces: the router gets all keys in one variable, split at spaces. No message shows a key."""
    for key in access.api_key:
        if not key or any(character.isspace() for character in key):
            raise ArgumentValidation("--api-key is empty or contains a space: choose a key without spaces")
    if access.admin_api_key is not None and access.admin_api_key in ("", *access.api_key):
        raise ArgumentValidation("--admin-api-key is empty or also an --api-key: choose a key of its own")
    if closed_routes and not access.api_key and access.api_key_file is None:
        raise ArgumentValidation(
            "--closed-routes needs a key that opens these routes: pass --api-key or --api-key-file as well"
        )


def check_keys_elsewhere(access: AccessFlags, fronts_on_every_node: bool) -> None:
    """Refuses keys that fronts on other machines would not have: their API would be open to all."""
    if fronts_on_every_node and access.api_key:
        raise ArgumentValidation(
            "--fronts-on-every-node does not send --api-key to other machines",
            "give --api-key-file, with the same path on each machine",
        )


def check_adapters(config: LauncherConfig, cluster: ClusterFlags) -> None:
    """Refuses --lora-dirs where no key would let adapters be loaded, or where not all fronts would learn of it."""
    if config.adapters.lora_dirs is None:
        return
    if cluster.on_ray.fronts_on_every_node:
        raise ArgumentValidation(
            "--lora-dirs and --fronts-on-every-node exclude each other: a front would load adapters for itself alone"
        )
    if cluster.way is not Way.ENGINE and config.access.admin_api_key is None:
        raise ArgumentValidation("--lora-dirs needs --admin-api-key, which loads adapters", "give both, or none")


def check_tracing(flags: TracingFlags) -> None:
    if (refused := tracing_refusal(flags.otlp_endpoint)) is not None:
        raise ArgumentValidation(*refused)


def check_limits(tokens: TokenFlags) -> None:
    """Checks TGI's rules between limits, with TGI's error texts. A limit that is not given is not compared. TGI's rule
    that the longest prompt fits into one step is left out: prompts are cut into chunks."""
    longest_input, longest = tokens.max_input_tokens, tokens.max_total_tokens
    prefill, batch = tokens.max_batch_prefill_tokens, tokens.max_batch_total_tokens
    if longest_input is not None and longest is not None and longest_input >= longest:
        reason = f"`max_input_tokens`({longest_input}) must be < `max_total_tokens`({longest})"
        raise ArgumentValidation(reason, "an answer needs a token at least: choose a smaller --max-input-tokens")
    if prefill is not None and batch is not None and prefill > batch:
        raise _contradiction("max_batch_prefill_tokens", prefill, "max_batch_total_tokens", batch)
    if longest is not None and batch is not None and longest > batch:
        raise _contradiction("max_total_tokens", longest, "max_batch_total_tokens", batch)


def _contradiction(name: str, given: int, other: str, other_given: int) -> ArgumentValidation:
    reason = f"`{name}` must be <= `{other}`. Given: {given} and {other_given}"
    return ArgumentValidation(reason, f"choose a smaller {flag_name(name)}, or leave it out")


def check_paths(config: LauncherConfig) -> None:
    """Refuses missing files and folders at once: a child would report them only after minutes of loading."""
    template = config.files.tokenizer_config_path
    if template is not None and not Path(template).is_file():
        raise ArgumentValidation(f"--tokenizer-config-path {template} is not a file: check the path")
    keys = config.access.api_key_file
    if keys is not None and not Path(keys).is_file():
        raise ArgumentValidation(f"--api-key-file {keys} is not a file: check the path")
    override = config.cache.weights_cache_override
    if override is not None and local_folder(override) is None:
        raise ArgumentValidation(f"--weights-cache-override {override} is not a directory: check the path")


def unread_flags(way: Way) -> frozenset[str]:
    """Names of the flags that have no effect in this way to serve."""
    if way not in _UNREAD:
        return frozenset()
    others, groups, _ = _UNREAD[way]
    return others.union(*({flag.name for flag in flags_of(group)} - {*read} for group, read in groups.items()))


def unread(flags: Iterator[Flag], values: Mapping[str, object], way: Way) -> Iterator[str]:
    """A line for each flag that is given, and that this way to serve does not read."""
    names = unread_flags(way)
    for flag in flags:
        if flag.name in names and values[flag.name] != flag.default and flag.no_effect is None:
            yield f"{flag.flag_name} has no effect {_UNREAD[way][2]}"
