"""Types of flags whose value is a choice; and the topics of flags."""

from enum import StrEnum


class Topic(StrEnum):
    """Under which heading `--help` lists a flag."""

    MODEL = "Model"
    COMPUTING = "Computing"
    REQUESTS = "What requests may ask for"
    FORMATS = "Tools and reasoning"
    SCHEDULING = "Memory and scheduling"
    HTTP = "HTTP"
    KEYS = "Keys and addresses of clients"
    CLUSTER = "Several processes and machines"
    LOGS = "Logs and traces"
    ABSENT = "Of TGI, without effect or not supported"


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
    int8 = "int8"  # not in TGI: the weights of linear layers in 8 bits
    int4 = "int4"  # not in TGI: the same in 4 bits


class Dtype(StrEnum):
    float32 = "float32"  # not in TGI: for CPUs
    bfloat16 = "bfloat16"
    float16 = "float16"


class HeadDtype(StrEnum):
    """Types of a copy of the head: numbers, or integers as of --quantize."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    int4 = "int4"


class ActivationType(StrEnum):
    """Not in TGI: what the inputs of layers with quantized weights are multiplied as."""

    model = "model"  # in the model's type
    int8 = "int8"


class KvCacheDtype(StrEnum):
    fp8_e4m3fn = "fp8_e4m3fn"
    fp8_e5m2 = "fp8_e5m2"
    int8 = "int8"  # not in TGI


class Standby(StrEnum):
    """Not in TGI: whether a process waits that replaces dead shards at once."""

    off = "off"
    on = "on"


class LoadFormat(StrEnum):
    auto = "auto"
    dummy = "dummy"


class GenerationConfig(StrEnum):
    none = "none"
    model = "model"


class RopeScalingKind(StrEnum):
    linear = "linear"
    dynamic = "dynamic"


class CpuTarget(StrEnum):
    """Not in TGI: the processors for which the CPU's kernels are compiled, the best first."""

    amx = "amx"
    avx512_bf16 = "avx512_bf16"
    avx512 = "avx512"
    avx2 = "avx2"
    portable = "portable"


class UsageStats(StrEnum):
    on = "on"
    off = "off"
    no_stack = "no-stack"


class AdmissionMode(StrEnum):
    RESERVE = "reserve"  # a request that starts gets slots for all tokens that it may make
    PEAK = "peak"  # a request starts if slots will suffice even when every request makes `max_new_tokens` tokens
    PAST_FUTURE = "past-future"  # as PEAK, with output lengths sampled from recent ones


class CacheScope(StrEnum):
    """Says which requests share cached prefixes."""

    ALL = "all"
    KEY = "key"  # requests with the same API key; all requests if the server has no keys
    TENANT = "tenant"  # requests with the same API key and the same `X-Tenant`


class ToolCallFormat(StrEnum):
    """Not in TGI: how the model writes calls of tools."""

    auto = "auto"  # as the chat template shows
    none = "none"
    command = "command"
    deepseek_v3 = "deepseek-v3"
    deepseek_v31 = "deepseek-v31"
    glm45 = "glm45"
    granite = "granite"
    harmony = "harmony"
    hermes = "hermes"
    kimi_k2 = "kimi-k2"
    lfm2 = "lfm2"
    llama3 = "llama3"
    llama4 = "llama4"
    minimax_m2 = "minimax-m2"
    mistral_args = "mistral-args"
    mistral_list = "mistral-list"
    nemotron_v2 = "nemotron-v2"
    olmo3 = "olmo3"
    phi4_mini = "phi4-mini"
    qwen3_coder = "qwen3-coder"
    seed_oss = "seed-oss"


class ReasoningStyle(StrEnum):
    """Not in TGI: how the model marks its reasoning."""

    auto = "auto"  # as the chat template shows
    none = "none"
    command = "command"
    gemma4 = "gemma4"
    granite = "granite"
    granite_tags = "granite-tags"
    harmony = "harmony"
    kimi = "kimi"
    mistral = "mistral"
    seed_oss = "seed-oss"
    think = "think"
