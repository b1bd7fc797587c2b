"""`text-generation-router`: turns TGI's flags into one config, and a failed start into one line on stderr."""

import sys
from dataclasses import fields
from typing import Annotated, Any, NoReturn

import typer

from text_generation_common import faults, places
from text_generation_common.errors import CommandError
from text_generation_common.flags.kinds import AdmissionMode, CacheScope
from text_generation_common.logs import setup_logging
from text_generation_router.config import RouterConfig
from text_generation_router.errors import InferenceError, ShardsError, StartError
from text_generation_router.flags import mention_without_effect, refuse_unsupported
from text_generation_router.http.keys import digests_of
from text_generation_router.http.peer import networks_of
from text_generation_router.serve import run

# Pretty tracebacks are off: they print the values of local variables, which may be a user's text.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Flag = typer.Option


@app.command()
def route(
    tokenizer_name: Annotated[str, Flag(envvar="TOKENIZER_NAME", help="Local directory or hub id.")],
    revision: Annotated[str | None, Flag(envvar="REVISION")] = None,
    weights_cache_override: Annotated[str | None, Flag(envvar="WEIGHTS_CACHE_OVERRIDE", hidden=True)] = None,
    tokenizer_config_path: Annotated[str | None, Flag(envvar="TOKENIZER_CONFIG_PATH")] = None,
    max_concurrent_requests: Annotated[int, Flag(envvar="MAX_CONCURRENT_REQUESTS")] = 128,
    max_best_of: Annotated[int, Flag(envvar="MAX_BEST_OF")] = 2,
    max_stop_sequences: Annotated[int, Flag(envvar="MAX_STOP_SEQUENCES")] = 4,
    max_top_n_tokens: Annotated[int, Flag(envvar="MAX_TOP_N_TOKENS")] = 5,
    max_client_batch_size: Annotated[int, Flag(envvar="MAX_CLIENT_BATCH_SIZE")] = 4,
    max_input_tokens: Annotated[int | None, Flag(envvar="MAX_INPUT_TOKENS")] = None,
    max_total_tokens: Annotated[int | None, Flag(envvar="MAX_TOTAL_TOKENS")] = None,
    waiting_served_ratio: Annotated[float, Flag(envvar="WAITING_SERVED_RATIO")] = 1.2,
    max_batch_prefill_tokens: Annotated[int, Flag(envvar="MAX_BATCH_PREFILL_TOKENS")] = 4096,
    max_batch_total_tokens: Annotated[int | None, Flag(envvar="MAX_BATCH_TOTAL_TOKENS")] = None,
    max_waiting_tokens: Annotated[int, Flag(envvar="MAX_WAITING_TOKENS")] = 20,
    max_batch_size: Annotated[int | None, Flag(envvar="MAX_BATCH_SIZE")] = None,
    max_queued_tokens: Annotated[
        int | None, Flag(envvar="MAX_QUEUED_TOKENS", help="Of prompts that wait; 16 times the slots when not given.")
    ] = None,
    admission: Annotated[
        AdmissionMode, Flag(envvar="ADMISSION", help="How much memory a request must find free before it starts.")
    ] = AdmissionMode.PAST_FUTURE,
    prefix_caching: Annotated[
        bool,
        Flag("--prefix-caching/--no-prefix-caching", envvar="PREFIX_CACHING", help="Compute shared prompts once."),
    ] = True,
    prefix_cache_scope: Annotated[
        CacheScope, Flag(envvar="PREFIX_CACHE_SCOPE", help="Among whose requests cached prefixes are shared.")
    ] = CacheScope.KEY,
    priority_between_tenants: Annotated[
        bool,
        Flag(
            "--priority-between-tenants",
            envvar="PRIORITY_BETWEEN_TENANTS",
            help="A request's `priority` counts before fair shares; otherwise within one tenant only.",
        ),
    ] = False,
    validation_workers: Annotated[
        int,
        Flag(envvar="VALIDATION_WORKERS", help="Threads that tokenize; one more is for long texts that cannot be cut."),
    ] = 2,
    payload_limit: Annotated[int, Flag(envvar="PAYLOAD_LIMIT", help="Bytes of a body at most.")] = 2_000_000,
    hostname: Annotated[str, Flag(envvar="HOSTNAME", help="IP address to listen on.")] = "0.0.0.0",
    port: Annotated[int, Flag("--port", "-p", envvar="PORT", min=0, max=65535)] = 3000,
    listen_fd: Annotated[int | None, Flag(help="A bound socket to listen on; replaces --hostname and --port.")] = None,
    master_shard_uds_path: Annotated[
        str | None,
        Flag(envvar="MASTER_SHARD_UDS_PATH", help="The first shard's socket; that of --port's folder when not given."),
    ] = None,
    runtime_dir: Annotated[str, Flag(envvar="XDG_RUNTIME_DIR", hidden=True)] = "",
    cors_allow_origin: Annotated[list[str] | None, Flag(envvar="CORS_ALLOW_ORIGIN", help="Repeatable.")] = None,
    api_key: Annotated[
        list[str] | None, Flag(envvar="API_KEY", help="Asked for as `Authorization: Bearer KEY`. Repeatable.")
    ] = None,
    api_key_file: Annotated[
        str | None, Flag(envvar="API_KEY_FILE", help="More keys: the SHA-256 of one in hexadecimal digits a line.")
    ] = None,
    closed_routes: Annotated[
        bool,
        Flag("--closed-routes", envvar="CLOSED_ROUTES", help="/info, /metrics, /v1/models and /docs need a key too."),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        Flag(envvar="TRUSTED_PROXY", help="Address or network whose (X-)Forwarded(-For) is believed. Repeatable."),
    ] = None,
    max_connections: Annotated[
        int, Flag(envvar="MAX_CONNECTIONS", help="Open at once; those beyond are refused, whatever they ask for.")
    ] = 4096,
    stream_write_timeout: Annotated[
        float, Flag(envvar="STREAM_WRITE_TIMEOUT", help="Seconds until a client that does not read is dropped.")
    ] = 30.0,
    graceful_termination_timeout: Annotated[
        float, Flag(envvar="GRACEFUL_TERMINATION_TIMEOUT", help="Seconds for running requests to finish at the end.")
    ] = 90.0,
    launcher_fd: Annotated[int | None, Flag(hidden=True)] = None,
    json_output: Annotated[bool, Flag("--json-output", envvar="JSON_OUTPUT")] = False,
    log_level: Annotated[str, Flag(envvar="LOG_LEVEL", hidden=True)] = "info",
    failpoints: Annotated[str, Flag(envvar="FAILPOINTS", hidden=True)] = "",
    testing: Annotated[bool, Flag("--testing", hidden=True)] = False,
    compute_type: Annotated[str, Flag(envvar="COMPUTE_TYPE", hidden=True)] = "gpu+optimized",
    prometheus_port: Annotated[int, Flag(envvar="PROMETHEUS_PORT", help="No effect.")] = 9000,
    usage_stats: Annotated[str, Flag(envvar="USAGE_STATS", help="No effect.")] = "on",
    otlp_service_name: Annotated[
        str, Flag(envvar="OTLP_SERVICE_NAME", help="No effect.")
    ] = "text-generation-inference.router",
    disable_grammar_support: Annotated[
        bool, Flag("--disable-grammar-support", envvar="DISABLE_GRAMMAR_SUPPORT")
    ] = False,
    trust_remote_code: Annotated[bool, Flag("--trust-remote-code", envvar="TRUST_REMOTE_CODE", hidden=True)] = False,
    otlp_endpoint: Annotated[str | None, Flag(envvar="OTLP_ENDPOINT", hidden=True)] = None,
    ngrok: Annotated[bool, Flag("--ngrok", envvar="NGROK", hidden=True)] = False,
    ngrok_authtoken: Annotated[str | None, Flag(envvar="NGROK_AUTHTOKEN", hidden=True)] = None,
    ngrok_edge: Annotated[str | None, Flag(envvar="NGROK_EDGE", hidden=True)] = None,
    max_image_fetch_size: Annotated[int, Flag(envvar="MAX_IMAGE_FETCH_SIZE", hidden=True)] = 1_073_741_824,
) -> None:
    """Serve text generation over HTTP, computed by the shards behind a unix socket."""
    given = dict(locals())
    setup_logging(log_level, json_output)
    try:
        set_up_faults(failpoints, testing)
        refuse_unsupported(given)
        mention_without_effect(given)
        config = config_of(given)
        config.check()
        run(config)
    except (StartError, ShardsError, InferenceError) as error:
        fail(str(error))


def set_up_faults(text: str, testing: bool) -> None:
    try:
        faults.setup_command(text, testing)
    except ValueError as error:
        raise StartError(str(error)) from None


def config_of(given: dict[str, Any]) -> RouterConfig:
    """Raises StartError for an invalid API key or proxy network. The config keeps digests of the keys, not the keys."""
    changed = {
        "master_shard_uds_path": given["master_shard_uds_path"] or find_shard(given["port"], given["runtime_dir"]),
        "cors_allow_origin": tuple(given["cors_allow_origin"] or ()),
        "trusted_proxies": networks_of(given["trusted_proxy"] or ()),
        "api_key_digests": digests_of(given["api_key"] or (), given["api_key_file"]),
    }
    values = {field.name: given[field.name] for field in fields(RouterConfig) if field.name not in changed}
    return RouterConfig(**values | changed)


def find_shard(port: int, runtime_dir: str) -> str:
    try:
        return places.find_master_socket(port, runtime_dir)
    except CommandError as error:
        raise StartError(error.reason) from None


def fail(reason: str) -> NoReturn:
    print(f"Error: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    app()
