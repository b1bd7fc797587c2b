"""Every flag of the launcher, with TGI's names, types and defaults, in one frozen dataclass.

`resolve.py` fills in derived values. The rest of the launcher reads this config and never the command line.
"""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass
from enum import StrEnum

from text_generation_common.flags import flag

DEMO_MODEL = "demo"
OTLP_SERVICE_NAME = "text-generation-inference.router"


class TrueFalse(StrEnum):
    true = "true"
    false = "false"


class Quantize(StrEnum):
    awq = "awq"
    compressed_tensors = "compressed-tensors"
    eetq = "eetq"
    exl2 = "exl2"
    gptq = "gptq"
    marlin = "marlin"
    bitsandbytes = "bitsandbytes"
    bitsandbytes_nf4 = "bitsandbytes-nf4"
    bitsandbytes_fp4 = "bitsandbytes-fp4"
    fp8 = "fp8"
    int8 = "int8"  # ours, not TGI's: the weights of linear layers in 8 bits, on CPUs


class Dtype(StrEnum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"  # ours, not TGI's: for CPUs


class KvCacheDtype(StrEnum):
    fp8_e4m3fn = "fp8_e4m3fn"
    fp8_e5m2 = "fp8_e5m2"
    int8 = "int8"  # ours, not TGI's


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class RopeScalingKind(StrEnum):
    linear = "linear"
    dynamic = "dynamic"


class UsageStats(StrEnum):
    on = "on"
    off = "off"
    no_stack = "no-stack"


class Admission(StrEnum):
    reserve = "reserve"
    peak = "peak"
    past_future = "past-future"


class PrefixCacheScope(StrEnum):
    all = "all"
    key = "key"
    tenant = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    # What is served
    model_id: str = flag(
        DEMO_MODEL, "Hub id or local directory; `demo` is the small model that ships with the package."
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub model.")
    dtype: Dtype | None = flag(None, "Type to compute in; the checkpoint's type when not given.")
    quantize: Quantize | None = flag(None, "int8: weights in 8 bits, on CPUs. Other values are not supported yet.")
    kv_cache_dtype: KvCacheDtype | None = flag(
        None, "Keys and values in 8 bits: fp8_e4m3fn or int8. fp8_e5m2 is not supported yet."
    )
    # This flag is vLLM's; TGI has none like it.
    load_format: LoadFormat = flag(
        LoadFormat.auto, "auto: read the weights from files. dummy: random weights of the right shapes, for measuring."
    )
    speculate: int | None = flag(None, "Not supported yet; 0 is off.", min=0)
    trust_remote_code: bool = flag(False, "Not supported yet: code from a model repository is never run.")
    lora_adapters: str | None = flag(None, "Not supported yet.")
    rope_scaling: RopeScalingKind | None = flag(None, "Stretch rotary positions beyond the trained context.")
    rope_factor: float | None = flag(None, "Factor by which positions are stretched; 1.0 with --rope-scaling alone.")
    watermark_gamma: float | None = flag(
        None, "Share of the vocabulary on the watermark's green list; 0.5 when not given."
    )
    watermark_delta: float | None = flag(None, "Added to the logits of the watermark's green list; 2.0 when not given.")
    disable_grammar_support: bool = flag(False, "Refuse constrained generation.")
    tokenizer_config_path: str | None = flag(None, "A tokenizer_config.json whose chat template replaces the model's.")
    huggingface_hub_cache: str | None = flag(None, "Folder of the Hugging Face hub's cache.")
    weights_cache_override: str | None = flag(None, "Folder that holds the model's files; nothing is downloaded.")

    # Shards
    sharded: TrueFalse | None = flag(None, "Whether to spread the model over several shards.")
    num_shard: int | None = flag(None, "Number of shards, on GPUs or CPUs; the number of visible GPUs when not given.")
    shard_uds_path: str | None = flag(
        None, "Path prefix of the shards' sockets, `<prefix>-<rank>`; a private folder for each port when not given."
    )
    master_addr: str = flag("localhost", "Accepted without effect; shards meet through a file.")
    master_port: int = flag(29500, "Accepted without effect; shards meet through a file.", min=0, max=65535)
    cuda_graphs: str | None = flag(
        None, "Decode batch sizes to record as CUDA graphs, such as 1,2,4; 0 for none; sizes up to 256 when not given."
    )
    cuda_memory_fraction: float = flag(1.0, "Share of a GPU's memory that a shard may use.")
    disable_custom_kernels: bool = flag(False, "Accepted without effect; there are no custom kernels.")
    enable_prefill_logprobs: bool = flag(False, "Not supported yet.")

    # Limits
    validation_workers: int = flag(2, "Number of threads that tokenize.", min=0)
    max_concurrent_requests: int = flag(128, "Most requests at a time; further requests get status 429.", min=0)
    max_best_of: int = flag(2, "Largest best_of that a request may ask for.", min=0)
    max_stop_sequences: int = flag(4, "Most stop sequences of one request.", min=0)
    max_top_n_tokens: int = flag(5, "Largest top_n_tokens that a request may ask for.", min=0)
    max_input_tokens: int | None = flag(None, "Longest prompt, in tokens; found at warm-up when not given.", min=0)
    max_input_length: int | None = flag(None, "Old name of --max-input-tokens.", min=0)
    max_total_tokens: int | None = flag(
        None, "Longest prompt plus answer, in tokens; found at warm-up when not given.", min=0
    )
    waiting_served_ratio: float = flag(0.3, "Ratio of waiting to running requests at which prompts join the batch.")
    max_batch_prefill_tokens: int | None = flag(
        None, "Most prompt tokens of one step; min(4096, the model's context) when not given.", min=0
    )
    max_batch_total_tokens: int | None = flag(
        None, "Most tokens in the whole batch; found at warm-up when not given.", min=0
    )
    max_waiting_tokens: int = flag(20, "Decode steps after which waiting prompts join the batch.", min=0)
    max_batch_size: int | None = flag(None, "Most requests in the batch.", min=0)
    max_queued_tokens: int | None = flag(
        None,
        "Most prompt tokens that wait; further requests get status 429; 16 times the token slots when not given.",
        min=1,
    )
    admission: Admission = flag(
        Admission.past_future,
        "When a request starts: when all memory that it may ever need is free (reserve), or when the peak of memory "
        "fits if answers grow to max_new_tokens (peak) or to the lengths of recent answers (past-future).",
    )
    # TGI has the environment variable, but not the flag.
    prefix_caching: bool = flag(
        True, "Keep the keys and values of a prompt, for later prompts that begin with the same tokens."
    )
    prefix_cache_scope: PrefixCacheScope = flag(
        PrefixCacheScope.key,
        "Which requests share cached prefixes: requests of one API key (key; all requests without keys), of one "
        "key and one X-Tenant header (tenant), or all requests (all).",
    )
    priority_between_tenants: bool = flag(
        False, "Requests of better priority go first among all tenants; otherwise only among their own tenant's."
    )
    max_client_batch_size: int = flag(4, "Most inputs that one request may hold.", min=0)
    payload_limit: int = flag(2_000_000, "Largest request body, in bytes.", min=0)

    # HTTP
    hostname: str = flag("0.0.0.0", "IP address to listen on.")
    port: int = flag(3000, "Port to listen on.", short="-p", min=0, max=65535)
    cors_allow_origin: list[str] | None = flag(
        None, "Origin whose web pages may call the server, may be repeated; any when not given."
    )
    api_key: list[str] | None = flag(
        None,
        "Key that clients must send, may be repeated; in the environment, which `ps` does not show, several keys "
        "are separated by spaces.",
    )
    api_key_file: str | None = flag(None, "File with the SHA-256 digest of one key in each line.")
    closed_routes: bool = flag(False, "Ask for the key at /metrics, /info, /docs and /v1/models as well.")
    trusted_proxy: list[str] | None = flag(
        None, "Address or network of a proxy whose Forwarded or X-Forwarded-For is believed, may be repeated."
    )
    max_connections: int = flag(4096, "Most connections at a time; further connections get status 503.", min=1)
    stream_write_timeout: int = flag(30, "Seconds after which a stream is cut that its client does not read.", min=1)
    ngrok: bool = flag(False, "Not supported yet.")
    ngrok_authtoken: str | None = flag(None, "Not supported yet.")
    ngrok_edge: str | None = flag(None, "Not supported yet.")
    graceful_termination_timeout: int = flag(
        90, "Seconds that running requests get to end after the first signal.", short="-g", min=0
    )

    # Logs and figures
    json_output: bool = flag(False, "Write each log line as one JSON object.")
    env: bool = flag(False, "Log versions, platform and GPUs, then serve.", short="-e", env=False)
    otlp_endpoint: str | None = flag(None, "Not supported yet.")
    otlp_service_name: str = flag(OTLP_SERVICE_NAME, "Name of the service in traces; used with --otlp-endpoint only.")
    prometheus_port: int | None = flag(None, "Accepted without effect; /metrics is served on --port.", min=0, max=65535)
    usage_stats: UsageStats | None = flag(None, "Accepted without effect; no usage is ever sent.")

    # For tests of this project. No environment variable: a variable can be inherited by accident.
    testing: bool = flag(False, "Let processes fail at the places that FAILPOINTS names.", env=False, hidden=True)
