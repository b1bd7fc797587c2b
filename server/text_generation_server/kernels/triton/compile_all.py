"""`make compile-gpu`: compiles attention for GPUs that need not be there, with every tile that `tune` may choose.

For each capability, types and head size, it prints what the tables' tiles need, and how many of the tuner's tiles a GPU
can run without spilling registers in a loop. Fails where a table's tile cannot be run so, or none of the tuner's tiles.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from text_generation_server.kernels.triton.candidates import CANDIDATES, fault, jobs, table_jobs
from text_generation_server.kernels.triton.compiling import AttentionShape, Compiled, compile_in_parallel
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
            yield AttentionShape(capability, DTYPES[dtype], numbers, arguments.group, size)


def shape_jobs(shape: AttentionShape) -> list[tuple[str, AttentionShape, Tile]]:
    """Without the tuner's tiles that differ in the length of their splits only, which changes neither registers nor
    shared memory. `tune` measures no float32."""
    table = table_jobs(shape)
    tuned = [] if shape.dtype == torch.float32 else jobs(shape)
    distinct = [(kernel, shape, replace(tile, split=256 if tile.split else 0)) for kernel, _, tile in tuned]
    return list(dict.fromkeys([*table, *distinct]))


def report(shape: AttentionShape, compiled: list[Compiled]) -> Iterator[str]:
    """Prints two lines for a shape. Yields what is wrong."""
    for kernel, _, tile in table_jobs(shape):
        mine = [one for one in compiled if one.kernel == kernel]
        table, tuned = mine[0], [one for one in mine if shape.dtype != torch.float32]
        usable = sum(fault(one) is None for one in tuned)
        name = " ".join(str(dtype).removeprefix("torch.") for dtype in (shape.dtype, shape.cache))
        where = f"sm_{shape.capability} {name} head size {shape.head_size}: {kernel}"
        print(
            f"{where} {tile.warps} warps, {tile.stages} stages, {tile.rows} × {tile.columns}: {table.shared} bytes, "
            f"{table.code.registers} registers, {table.code.spills} spills, instructions {table.code.tiles}; of "
            f"{len(tuned)} tiles {usable} are usable",
            flush=True,
        )
        if why := fault(table):
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
