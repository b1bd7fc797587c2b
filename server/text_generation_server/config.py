"""All that a shard process is told, in one value. Built once, by `cli.py`."""

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8",)
KV_CACHE_DTYPES = ("fp8_e4m3fn", "int8")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True)
class ShardConfig:
    model_path: Path  # a local directory with config.json and safetensors files, checked
    uds_path: str  # the shard listens on unix://<uds_path>-<rank>
    rank: int
    world_size: int
    generation: int  # of the shard group: each start of the group is a new one
    dtype: str | None  # one of DTYPES; None: the checkpoint's own
    max_total_tokens: int | None  # None: the model's own limit
    rope_scaling: str | None  # "linear" or "dynamic"; None: as config.json says
    rope_factor: float | None
    watermark_gamma: float
    watermark_delta: float
    graph_sizes: tuple[int, ...] | None = None  # rows of the decode steps that a GPU records; None: the default ones
    memory_fraction: float = 1.0  # of a GPU, that the shard may use at most
    load_format: str = "auto"  # one of LOAD_FORMATS; dummy: random weights, of which no file is read
    quantize: str | None = None  # one of QUANTIZATIONS
    kv_cache_dtype: str | None = None  # one of KV_CACHE_DTYPES; None: the type the model computes in
    step_log: Path | None = None  # rank 0 appends a line to it for each forward step
