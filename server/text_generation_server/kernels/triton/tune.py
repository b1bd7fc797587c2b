"""Measures tile sizes of attention on this machine's GPU, for one shape of model, and prints the fastest.

`python -m text_generation_server.kernels.triton.tune --write` writes them to the GPU's file in tuned/, which belongs in
the repository. Run by hand, never by a server. All tiles are compiled first, in a process for each core; tiles that the
GPU cannot run, and those that spill registers in their loops, are not measured. What is measured is a CUDA graph,
because a launch from Python takes longer than the kernels of small steps.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments
from text_generation_server.kernels.triton.attend_decode import attend_decode_tiled
from text_generation_server.kernels.triton.attend_prefill import attend_prefill_tiled
from text_generation_server.kernels.triton.compiling import (
    CANDIDATES,
    TABLE_WIDTH,
    AttentionShape,
    Compiled,
    compile_in_parallel,
    fault,
    jobs,
)
from text_generation_server.kernels.triton.tuning import Tile, TunedRow, attention_dtype, gpu_of, read_rows

DECODES = ((1, 4000), (16, 2000), (64, 1000))  # (number of rows, length of each row in tokens)
PREFILLS = ((0, 4096), (3584, 4096), (0, 256))  # (first position, position after the last) of a chunk
# Bytes of keys and values that are read between two reads of the same key: a decode step finds no layer's keys in the
# GPU's caches.
COLD_BYTES = 256 << 20
REPEAT_MS = 5  # length of a graph, which is run ten times

Call = Callable[[Tile], object]


def queries(shape: AttentionShape, tokens: int, device: torch.device) -> Tensor:
    heads = shape.kv_heads * shape.group
    return torch.randn(tokens, heads, shape.head_size, device=device).to(shape.dtype)


def cached(shape: AttentionShape, slots: int, device: torch.device) -> KvLayer:
    heads = torch.randn(slots + 1, 2 * shape.kv_heads, shape.head_size, device=device)
    scaled = shape.cache.itemsize == 1
    scales = torch.rand(heads.shape[:2], device=device) + 0.1 if scaled else None
    return KvLayer((heads * 30 if scaled else heads).to(shape.cache), scales)


def decode(shape: AttentionShape, rows: int, length: int, device: torch.device, cold_bytes: int = COLD_BYTES) -> Call:
    """Attention of a decode step, once for each of as many layers as fill `cold_bytes`."""
    q = queries(shape, rows, device)
    layers = [cached(shape, rows * length, device)]
    while sum(layer.heads.nbytes for layer in layers) < cold_bytes:
        layers.append(cached(shape, rows * length, device))
    table = torch.zeros((rows, TABLE_WIDTH), dtype=torch.int32, device=device)
    table[:, :length] = torch.randperm(rows * length, device=device).to(torch.int32).view(rows, length)
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    lengths = torch.full_like(numbers, length)
    out, options = torch.empty_like(q), AttentionOptions(shape.head_size**-0.5)

    def call(tile: Tile) -> Tensor:
        for kv in layers:
            attend_decode_tiled(q, kv, table, numbers, lengths, options=options, out_THD=out, tile=tile)
        return out

    return call


def prefill(shape: AttentionShape, start: int, end: int, device: torch.device) -> Call:
    q, kv = queries(shape, end - start, device), cached(shape, end, device)
    table = torch.randperm(end, device=device).to(torch.int32).unsqueeze(0)
    row, offsets = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0], [0, end - start]))
    segments = Segments(row, torch.full_like(row, start), offsets, end - start)
    out, options = torch.empty_like(q), AttentionOptions(shape.head_size**-0.5)

    def call(tile: Tile) -> Tensor:
        attend_prefill_tiled(q, kv, table, segments, options, out_THD=out, tile=tile)
        return out

    return call


def milliseconds(call: Call, tile: Tile) -> float:
    try:
        return float(do_bench_cudagraph(lambda: call(tile), rep=REPEAT_MS, return_mode="median"))
    except OutOfResources:
        return math.inf


def best_tile(calls: Iterable[Call], tiles: list[Tile], measure: Callable[[Call, Tile], float] = milliseconds) -> Tile:
    """The tile size whose times have the least product, so that all workloads have equal weight."""
    scores = dict.fromkeys(tiles, 0.0)
    for call in calls:
        for tile in tiles:
            scores[tile] += math.log(measure(call, tile))
    return min(scores, key=scores.__getitem__)


def usable_tiles(compiled: Iterable[Compiled]) -> dict[str, list[Tile]]:
    tiles: dict[str, list[Tile]] = {kernel: [] for kernel in CANDIDATES}
    for one in compiled:
        if fault(one) is None:
            tiles[one.kernel].append(one.tile)
    return tiles


def tune(shape: AttentionShape, device: torch.device, processes: int) -> list[TunedRow]:
    tiles = usable_tiles(compile_in_parallel(jobs(shape), processes))
    loads = {
        "attend_decode": (decode(shape, *load, device) for load in DECODES),
        "attend_prefill": (prefill(shape, *load, device) for load in PREFILLS),
    }
    name = str(attention_dtype(shape.dtype, shape.cache)).removeprefix("torch.")
    return [
        TunedRow(kernel, shape.group, shape.head_size, name, best_tile(calls, tiles[kernel]))
        for kernel, calls in loads.items()
    ]


def table_text(rows: Iterable[TunedRow]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows) + "\n]\n"


def add_rows(path: Path, rows: list[TunedRow]) -> list[TunedRow]:
    """Writes these rows into a table, in the place of its rows for the same shapes. Returns the whole table."""
    keys = {row.key for row in rows}
    rows = [*(row for row in read_rows(path) if row.key not in keys), *rows]
    path.write_text(table_text(rows))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", type=int, default=4, help="query heads per key head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads of a shard")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("int8", "float8_e4m3fn"), help="default: --dtype")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="that compile")
    parser.add_argument("--write", action="store_true", help="write the rows into the file of this GPU")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune: this machine has no GPU: run tune on the GPU whose tiles are wanted")
    device = torch.device("cuda")
    gpu = gpu_of(device)
    dtype, cache = (getattr(torch, name) for name in (arguments.dtype, arguments.kv_cache_dtype or arguments.dtype))
    shape = AttentionShape(
        capability=gpu.capability,
        dtype=dtype,
        cache=cache,
        group=arguments.group,
        head_size=arguments.head_size,
        kv_heads=arguments.kv_heads,
    )
    rows = tune(shape, device, arguments.processes)
    if arguments.write:
        rows = add_rows(gpu.table, rows)
    print(table_text(rows), end="")


if __name__ == "__main__":
    main()
