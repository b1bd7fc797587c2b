"""Flags that choose the model, say where its files are, and say how shards compute it."""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass
from typing import ClassVar

from text_generation_common.flags.declaration import flag
from text_generation_common.flags.kinds import (
    ActivationType,
    CpuTarget,
    Dtype,
    HeadDtype,
    KvCacheDtype,
    LoadFormat,
    Quantize,
    ReasoningStyle,
    RopeScalingKind,
    ToolCallFormat,
    Topic,
)

DEMO_MODEL = "demo"
MAX_RANK = 512  # maximum of --max-lora-rank
MAX_SLOTS = 128  # maximum of --max-loras
MAX_ADAPTERS = 1000  # maximum number of adapters that a server lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    TOPIC: ClassVar = Topic.MODEL
    model_id: str = flag(
        DEMO_MODEL,
        "Hub id or local directory; `demo` is the small model that ships with the package.",
        not_empty=True,
    )
    # This flag is vLLM's; TGI has none like it.
    load_format: LoadFormat = flag(
        LoadFormat.auto, "auto: read the weights from files. dummy: random weights of the right shapes, for measuring."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFlags:
    TOPIC: ClassVar = Topic.MODEL
    # This flag is vLLM's and SGLang's; TGI has none like it.
    served_model_name: str | None = flag(
        None, "Name of the model for clients of /v1; the hub id or the folder's name when not given."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFlags:
    TOPIC: ClassVar = Topic.MODEL
    revision: str | None = flag(None, "Branch, tag or commit of a hub model.")
    tokenizer_config_path: str | None = flag(None, "A tokenizer_config.json whose chat template replaces the model's.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlags:
    """Flags that say where model files are on this machine. Every process reads them from the environment."""

    TOPIC: ClassVar = Topic.MODEL
    huggingface_hub_cache: str | None = flag(None, "Folder of the Hugging Face hub's cache.")
    weights_cache_override: str | None = flag(None, "Folder that holds the model's files; nothing is downloaded.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFlags:
    TOPIC: ClassVar = Topic.COMPUTING
    dtype: Dtype | None = flag(
        None, "Type to compute in: float32, bfloat16 or float16; the checkpoint's type when not given."
    )
    quantize: Quantize | None = flag(
        None,
        "int8, eetq, bitsandbytes: weights in 8 bits; int4: in 4 bits, without calibration; fp8: on GPUs. A quantized"
        " checkpoint needs no flag; other values name its format. exl2 and marlin are not supported.",
        supported=tuple(value for value in Quantize if value not in (Quantize.exl2, Quantize.marlin)),
    )
    # TGI has no such flag.
    head_dtype: HeadDtype | None = flag(
        None, "Type of a copy of the head's weight, which makes the logits; the form in the files when not given."
    )
    # TGI has no such flag.
    activations: ActivationType = flag(
        ActivationType.model,
        "int8: on CPUs, multiply quantized weights of integers by activations in 8 bits. model: in the model's type.",
    )
    kv_cache_dtype: KvCacheDtype | None = flag(
        None,
        "Keys and values in 8 bits: fp8_e4m3fn or int8; the model's type when not given. fp8_e5m2 is not supported.",
        supported=(KvCacheDtype.fp8_e4m3fn, KvCacheDtype.int8),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFlags:
    """Flags that shards read from their environment, as TGI's shards do."""

    TOPIC: ClassVar = Topic.COMPUTING
    rope_scaling: RopeScalingKind | None = flag(None, "Stretch rotary positions beyond the trained context.")
    rope_factor: float | None = flag(None, "Factor by which positions are stretched; 1.0 with --rope-scaling alone.")
    watermark_gamma: float | None = flag(
        None, "Share of the vocabulary on the watermark's green list; 0.5 when not given."
    )
    watermark_delta: float | None = flag(None, "Added to the logits of the watermark's green list; 2.0 when not given.")
    cuda_graphs: str | None = flag(
        None, "Decode batch sizes to record as CUDA graphs, such as 1,2,4; 0 for none; sizes up to 256 when not given."
    )
    cuda_memory_fraction: float = flag(
        1.0, "Share of a GPU's memory that a shard may use.", min=0, max=1, positive=True
    )
    # TGI has none like it.
    cpu_target: CpuTarget | None = flag(
        None,
        "Kernels of a CPU: amx, avx512_bf16, avx512, avx2 or portable; the best that it can run when not given.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFlags:
    """LoRA adapters of the model. A shard reads them from its environment."""

    TOPIC: ClassVar = Topic.MODEL
    lora_adapters: str | None = flag(
        None, "LoRA adapters, as id, id=folder or id=repository@revision, with commas between them."
    )
    # TGI has none like it.
    lora_dirs: str | None = flag(
        None,
        "Folders, with commas between them, from which adapters may be loaded while the server runs; needs"
        " --admin-api-key, and memory for --max-loras adapters of --max-lora-rank.",
        not_empty=True,
    )
    # These flags are vLLM's; TGI has none like them.
    max_loras: int = flag(64, "Maximum number of LoRA adapters in one step; others wait.", min=1, max=MAX_SLOTS)
    max_cpu_loras: int = flag(
        64,
        "LoRA adapters that are kept in the host's memory when more are listed than --max-loras.",
        min=1,
        max=MAX_ADAPTERS,
    )
    max_lora_rank: int = flag(256, "Maximum rank of a LoRA adapter.", min=1, max=MAX_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFlags:
    """How the model writes what is not plain text. TGI has none like them."""

    TOPIC: ClassVar = Topic.FORMATS
    tool_call_format: ToolCallFormat = flag(
        ToolCallFormat.auto,
        "How the model writes calls of tools; auto: as its chat template shows. none: a grammar makes the calls.",
    )
    reasoning_format: ReasoningStyle = flag(
        ReasoningStyle.auto,
        "How the model marks its reasoning; auto: as its chat template shows. none: reasoning is part of the answer.",
    )
