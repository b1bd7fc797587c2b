"""The tiles of attention that `tune` measures, and which of them a GPU can run well: what compiling them shows."""

from itertools import product

from text_generation_server.kernels.triton.compiling import SHARED_MEMORY, AttentionShape, Compiled
from text_generation_server.kernels.triton.tuning import Gpu, Tile, attention_dtype, find_tile_for

# Loads of keys wait for the load of their slots, and half of the stages go to the slots: 3 stages keep one tile of keys
# in flight, 5 two and 7 three. With 2 stages the slots' loads are not in flight at all.
DECODE_TILES = [
    Tile(warps=warps, stages=stages, columns=columns, split=split)
    for warps, stages, columns, split in product((2, 4, 8), (3, 5), (32, 64, 128), (128, 256, 512))
]
PREFILL_TILES = [
    Tile(warps=warps, stages=stages, rows=rows, columns=columns)
    for warps, stages, rows, columns in product((4, 8), (3, 5, 7), (64, 128), (32, 64, 128))
]
CANDIDATES = {"attend_decode": DECODE_TILES, "attend_prefill": PREFILL_TILES}


def jobs(shape: AttentionShape) -> list[tuple[str, AttentionShape, Tile]]:
    return [(kernel, shape, tile) for kernel, tiles in CANDIDATES.items() for tile in tiles]


def table_jobs(shape: AttentionShape) -> list[tuple[str, AttentionShape, Tile]]:
    """The tiles that GPUs of the shape's capability use where `tune` has not run."""
    gpu, dtype = Gpu("", shape.capability), attention_dtype(shape.dtype, shape.cache)
    return [(kernel, shape, find_tile_for(kernel, shape.group, shape.head_size, dtype, gpu)) for kernel in CANDIDATES]


def fault(compiled: Compiled) -> str | None:
    """Why the GPU cannot run the kernel, or would run it several times slower than needed."""
    if compiled.error:
        return compiled.error
    limit = SHARED_MEMORY[compiled.shape.capability]
    if compiled.shared > limit:
        return f"{compiled.shared} bytes of shared memory, of {limit}"
    if spills := compiled.code.spills_in_loops:
        return f"{spills} accesses to spilled registers in loops"
    return None
