"""Measures tile sizes of attention on this machine's GPU, for one shape of model, and prints the fastest.

`python -m text_generation_server.kernels.triton.tune --write` writes them to the GPU's file in tuned/, which belongs in
the repository. Run by hand, never by a server.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from text_generation_server.kernels.interface import KvLayer, Segments
from text_generation_server.kernels.triton.attend_decode import attend_decode_tiled
from text_generation_server.kernels.triton.attend_prefill import attend_prefill_tiled
from text_generation_server.kernels.triton.tuning import Tile, TunedRow, file_for, read_rows

KV_HEADS = 8
MAX_TOKENS = 8192
DECODES = ((1, 4000), (16, 2000), (64, 1000))  # (number of rows, length of each row in tokens)
PREFILLS = ((0, 4096), (3584, 4096), (0, 256))  # (first position, position after the last) of a chunk
DECODE_TILES = [
    Tile(warps=warps, stages=stages, columns=columns, split=split)
    for warps, stages, columns, split in product((2, 4, 8), (3, 5), (32, 64, 128), (128, 256, 512))
]
PREFILL_TILES = [
    Tile(warps=warps, stages=stages, rows=rows, columns=columns)
    for warps, stages, rows, columns in product((4, 8), (2, 3, 5), (64, 128), (32, 64, 128))
]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    group: int
    head_size: int
    dtype: torch.dtype
    cache: torch.dtype

    def queries(self, tokens: int) -> Tensor:
        heads = KV_HEADS * self.group
        return torch.randn(tokens, heads, self.head_size, device="cuda").to(self.dtype)

    def kv(self, slots: int) -> KvLayer:
        heads = torch.randn(slots + 1, 2 * KV_HEADS, self.head_size, device="cuda").to(self.cache)
        scaled = self.cache.itemsize == 1
        return KvLayer(heads, torch.rand(slots + 1, 2 * KV_HEADS, device="cuda") if scaled else None)


def decode(shape: AttentionShape, rows: int, length: int) -> Callable[[Tile], None]:
    q, kv = shape.queries(rows), shape.kv(rows * length)
    slots = torch.randperm(rows * length, device="cuda").to(torch.int32).view(rows, length)
    table = torch.zeros((rows, MAX_TOKENS), dtype=torch.int32, device="cuda")
    table[:, :length] = slots
    numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
    lengths = torch.full_like(numbers, length)
    out, scale = torch.empty_like(q), shape.head_size**-0.5
    return lambda tile: attend_decode_tiled(q, kv, table, numbers, lengths, scale, out, tile)


def prefill(shape: AttentionShape, start: int, end: int) -> Callable[[Tile], None]:
    q, kv = shape.queries(end - start), shape.kv(end)
    table = torch.randperm(end, device="cuda").to(torch.int32).unsqueeze(0)
    row, offsets = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([0], [0, end - start]))
    segments = Segments(row, torch.full_like(row, start), offsets, end - start)
    out, scale = torch.empty_like(q), shape.head_size**-0.5
    return lambda tile: attend_prefill_tiled(q, kv, table, segments, scale, out, tile)


def best_tile(calls: Iterable[Callable[[Tile], None]], tiles: list[Tile]) -> Tile:
    """The tile size whose times have the least product, so that all workloads have equal weight."""
    scores = dict.fromkeys(tiles, 0.0)
    for call in calls:
        for tile in tiles:
            scores[tile] += math.log(milliseconds(call, tile))
    return min(scores, key=scores.__getitem__)


def milliseconds(call: Callable[[Tile], None], tile: Tile) -> float:
    try:
        return float(do_bench(lambda: call(tile), return_mode="median"))
    except OutOfResources:
        return math.inf


def tune(shape: AttentionShape) -> list[TunedRow]:
    name = str(shape.cache).removeprefix("torch.")
    kernels = (
        ("attend_decode", [decode(shape, *load) for load in DECODES], DECODE_TILES),
        ("attend_prefill", [prefill(shape, *load) for load in PREFILLS], PREFILL_TILES),
    )
    return [
        TunedRow(kernel, shape.group, shape.head_size, name, best_tile(calls, tiles))
        for kernel, calls, tiles in kernels
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", type=int, default=4, help="query heads per key head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("int8", "float8_e4m3fn"), help="default: --dtype")
    parser.add_argument("--write", action="store_true", help="write the rows into the file of this GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune: this machine has no GPU: run tune on the GPU whose tiles are wanted")
    dtype, cache = (getattr(torch, name) for name in (arguments.dtype, arguments.kv_cache_dtype or arguments.dtype))
    rows = tune(AttentionShape(arguments.group, arguments.head_size, dtype, cache))
    path = file_for(torch.device("cuda"))
    if arguments.write:
        keys = {row.key for row in rows}
        rows = [*(row for row in read_rows(path) if row.key not in keys), *rows]
    text = "[\n" + ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows) + "\n]\n"
    if arguments.write:
        path.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
