"""Attention of prompt chunks after their cached prefix, all chunks of a step in one launch.

All keys, also those of this step, are already in their slots, so prefix and new tokens are read in the same way. A
first loop, without a mask, covers the tiles of keys that all queries of a program attend to in full. A second loop
covers the few tiles on the diagonal, or, where there is a window, all tiles from the first query's window on. Tiles of
keys begin at multiples of their size from position 0, so that a query's result does not depend on where its chunk
begins.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments
from text_generation_server.kernels.triton.tiles import (
    LOG2E,
    attend_tile,
    first_seen,
    kernel_arguments,
    prepare_queries,
)
from text_generation_server.kernels.triton.tuning import Tile, find_attention_tile

MIN_QUERIES = 16  # least number of rows of a tl.dot


def attend_prefill(
    q_THD: Tensor, kv: KvLayer, table: Tensor, segments: Segments, options: AttentionOptions, out_THD: Tensor
) -> None:
    """Writes the results of the segments' tokens, and of no other token."""
    tile = find_attention_tile("attend_prefill", q_THD, kv)
    attend_prefill_tiled(q_THD, kv, table, segments, options, out_THD=out_THD, tile=tile)


def attend_prefill_tiled(
    q_THD: Tensor,
    kv: KvLayer,
    table: Tensor,
    segments: Segments,
    options: AttentionOptions,
    out_THD: Tensor,
    tile: Tile,
) -> None:
    _, heads, size = q_THD.shape
    kv_heads = kv.kv_heads
    assert options.scale > 0 and heads % kv_heads == 0
    assert q_THD.is_contiguous() and kv.heads.is_contiguous() and table.is_contiguous() and out_THD.is_contiguous()
    group = heads // kv_heads
    rows = max(MIN_QUERIES, triton.next_power_of_2(group), tile.rows)
    runs = len(segments.rows_C)
    # Run c has the blocks from (its first token, counted from the first run's) // Q + c on, some of which may be empty:
    # the host need not know the runs' lengths.
    blocks = segments.tokens // (rows // group) + runs
    _attend_runs[(kv_heads, blocks)](
        q_THD, kv.heads, kv.scales, table, segments.rows_C, starts=segments.starts_C, offsets=segments.offsets,
        out=out_THD, width=table.shape[1], runs=runs, KV_HEADS=kv_heads, GROUP=group, HEAD_SIZE=size, M=rows,
        N=tile.columns, D=max(MIN_QUERIES, triton.next_power_of_2(size)), SCALED=kv.scales is not None,
        num_warps=tile.warps, num_stages=tile.stages, **kernel_arguments(options),
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "runs"], do_not_specialize_on_alignment=["rows", "starts", "offsets"])
def _attend_runs(
    q, heads, scales, table, rows, starts, offsets, out, scale, cap, slopes, sinks, width, runs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    SUNK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A program: M // GROUP consecutive positions of one run, for the query heads of one key head."""
    Q: tl.constexpr = M // GROUP
    kv_head = tl.program_id(0)
    # The last block of a step begins first, because it takes longest: long chunks come last in a step, and their last
    # block attends to the most keys.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    run = _find_run(offsets, runs, block, Q)
    first_token = tl.load(offsets + run)
    tokens = tl.load(offsets + run + 1) - first_token
    skipped = (block - (first_token - tl.load(offsets)) // Q - run) * Q
    if skipped >= tokens:
        return
    start = tl.load(starts + run)
    first = start + skipped
    last = tl.minimum(first + Q, start + tokens)
    head = (first_token + skipped).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP
    heads += kv_head * HEAD_SIZE
    if SCALED:
        scales += kv_head
    table += tl.load(rows + run).to(tl.int64) * width

    m = tl.arange(0, M)
    d = tl.arange(0, D)
    position_M = first + m // GROUP
    head_M = head + (m // GROUP) * (KV_HEADS * GROUP) + m % GROUP
    inside_MD = (position_M < last)[:, None] & (d < HEAD_SIZE)[None, :]
    at_MD = head_M[:, None] * HEAD_SIZE + d[None, :]
    if WINDOW > 0:  # the window of a position behind the run may hold no key of the run
        position_M = tl.minimum(position_M, last - 1)
    q_MD, scale_M = prepare_queries(tl.load(q + at_MD, mask=inside_MD, other=0.0), scale, SCALED)
    best_M = tl.full([M], float("-inf"), dtype=tl.float32)
    total_M = tl.zeros([M], dtype=tl.float32)
    sum_MD = tl.zeros([M, D], dtype=tl.float32)
    slope_M = total_M
    if SLOPED:
        slope_M = tl.load(slopes + kv_head * GROUP + m % GROUP) * LOG2E
    if SUNK:
        best_M = tl.load(sinks + kv_head * GROUP + m % GROUP) * LOG2E
        total_M += 1.0
    unit = 0.0
    seen = first_seen(first, WINDOW)
    masked = seen // N * N
    if WINDOW == 0:
        masked = (first + 1) // N * N
        for first_key in range(0, masked, N):
            best_M, total_M, sum_MD, unit = attend_tile(
                q_MD, scale_M, position_M, best_M, total_M, sum_MD=sum_MD, unit=unit, heads=heads, scales=scales,
                table=table, first_key=first_key, seen=seen, end=last, cap=cap, slope_M=slope_M, KV_HEADS=KV_HEADS,
                HEAD_SIZE=HEAD_SIZE, N=N, MASKED=False, SCALED=SCALED, CAPPED=CAPPED, SLOPED=SLOPED, WINDOW=WINDOW,
            )  # fmt: skip
    for first_key in range(masked, last, N):
        best_M, total_M, sum_MD, unit = attend_tile(
            q_MD, scale_M, position_M, best_M, total_M, sum_MD=sum_MD, unit=unit, heads=heads, scales=scales,
            table=table, first_key=first_key, seen=seen, end=last, cap=cap, slope_M=slope_M, KV_HEADS=KV_HEADS,
            HEAD_SIZE=HEAD_SIZE, N=N, MASKED=True, SCALED=SCALED, CAPPED=CAPPED, SLOPED=SLOPED, WINDOW=WINDOW,
        )  # fmt: skip
    if SCALED:
        sum_MD *= unit
    tl.store(out + at_MD, (sum_MD / total_M[:, None]).to(out.dtype.element_ty), mask=inside_MD)


@triton.jit
def _find_run(offsets, runs, block, Q: tl.constexpr):
    """The last run that begins at this block or before it."""
    begun = 0
    base = tl.load(offsets)
    for first in range(0, runs, 128):
        run = first + tl.arange(0, 128)
        offset = tl.load(offsets + run, mask=run < runs, other=0) - base
        begun += tl.sum(((run < runs) & (offset // Q + run <= block)).to(tl.int32), 0)
    return begun - 1
