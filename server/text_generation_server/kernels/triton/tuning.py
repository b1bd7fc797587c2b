"""Looks up a kernel's tile sizes in the tables of tuned/. Nothing is measured at start.

Three tables are read in turn: the one that `tune` made on this kind of GPU, the one for the GPU's compute capability
(sm_90.json for 9.0), whose tiles use what such GPUs have more of than others, and default.json, whose tiles fit every
GPU. A table is a list of rows; the first row that matches counts, and "*" matches everything. For attention, `dtype` is
the cache's type, or says that the queries are float32, which needs smaller tiles.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from text_generation_server.kernels.interface import KvLayer

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class Tile:
    """Numbers of rows and columns that a program handles at a time."""

    warps: int
    stages: int = 1  # number of buffers of the software pipeline: loads in flight
    rows: int = 1  # attend_prefill: queries (positions times heads of a group); rope_and_store_kv: heads
    columns: int = 1  # attention: keys; embed and silu_mul: columns
    split: int = 0  # attend_decode: keys of a split


@dataclass(frozen=True, slots=True)
class TunedRow:
    kernel: str
    group: int | str
    head_size: int | str
    dtype: str
    tile: Tile

    def matches(self, kernel: str, group: int, head_size: int, dtype: str) -> bool:
        wanted = (kernel, group, head_size, dtype)
        return all(mine in ("*", theirs) for mine, theirs in zip(self.key, wanted, strict=True))

    @property
    def key(self) -> tuple[str, int | str, int | str, str]:
        return self.kernel, self.group, self.head_size, self.dtype


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: int  # 90 for 9.0

    @property
    def table(self) -> Path:
        """The table that `tune` makes on this kind of GPU."""
        return FOLDER / f"{self.name.lower().replace(' ', '-')}.json"

    @property
    def tables(self) -> tuple[Path, ...]:
        return self.table, FOLDER / f"sm_{self.capability}.json", FOLDER / "default.json"


# Stands for every device that is not a GPU.
NO_GPU = Gpu("cpu", 0)


@cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return NO_GPU
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(torch.cuda.get_device_name(device), 10 * major + minor)


def find_tile(kernel: str, group: int, head_size: int, dtype: torch.dtype | str, device: torch.device) -> Tile:
    return find_tile_for(kernel, group, head_size, dtype, gpu_of(device))


@cache
def find_tile_for(kernel: str, group: int, head_size: int, dtype: torch.dtype | str, gpu: Gpu) -> Tile:
    name = str(dtype).removeprefix("torch.")
    for row in (row for table in gpu.tables for row in read_rows(table)):
        if row.matches(kernel, group, head_size, name):
            return row.tile
    raise LookupError(f"tuned/default.json has no row for {kernel}, group {group}, head size {head_size}, {name}")


def find_attention_tile(kernel: str, q_THD: Tensor, kv: KvLayer) -> Tile:
    _, heads, size = q_THD.shape
    dtype = attention_dtype(q_THD.dtype, kv.heads.dtype)
    return find_tile(kernel, heads // kv.kv_heads, size, dtype, q_THD.device)


def attention_dtype(queries: torch.dtype, cached: torch.dtype) -> torch.dtype | str:
    """The type under which the tables list attention's tiles."""
    if queries != torch.float32:
        return cached
    return "float32 over 8 bits" if cached.itemsize == 1 else queries


def read_rows(path: Path) -> list[TunedRow]:
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    return [TunedRow(**{**row, "tile": Tile(**row["tile"])}) for row in rows]
