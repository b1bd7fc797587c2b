"""Makes the router's config from its flags: refuses wrong values, and reads the files that flags name."""

import logging
from dataclasses import fields
from typing import Any

from text_generation_common import places
from text_generation_common.adapters.listed import check_names, digests
from text_generation_common.cluster.block_key import parse_key
from text_generation_common.errors import CommandError, ModelError
from text_generation_common.flags.declaration import (
    missing_features,
    values_of,
    without_effect,
    wrong_numbers,
)
from text_generation_common.flags.process import tracing_refusal
from text_generation_common.flags.programs import ROUTER
from text_generation_common.flags.requests import TokenFlags
from text_generation_common.model_files import served_name
from text_generation_router.config import RouterConfig, RouterFlags, has_engines_elsewhere
from text_generation_router.errors import StartError
from text_generation_router.http.keys import admin_digest_of, names_of_keys
from text_generation_router.http.peer import networks_of

logger = logging.getLogger(__name__)


def resolve(flags: RouterFlags) -> RouterConfig:
    """The config that the flags describe. Raises StartError. The config keeps digests of the keys, not the keys."""
    refuse_unsupported(flags)
    derived: dict[str, Any] = {
        "served_model_name": served_name(flags.names.served_model_name, flags.tokenizer_name),
        "master_shard_uds_path": find_shard(flags),
        "trusted_proxies": networks_of(flags.access.trusted_proxy),
        "block_hash_key": block_hash_key_of(flags.block_hash_key),
        "api_keys": names_of_keys(flags.access.api_key, flags.access.api_key_file),
        "adapters": adapters_of(flags),
        "admin_key_digest": admin_digest_of(flags.access.admin_api_key),
    }
    check(flags, has_keys=bool(derived["api_keys"]))
    given = {item.name: getattr(flags, item.name) for item in fields(RouterConfig) if item.name not in derived}
    return RouterConfig(**given, **derived)


def refuse_unsupported(flags: RouterFlags) -> None:
    """Raises StartError for flags whose feature is missing, and logs flags that have no effect."""
    declared, values = tuple(ROUTER.flags_of(RouterFlags)), values_of(flags)
    for missing in missing_features(declared, values):
        raise StartError(f"{missing.flag_name} is not supported yet: start without it")
    for line in without_effect(declared, values):
        logger.info("%s", line)


def check(flags: RouterFlags, has_keys: bool) -> None:
    """Checks the flags. Raises StartError for a value that is too small or contradicts another value."""
    for reason in wrong_numbers(ROUTER.flags_of(RouterFlags), values_of(flags)):
        raise StartError(reason)
    if flags.http.closed_routes and not has_keys:
        raise StartError("--closed-routes needs keys: give --api-key or --api-key-file, or start without it")
    if (refused := tracing_refusal(flags.tracing.otlp_endpoint)) is not None:
        raise StartError(": ".join(refused))
    check_tokens(flags.tokens)
    check_adapters(flags)


def check_tokens(tokens: TokenFlags) -> None:
    inputs, total, batch = tokens.max_input_tokens, tokens.max_total_tokens, tokens.max_batch_total_tokens
    if inputs is not None and total is not None and inputs >= total:
        raise StartError("`max_input_tokens` must be < `max_total_tokens`")
    if batch is None:
        return
    if tokens.prefill_budget > batch:
        raise StartError(
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {tokens.prefill_budget} and {batch}"
        )
    if total is not None and total > batch:
        raise StartError(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {batch}")


def adapters_of(flags: RouterFlags) -> dict[str, str]:
    try:
        found = digests(flags.adapter_list.lora_adapters)
        check_names(found, (served_name(flags.names.served_model_name, flags.tokenizer_name), flags.tokenizer_name))
        return found
    except ModelError as error:
        raise StartError(str(error)) from None


def check_adapters(flags: RouterFlags) -> None:
    if flags.adapter_list.lora_dirs and not flags.access.admin_api_key:
        raise StartError("--lora-dirs needs --admin-api-key, which loads adapters")


def block_hash_key_of(text: str) -> bytes | None:
    try:
        return parse_key(text)
    except ValueError as error:
        raise StartError(str(error)) from None


def find_shard(flags: RouterFlags) -> str:
    is_front = has_engines_elsewhere(flags.engine_list, flags.engines_by_launcher)
    if is_front or flags.master_shard_uds_path:
        return flags.master_shard_uds_path or ""
    try:
        return places.find_master_socket(flags.http.port, flags.inherited.runtime_dir)
    except CommandError as error:
        raise StartError(error.reason) from None
