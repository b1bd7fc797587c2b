"""The router's settings: one frozen value, checked, built once in `cli.py`."""

from dataclasses import dataclass, field

from text_generation_common.flags.kinds import AdmissionMode, CacheScope
from text_generation_router.errors import StartError
from text_generation_router.http.peer import Network

POSITIVE = (
    "validation_workers",
    "max_concurrent_requests",
    "max_batch_prefill_tokens",
    "max_batch_size",
    "max_queued_tokens",
    "payload_limit",
    "max_connections",
    "stream_write_timeout",
)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    tokenizer_name: str  # a local directory or a hub id; also the `model_id` that routes report
    revision: str | None
    weights_cache_override: str | None  # a folder with the model's files; its name may differ
    tokenizer_config_path: str | None  # a file whose chat template replaces the model's own
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_client_batch_size: int
    max_input_tokens: int | None  # this and every other token limit: None means that warm-up decides
    max_total_tokens: int | None
    waiting_served_ratio: float
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int | None
    max_waiting_tokens: int
    max_batch_size: int | None  # None: no limit
    max_queued_tokens: int | None  # None: 16 times the token slots
    admission: AdmissionMode
    prefix_caching: bool
    prefix_cache_scope: CacheScope
    priority_between_tenants: bool
    validation_workers: int
    payload_limit: int  # bytes
    hostname: str
    port: int
    listen_fd: int | None  # a bound socket, inherited; replaces hostname and port
    master_shard_uds_path: str
    cors_allow_origin: tuple[str, ...]  # empty: any origin
    json_output: bool
    log_level: str
    compute_type: str
    api_key_digests: tuple[bytes, ...] = field(repr=False)  # empty: no request needs a key
    closed_routes: bool  # whether /info, /metrics, /v1/models and the documentation need a key too
    trusted_proxies: tuple[Network, ...]  # proxies whose forwarding headers name the client's address
    max_connections: int
    stream_write_timeout: float  # seconds
    graceful_termination_timeout: float  # seconds
    launcher_fd: int | None  # an inherited socket to the launcher; None: no launcher

    def check(self) -> None:
        """Raises StartError for a value that is out of range or contradicts another value."""
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise StartError(f"`{name}` must be > 0")
        if self.graceful_termination_timeout < 0:
            raise StartError("`graceful_termination_timeout` must be >= 0")
        if self.closed_routes and not self.api_key_digests:
            raise StartError("--closed-routes needs keys: give --api-key or --api-key-file, or start without it")
        self._check_tokens()

    def _check_tokens(self) -> None:
        inputs, total, batch = self.max_input_tokens, self.max_total_tokens, self.max_batch_total_tokens
        if inputs is not None and total is not None and inputs >= total:
            raise StartError("`max_input_tokens` must be < `max_total_tokens`")
        if batch is None:
            return
        prefill = self.max_batch_prefill_tokens
        if prefill > batch:
            raise StartError(
                f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: {prefill} and {batch}"
            )
        if total is not None and total > batch:
            raise StartError(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {batch}")
