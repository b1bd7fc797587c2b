"""Every flag of the launcher, with TGI's names, types and defaults, in one frozen dataclass.

`resolve.py` fills in what is derived; the rest of the launcher reads this and never the command line.
"""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass
from enum import StrEnum

from text_generation_launcher.flags import flag

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
    int8 = "int8"  # not TGI's: the weights of linear layers in 8 bits, on CPUs


class Dtype(StrEnum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"  # not TGI's: what a CPU computes best


class KvCacheDtype(StrEnum):
    fp8_e4m3fn = "fp8_e4m3fn"
    fp8_e5m2 = "fp8_e5m2"
    int8 = "int8"  # not TGI's


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class RopeScaling(StrEnum):
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
    dtype: Dtype | None = flag(None, "Type to compute in; the checkpoint's own when not given.")
    quantize: Quantize | None = flag(None, "int8: weights in 8 bits, on CPUs. The others are not supported yet.")
    kv_cache_dtype: KvCacheDtype | None = flag(
        None, "Keys and values in 8 bits: fp8_e4m3fn or int8. fp8_e5m2 is not supported yet."
    )
    # Not TGI's: vLLM's name.
    load_format: LoadFormat = flag(
        LoadFormat.auto, "dummy: random weights of the shapes in config.json, without files of them, to measure with."
    )
    speculate: int | None = flag(None, "Not supported yet; 0 is off.", min=0)
    trust_remote_code: bool = flag(False, "Not supported yet: code from a model repository is never run.")
    lora_adapters: str | None = flag(None, "Not supported yet.")
    rope_scaling: RopeScaling | None = flag(None, "Stretch rotary positions beyond the trained context.")
    rope_factor: float | None = flag(None, "How far to stretch them; 1.0 with --rope-scaling alone.")
    watermark_gamma: float | None = flag(
        None, "Share of the vocabulary on the watermark's green list; the shard's 0.5."
    )
    watermark_delta: float | None = flag(None, "What is added to the green list's logits; the shard's 2.0.")
    disable_grammar_support: bool = flag(False, "Refuse constrained generation.")
    tokenizer_config_path: str | None = flag(None, "A tokenizer_config.json whose chat template is used instead.")
    huggingface_hub_cache: str | None = flag(None, "Folder of the hub's cache.")
    weights_cache_override: str | None = flag(None, "Folder that holds the model's files; nothing is downloaded.")

    # Shards
    sharded: TrueFalse | None = flag(None, "Whether to spread the model over several shards.")
    num_shard: int | None = flag(None, "Number of shards, on GPUs or CPUs; the GPUs in sight when not given.")
    shard_uds_path: str | None = flag(
        None, "Prefix of the shards' sockets, `<prefix>-<rank>`; in a private folder of the port when not given."
    )
    master_addr: str = flag("localhost", "Accepted; shards meet through a file.")
    master_port: int = flag(29500, "Accepted; shards meet through a file.", min=0, max=65535)
    cuda_graphs: str | None = flag(
        None, "Decode batch sizes that GPUs record, comma separated; the shard's, up to 256, when not given; 0 is off."
    )
    cuda_memory_fraction: float = flag(1.0, "Share of a GPU's memory that a shard may use.")
    disable_custom_kernels: bool = flag(False, "Accepted; there is nothing to disable.")
    enable_prefill_logprobs: bool = flag(False, "Not supported yet.")

    # Limits
    validation_workers: int = flag(2, "Threads that tokenize.", min=0)
    max_concurrent_requests: int = flag(128, "Requests at a time; one more gets 429.", min=0)
    max_best_of: int = flag(2, "Largest best_of of a request.", min=0)
    max_stop_sequences: int = flag(4, "Stop sequences of a request at most.", min=0)
    max_top_n_tokens: int = flag(5, "Largest top_n_tokens of a request.", min=0)
    max_input_tokens: int | None = flag(None, "Longest prompt; from warm-up when not given.", min=0)
    max_input_length: int | None = flag(None, "Old name of --max-input-tokens.", min=0)
    max_total_tokens: int | None = flag(None, "Longest prompt and answer; from warm-up when not given.", min=0)
    waiting_served_ratio: float = flag(0.3, "Waiting over running at which prompts join the batch.")
    max_batch_prefill_tokens: int | None = flag(
        None, "Prompt tokens of one step; min(4096, the model's context) when not given.", min=0
    )
    max_batch_total_tokens: int | None = flag(None, "Tokens of the whole batch; from warm-up when not given.", min=0)
    max_waiting_tokens: int = flag(20, "Decode steps after which waiting prompts join.", min=0)
    max_batch_size: int | None = flag(None, "Requests in the batch at most.", min=0)
    max_queued_tokens: int | None = flag(
        None, "Prompt tokens that may wait, beyond which requests get 429; 16 times the slots when not given.", min=1
    )
    admission: Admission = flag(
        Admission.past_future,
        "When a request starts: all it may ever need is free (reserve), or the peak of memory fits, if texts grow to "
        "max_new_tokens (peak) or as long as recent ones (past-future).",
    )
    # TGI's variable, and no flag there.
    prefix_caching: bool = flag(True, "Keep what was computed for a prompt, for those that begin with the same tokens.")
    prefix_cache_scope: PrefixCacheScope = flag(
        PrefixCacheScope.key,
        "Among whose requests it is shared: those of one API key (key; without keys: all), of one key and X-Tenant "
        "(tenant), or all.",
    )
    priority_between_tenants: bool = flag(
        False, "A request's priority counts before the fair shares of tenants; otherwise within its tenant only."
    )
    max_client_batch_size: int = flag(4, "Inputs of one client call at most.", min=0)
    payload_limit: int = flag(2_000_000, "Bytes of a request body at most.", min=0)

    # HTTP
    hostname: str = flag("0.0.0.0", "IP address to listen on.")
    port: int = flag(3000, "Port to listen on.", short="-p", min=0, max=65535)
    cors_allow_origin: list[str] | None = flag(None, "Allowed origin, may be repeated; any when not given.")
    api_key: list[str] | None = flag(
        None, "Key that clients must send, may be repeated; in the environment split at spaces, and not seen in `ps`."
    )
    api_key_file: str | None = flag(None, "File with the SHA-256 of a key a line.")
    closed_routes: bool = flag(False, "Ask for the key at /metrics, /info, /docs and /v1/models, too.")
    trusted_proxy: list[str] | None = flag(
        None, "Address or network of a proxy whose Forwarded or X-Forwarded-For is believed, may be repeated."
    )
    max_connections: int = flag(4096, "Connections at a time; one more gets 503.", min=1)
    stream_write_timeout: int = flag(30, "Seconds that a client may leave its stream unread.", min=1)
    ngrok: bool = flag(False, "Not supported yet.")
    ngrok_authtoken: str | None = flag(None, "Not supported yet.")
    ngrok_edge: str | None = flag(None, "Not supported yet.")
    graceful_termination_timeout: int = flag(
        90, "Seconds that running requests get after the first signal.", short="-g", min=0
    )

    # Logs and figures
    json_output: bool = flag(False, "Logs as one JSON object a line.")
    env: bool = flag(False, "Log what this runs on, then go on.", short="-e", env=False)
    otlp_endpoint: str | None = flag(None, "Not supported yet.")
    otlp_service_name: str = flag(OTLP_SERVICE_NAME, "Name in traces; used with --otlp-endpoint only.")
    prometheus_port: int | None = flag(None, "Accepted; /metrics is served on --port.", min=0, max=65535)
    usage_stats: UsageStats | None = flag(None, "Accepted; no usage is ever sent.")

    # For tests of this project. No environment variable: a variable can be inherited by accident.
    testing: bool = flag(False, "Let processes fail at the places that FAILPOINTS names.", env=False, hidden=True)
