"""Looks up a kernel's tile sizes in the tables of tuned/, one per kind of GPU, made by `tune`. Nothing is measured at
start.

A table is a list of rows; the first row that matches counts, and "*" matches everything. If no row of a GPU's table
matches, default.json is used. For attention, `dtype` is the cache's type, or float32 if the queries are float32, which
needs smaller tiles.
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


@cache
def find_tile(kernel: str, group: int, head_size: int, dtype: torch.dtype, device: torch.device) -> Tile:
    name = str(dtype).removeprefix("torch.")
    for row in (*read_rows(file_for(device)), *read_rows(FOLDER / "default.json")):
        if row.matches(kernel, group, head_size, name):
            return row.tile
    raise LookupError(f"tuned/default.json has no row for {kernel}, group {group}, head size {head_size}, {name}")


def find_attention_tile(kernel: str, q_THD: Tensor, kv: KvLayer) -> Tile:
    _, heads, size = q_THD.shape
    dtype = torch.float32 if q_THD.dtype == torch.float32 else kv.heads.dtype
    return find_tile(kernel, heads // kv.kv_heads, size, dtype, q_THD.device)


def file_for(device: torch.device) -> Path:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return FOLDER / f"{name.lower().replace(' ', '-')}.json"


def read_rows(path: Path) -> list[TunedRow]:
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    return [TunedRow(**{**row, "tile": Tile(**row["tile"])}) for row in rows]
