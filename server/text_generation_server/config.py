"""All settings of a shard process, in one value. Built once, by `cli.py`."""

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
    epoch: int  # epoch of the shard group: each start of the group is a new epoch
    dtype: str | None  # one of DTYPES; None: the checkpoint's type
    max_total_tokens: int | None  # None: the model's limit
    rope_scaling: str | None  # "linear" or "dynamic"; None: as config.json says
    rope_factor: float | None
    watermark_gamma: float
    watermark_delta: float
    graph_sizes: tuple[int, ...] | None = None  # numbers of rows of recorded decode steps; None: the default numbers
    memory_fraction: float = 1.0  # share of a GPU's memory that the shard may use
    load_format: str = "auto"  # one of LOAD_FORMATS; dummy: random weights, no weights file is read
    quantize: str | None = None  # one of QUANTIZATIONS
    kv_cache_dtype: str | None = None  # one of KV_CACHE_DTYPES; None: the type the model computes in
    step_log: Path | None = None  # file to which rank 0 appends a line for each forward step
