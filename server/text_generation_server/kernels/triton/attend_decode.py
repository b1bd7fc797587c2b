"""Attention of one new token per row over all tokens of its row.

Keys are split over programs, so that one long row keeps the whole device busy; a second kernel merges the parts. With
out_s and lse_s = best_s + log2(total_s) of split s:

    out = Σ_s 2^(lse_s - max lse) · out_s / Σ_s 2^(lse_s - max lse)

A row is split from the first tile of its window on. Where it is split depends on its length, the table's width and the
number of key heads alone, so that a row's result depends on nothing but the row. The grid is the same for all lengths,
which are read on the device: a captured graph serves them all. Each program takes every P-th split of all rows, P being
the number of programs: no program is launched for a split that a shorter row does not have, and the splits of one long
row go to many programs. A row of one split is written into the result at once.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import AttentionOptions, KvLayer
from text_generation_server.kernels.triton.tiles import (
    LOG2E,
    attend_tile,
    first_seen,
    kernel_arguments,
    prepare_queries,
)
from text_generation_server.kernels.triton.tuning import Tile, find_attention_tile

MIN_QUERIES = 16  # least number of rows of a tl.dot
# A row has at most 32 splits; beyond, they grow. Bounds the memory of the parts. Where a rank has few key heads, a long
# row has more splits, up to this many programs for all heads, because else it would leave most of the device idle.
MIN_MAX_SPLITS, MAX_ROW_PROGRAMS = 32, 256
# Programs for each multiprocessor, three of which run at a time (of 168 registers for each of 128 threads).
PROGRAMS_PER_PROCESSOR = 6
ROWS_AT_ONCE = 256  # rows whose splits a program counts at a time, a power of two
PROCESSORS_OF_NO_GPU = 4  # in Triton's interpreter, which runs one program after the other


def attend_decode(
    q_THD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, options: AttentionOptions,
    out_THD: Tensor,
) -> None:  # fmt: skip
    """Writes the results of the first R tokens, zeros where the length is 0."""
    tile = find_attention_tile("attend_decode", q_THD, kv)
    attend_decode_tiled(q_THD, kv, table, rows_R, lengths_R, options=options, out_THD=out_THD, tile=tile)


def max_splits(table: Tensor, kv: KvLayer, tile: Tile, window: int | None = None) -> int:
    """Most splits that a row of this table can have."""
    most = max(MIN_MAX_SPLITS, MAX_ROW_PROGRAMS // kv.kv_heads)
    # A window that begins within a tile takes part of one tile more.
    longest = table.shape[1] if window is None else min(table.shape[1], window + tile.columns)
    return min(most, -(-longest // tile.split))


def count_programs(rows: int, kv_heads: int, splits: int, processors: int) -> int:
    """Number of programs for each key head: as many as there can be splits, and not many more than run at a time."""
    return min(rows * splits, -(-PROGRAMS_PER_PROCESSOR * processors // kv_heads))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_OF_NO_GPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def attend_decode_tiled(
    q_THD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, options: AttentionOptions,
    out_THD: Tensor, tile: Tile, programs: int | None = None,
) -> None:  # fmt: skip
    """`programs`: for each key head, None for as many as suit the device. They change no bit of the result."""
    _, heads, size = q_THD.shape
    count, kv_heads = len(rows_R), kv.kv_heads
    assert options.scale > 0 and heads % kv_heads == 0 and tile.split % tile.columns == 0
    assert q_THD.is_contiguous() and kv.heads.is_contiguous() and table.is_contiguous() and out_THD.is_contiguous()
    group = heads // kv_heads
    splits = max_splits(table, kv, tile, options.window)
    programs = programs or count_programs(count, kv_heads, splits, _processors(q_THD.device))
    parts = lse = None
    if splits > 1:
        parts = torch.empty((count, heads, splits, size), dtype=torch.float32, device=q_THD.device)
        lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q_THD.device)
    padded_size = max(MIN_QUERIES, triton.next_power_of_2(size))
    _attend_split[(kv_heads, programs)](
        q_THD, kv.heads, kv.scales, table, rows_R, lengths=lengths_R, parts=parts, lse=lse, out=out_THD,
        width=table.shape[1], count=count,
        KV_HEADS=kv_heads, GROUP=group, HEAD_SIZE=size, SPLITS=splits, SPLIT=tile.split,
        M=max(MIN_QUERIES, triton.next_power_of_2(group)), N=tile.columns, D=padded_size, B=ROWS_AT_ONCE,
        SCALED=kv.scales is not None, num_warps=tile.warps, num_stages=tile.stages, **kernel_arguments(options),
    )  # fmt: skip
    if splits > 1:
        _merge[(count, heads)](
            parts, lse, lengths_R, out_THD, HEAD_SIZE=size, SPLITS=splits, SPLIT=tile.split, N=tile.columns,
            S=triton.next_power_of_2(splits), BLOCK=min(MIN_MAX_SPLITS, triton.next_power_of_2(splits)), D=padded_size,
            WINDOW=options.window or 0,
        )  # fmt: skip


@triton.jit
def _begin_of_row(length, N: tl.constexpr, WINDOW: tl.constexpr):
    """The first key of the first tile that a row of this length reads."""
    return first_seen(length - 1, WINDOW) // N * N


@triton.jit
def _keys_per_split(length, SPLITS: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr):
    """Number of keys in a split, a multiple of N: SPLIT, or more if the row would have more than SPLITS splits."""
    return tl.maximum(SPLIT, tl.cdiv(tl.cdiv(length, SPLITS), N) * N)


@triton.jit
def _find_split(
    lengths, count, item, SPLITS: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr, B: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """(token, split) of number `item` of all splits, and the number of all splits. A row without keys has one, too."""
    token = 0
    before = 0  # splits of the rows before this token
    total = 0
    for first in tl.range(0, count, B, num_stages=1):
        t = first + tl.arange(0, B)
        length_B = tl.load(lengths + t, mask=t < count, other=0)
        length_B -= _begin_of_row(length_B, N, WINDOW)
        splits_B = tl.maximum(tl.cdiv(length_B, _keys_per_split(length_B, SPLITS, SPLIT, N)), 1)
        splits_B = tl.where(t < count, splits_B, 0)
        end_B = total + tl.cumsum(splits_B, 0)
        passed_B = (end_B <= item) & (t < count)
        token += tl.sum(passed_B.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed_B, end_B, 0), 0))
        total += tl.sum(splits_B, 0)
    return token, item - before, total


@triton.jit(do_not_specialize=["width", "count"], do_not_specialize_on_alignment=["rows", "lengths"])
def _attend_split(
    q, heads, scales, table, rows, lengths, parts, lse, out, scale, cap, slopes, sinks, width, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, B: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SUNK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A program: every P-th split of all rows, for the query heads of one key head, padded to M."""
    kv_head = tl.program_id(0)
    heads += kv_head * HEAD_SIZE
    if SCALED:
        scales += kv_head
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    inside_MD = (m < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    total = _find_split(lengths, count, 0, SPLITS, SPLIT, N=N, B=B, WINDOW=WINDOW)[2]
    for item in range(tl.program_id(1), total, tl.num_programs(1)):
        token, split, _ = _find_split(lengths, count, item, SPLITS, SPLIT, N=N, B=B, WINDOW=WINDOW)
        length = tl.load(lengths + token)
        begin = _begin_of_row(length, N, WINDOW)
        keys = _keys_per_split(length - begin, SPLITS, SPLIT, N)
        start = begin + split * keys
        end = tl.minimum(start + keys, length)
        slots = table + tl.load(rows + token).to(tl.int64) * width
        head_M = token.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + m
        at_MD = head_M[:, None] * HEAD_SIZE + d[None, :]
        q_MD, scale_M = prepare_queries(tl.load(q + at_MD, mask=inside_MD, other=0.0), scale, SCALED)
        position = end - 1
        if WINDOW > 0 or SLOPED:
            position = length - 1
        position_M = tl.zeros([M], dtype=tl.int32) + position
        best_M = tl.full([M], float("-inf"), dtype=tl.float32)
        total_M = tl.zeros([M], dtype=tl.float32)
        sum_MD = tl.zeros([M, D], dtype=tl.float32)
        slope_M = total_M
        if SLOPED:
            slope_M = tl.load(slopes + kv_head * GROUP + m, mask=m < GROUP, other=0.0) * LOG2E
        if SUNK:  # sinks are keys of the first split
            is_first_M = tl.zeros([M], dtype=tl.int32) + split == 0
            sink_M = tl.load(sinks + kv_head * GROUP + m, mask=m < GROUP, other=0.0) * LOG2E
            best_M = tl.where(is_first_M, sink_M, best_M)
            total_M = tl.where(is_first_M, 1.0, total_M)
        seen = first_seen(length - 1, WINDOW)
        unit = 0.0
        for first_key in range(start, end, N):
            best_M, total_M, sum_MD, unit = attend_tile(
                q_MD, scale_M, position_M, best_M, total_M, sum_MD=sum_MD, unit=unit, heads=heads, scales=scales,
                table=slots, first_key=first_key, seen=seen, end=end, cap=cap, slope_M=slope_M, KV_HEADS=KV_HEADS,
                HEAD_SIZE=HEAD_SIZE, N=N, MASKED=True, SCALED=SCALED, CAPPED=CAPPED, SLOPED=SLOPED, WINDOW=WINDOW,
            )  # fmt: skip
        if SCALED:
            sum_MD *= unit
        total_M = tl.where(length > 0, total_M, 1.0)
        part_MD = sum_MD / total_M[:, None]
        length_M = tl.zeros([M], dtype=tl.int32) + (length - begin)
        tl.store(out + at_MD, part_MD.to(out.dtype.element_ty), mask=inside_MD & (length_M <= keys)[:, None])
        if SPLITS > 1:
            is_part_M = (m < GROUP) & (length_M > keys)
            part_M = head_M * SPLITS + split
            is_part_MD = is_part_M[:, None] & (d < HEAD_SIZE)[None, :]
            tl.store(parts + part_M[:, None] * HEAD_SIZE + d[None, :], part_MD, mask=is_part_MD)
            tl.store(lse + part_M, best_M + tl.log2(total_M), mask=is_part_M)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def _merge(
    parts, lse, lengths, out,
    HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A program: one head of one row that has several splits, BLOCK of them at a time."""
    token = tl.program_id(0).to(tl.int64)
    head = token * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + token)
    length -= _begin_of_row(length, N, WINDOW)
    keys = _keys_per_split(length, SPLITS, SPLIT, N)
    if length <= keys:
        return
    used = tl.cdiv(length, keys)
    lse += head * SPLITS
    parts += head * SPLITS * HEAD_SIZE
    s = tl.arange(0, S)
    lse_S = tl.load(lse + s, mask=s < used, other=float("-inf"))
    best = tl.max(lse_S, 0)
    d = tl.arange(0, D)
    sum_D = tl.zeros([D], dtype=tl.float32)
    for first in range(0, used, BLOCK):
        b = first + tl.arange(0, BLOCK)
        weight_B = tl.exp2(tl.load(lse + b, mask=b < used, other=float("-inf")) - best)
        inside_BD = (b < used)[:, None] & (d < HEAD_SIZE)[None, :]
        part_BD = tl.load(parts + b[:, None] * HEAD_SIZE + d[None, :], mask=inside_BD, other=0.0)
        sum_D += tl.sum(weight_B[:, None] * part_BD, 0)
    merged_D = sum_D / tl.sum(tl.exp2(lse_S - best), 0)
    tl.store(out + head * HEAD_SIZE + d, merged_D.to(out.dtype.element_ty), mask=d < HEAD_SIZE)
