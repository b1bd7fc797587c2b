"""Finds the fastest tiles of attention on this GPU, and what they gain over the tiles that were in use.

The GPU's table is written into the checkout, where the stages that follow find it, and into the results' folder.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from gpu_check.findings import Case, Context, Measured
from text_generation_server.kernels.triton import tune
from text_generation_server.kernels.triton.compiling import AttentionShape, compile_in_parallel, jobs
from text_generation_server.kernels.triton.tuning import Gpu, Tile, TunedRow, attention_dtype, find_tile_for, gpu_of

TABLE = "Tiles of attention: before and after"
CACHES = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)
GROUP, HEAD_SIZE, KV_HEADS = 4, 128, 8  # the shape of attention in a Llama of 8 billion parameters


@dataclass(frozen=True, slots=True)
class Tuning:
    gpu: Gpu
    device: torch.device
    table: Path
    loads: Mapping[str, tuple[tuple[int, int], ...]]  # by kernel: (rows, length) of decodes, (start, end) of prefills
    usable: Callable[[AttentionShape], dict[str, list[Tile]]]  # tiles to measure, by kernel
    milliseconds: Callable[[tune.Call, Tile], float]
    cold_bytes: int = tune.COLD_BYTES


def tune_all(context: Context) -> Iterator[Case]:
    if not context.on_gpu:
        yield Case(TABLE, {"cache": "float16, two tiles"}, partial(rehearse, context))
        return
    gpu = gpu_of(context.device)
    loads = {"attend_decode": tune.DECODES, "attend_prefill": tune.PREFILLS}
    tuning = Tuning(
        gpu=gpu, device=context.device, table=gpu.table, loads=loads, usable=compiled, milliseconds=tune.milliseconds
    )
    for cache in CACHES:
        shape = AttentionShape(
            capability=gpu.capability,
            dtype=torch.bfloat16,
            cache=cache,
            group=GROUP,
            head_size=HEAD_SIZE,
            kv_heads=KV_HEADS,
        )
        cells = {"cache": str(cache).removeprefix("torch.")}
        yield Case(TABLE, cells, partial(tune_shape, tuning, shape, context))


def compiled(shape: AttentionShape) -> dict[str, list[Tile]]:
    """By all cores: in one thread, compiling would take minutes."""
    return tune.usable_tiles(compile_in_parallel(jobs(shape), len(os.sched_getaffinity(0))))


def tune_shape(tuning: Tuning, shape: AttentionShape, context: Context) -> Iterable[Measured]:
    """One line for each kernel and load. The rows of both kernels are written together."""
    dtype = attention_dtype(shape.dtype, shape.cache)
    tiles, rows = tuning.usable(shape), []
    make: dict[str, Callable[..., tune.Call]] = {
        "attend_decode": partial(tune.decode, cold_bytes=tuning.cold_bytes),
        "attend_prefill": tune.prefill,
    }
    for kernel, loads in tuning.loads.items():
        calls = [make[kernel](shape, *load, tuning.device) for load in loads]
        before = find_tile_for(kernel, shape.group, shape.head_size, dtype, tuning.gpu)
        best = tune.best_tile(calls, tiles[kernel], tuning.milliseconds)
        rows.append(TunedRow(kernel, shape.group, shape.head_size, str(dtype).removeprefix("torch."), best))
        for load, call in zip(loads, calls, strict=True):
            old, new = tuning.milliseconds(call, before), tuning.milliseconds(call, best)
            cells = {
                "kernel": kernel,
                "load": f"{load[0]}, {load[1]}",
                "before": said(before),
                "before ms": f"{old:.4f}",
            }
            yield Measured(cells | {"after": said(best), "after ms": f"{new:.4f}", "gain": f"{old / new:.3f} ×"})
    tune.add_rows(tuning.table, rows)
    if context.request.known.out:
        shutil.copy(tuning.table, context.request.known.out)


def said(tile: Tile) -> str:
    parts = {
        "warps": tile.warps,
        "stages": tile.stages,
        "rows": tile.rows,
        "columns": tile.columns,
        "split": tile.split,
    }
    return ", ".join(f"{name} {number}" for name, number in parts.items() if number)


def rehearse(context: Context) -> Iterable[Measured]:
    """The same with two tiles in the interpreter, and a table that is thrown away."""
    shape = AttentionShape(capability=90, dtype=torch.float16, cache=torch.float16, group=2, head_size=16, kv_heads=1)
    dtype = attention_dtype(shape.dtype, shape.cache)
    gpu = Gpu("rehearsed", 90)

    def two(shape: AttentionShape) -> dict[str, list[Tile]]:
        first = {kernel: find_tile_for(kernel, 2, 16, dtype, gpu) for kernel in ("attend_decode", "attend_prefill")}
        return {kernel: [tile, replace(tile, columns=tile.columns // 2)] for kernel, tile in first.items()}

    def milliseconds(call: tune.Call, tile: Tile) -> float:
        started_s = time.perf_counter()
        call(tile)
        return 1e3 * (time.perf_counter() - started_s)

    loads = {"attend_decode": ((1, 70),), "attend_prefill": ((0, 40),)}
    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as folder:
        tuning = Tuning(
            gpu=gpu,
            device=context.device,
            table=Path(folder) / "rehearsed.json",
            loads=loads,
            usable=two,
            milliseconds=milliseconds,
            cold_bytes=1,
        )
        yield from tune_shape(tuning, shape, context)
