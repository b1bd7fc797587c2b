"""`make compile-gpu`: compiles attention for GPUs that need not be there, with every tile that `tune` may choose.

For each capability, types, head size, and options that served models use together, it prints what the tables' tiles
need. Without options, it also prints how many of the tuner's tiles a GPU can run without spilling registers in a loop.
Fails where a table's tile cannot be run so, or none of the tuner's tiles.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from text_generation_server.kernels.triton.compiling import (
    CANDIDATES,
    SERVED_OPTIONS,
    AttentionShape,
    Compiled,
    compile_in_parallel,
    fault,
    jobs,
    table_jobs,
)
from text_generation_server.kernels.triton.tuning import Tile

CAPABILITIES = (80, 90, 100)
HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CACHES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
FIRST_WITH_FP8 = 89


def shapes(arguments: argparse.Namespace) -> Iterator[AttentionShape]:
    for capability, dtype, size in product(arguments.capability, arguments.dtype, arguments.head_size):
        for cache in arguments.cache:
            if cache == "float8_e4m3fn" and capability < FIRST_WITH_FP8:
                continue
            numbers = CACHES.get(cache, DTYPES[dtype])
            plain = AttentionShape(capability, DTYPES[dtype], numbers, arguments.group, size)
            yield from (replace(plain, options=options) for options in ([()] if arguments.plain else SERVED_OPTIONS))


def is_tuned(shape: AttentionShape) -> bool:
    """Whether `tune` measures tiles for this shape. Layers with options use the same tiles."""
    return shape.dtype != torch.float32 and not shape.options


def may_spill(shape: AttentionShape) -> bool:
    """Products of float32 take their operands from registers: 8-bit keys of size 256 are too many for every tile."""
    return shape.dtype == torch.float32 and shape.cache.itemsize == 1 and shape.head_size == 256


def shape_jobs(shape: AttentionShape) -> list[tuple[str, AttentionShape, Tile]]:
    """Without the tuner's tiles that differ in the length of their splits only, which changes neither registers nor
    shared memory."""
    table = table_jobs(shape)
    tuned = jobs(shape) if is_tuned(shape) else []
    distinct = [(kernel, shape, replace(tile, split=256 if tile.split else 0)) for kernel, _, tile in tuned]
    return list(dict.fromkeys([*table, *distinct]))


def report(shape: AttentionShape, compiled: list[Compiled]) -> Iterator[str]:
    """Prints two lines for a shape. Yields what is wrong."""
    for kernel, _, tile in table_jobs(shape):
        mine = [one for one in compiled if one.kernel == kernel]
        table, tuned = mine[0], [one for one in mine if is_tuned(shape)]
        usable = sum(fault(one) is None for one in tuned)
        name = " ".join(str(dtype).removeprefix("torch.") for dtype in (shape.dtype, shape.cache))
        options = " ".join(option.removesuffix("_H") for option in shape.options) or "plain"
        where = f"sm_{shape.capability} {name} head size {shape.head_size} {options}: {kernel}"
        said = f"; of {len(tuned)} tiles {usable} are usable" if tuned else ""
        print(
            f"{where} {tile.warps} warps, {tile.stages} stages, {tile.rows} × {tile.columns}: {table.shared} bytes, "
            f"{table.code.registers} registers, {table.code.spills} spills, {table.code.spills_in_loops} of them in "
            f"loops, instructions {table.code.tiles}{said}",
            flush=True,
        )
        if (why := fault(table)) and not may_spill(shape):
            yield f"{where}: the table's tile: {why}"
        if tuned and not usable:
            yield f"{where}: no tile is left to tune"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cache", nargs="+", choices=("same", *CACHES), default=["same", *CACHES])
    parser.add_argument("--head-size", type=int, nargs="+", default=HEAD_SIZES)
    parser.add_argument("--group", type=int, default=4, help="query heads per key head")
    parser.add_argument("--plain", action="store_true", help="without windows, soft caps, slopes and sinks")
    parser.add_argument("--tables", action="store_true", help="the tables' tiles only")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    wanted = [(shape, table_jobs(shape) if arguments.tables else shape_jobs(shape)) for shape in shapes(arguments)]
    results = compile_in_parallel((job for _, some in wanted for job in some), arguments.processes)
    wrong = [fault for shape, some in wanted for fault in report(shape, [next(results) for _ in some])]
    print(f"compiled {sum(len(some) for _, some in wanted)} kernels of {len(CANDIDATES)} kinds")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
