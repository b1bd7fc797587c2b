"""Attention of one new token per row over all tokens of its row.

Keys are split over programs, so that one long row keeps the whole device busy; a second kernel merges the parts. With
out_s and lse_s = best_s + log2(total_s) of split s:

    out = Σ_s 2^(lse_s - max lse) · out_s / Σ_s 2^(lse_s - max lse)

Where a row is split depends only on its length and on the table's width, so that a row's result depends only on the
row. The grid is the same for all lengths, which are read on the device: one captured graph serves them all.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import KvLayer
from text_generation_server.kernels.triton.tiles import attend_tile
from text_generation_server.kernels.triton.tuning import Tile, find_attention_tile

MIN_QUERIES = 16  # least number of rows of a tl.dot
# Most splits of a row; in longer rows each split has more keys. Bounds the memory of the parts and the number of
# programs.
MAX_SPLITS = 32


def attend_decode(q_THD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, scale: float) -> Tensor:
    tile = find_attention_tile("attend_decode", q_THD, kv)
    return attend_decode_tiled(q_THD, kv, table, rows_R, lengths_R, scale, tile)


def attend_decode_tiled(
    q_THD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, scale: float, tile: Tile
) -> Tensor:
    _, heads, size = q_THD.shape
    count, kv_heads = len(rows_R), kv.kv_heads
    assert heads % kv_heads == 0 and tile.split % tile.columns == 0
    assert q_THD.is_contiguous() and kv.heads.is_contiguous() and table.is_contiguous()
    group = heads // kv_heads
    splits = min(MAX_SPLITS, triton.cdiv(table.shape[1], tile.split))
    parts = torch.empty((count, heads, splits, size), dtype=torch.float32, device=q_THD.device)
    lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q_THD.device)
    out = torch.empty_like(q_THD)
    out[count:].zero_()
    padded_size = max(MIN_QUERIES, triton.next_power_of_2(size))
    _attend_split[(count, kv_heads, splits)](
        q_THD, kv.heads, kv.scales, table, rows_R, lengths_R, parts, lse, scale * math.log2(math.e), table.shape[1],
        KV_HEADS=kv_heads, GROUP=group, HEAD_SIZE=size, SPLITS=splits, SPLIT=tile.split,
        M=max(MIN_QUERIES, triton.next_power_of_2(group)), N=tile.columns, D=padded_size, SCALED=kv.scales is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _merge[(count, heads)](
        parts, lse, lengths_R, out, HEAD_SIZE=size, SPLITS=splits, SPLIT=tile.split, N=tile.columns,
        S=triton.next_power_of_2(splits), D=padded_size,
    )  # fmt: skip
    return out


@triton.jit
def keys_per_split(length, SPLITS: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr):
    """Number of keys in a split, a multiple of N: SPLIT, or more if the row would have more than SPLITS splits."""
    return tl.maximum(SPLIT, tl.cdiv(tl.cdiv(length, SPLITS), N) * N)


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths"])
def _attend_split(
    q, heads, scales, table, rows, lengths, parts, lse, scale, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A program computes one split of one row, for the query heads of one key head, padded to M."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + token)
    keys = keys_per_split(length, SPLITS, SPLIT, N)
    start = split * keys
    if start >= length:
        return
    end = tl.minimum(start + keys, length)
    table += tl.load(rows + token).to(tl.int64) * width
    heads += kv_head * HEAD_SIZE
    if SCALED:
        scales += kv_head

    m = tl.arange(0, M)
    d = tl.arange(0, D)
    inside_MD = (m < GROUP)[:, None] & (d < HEAD_SIZE)[None, :]
    head_M = token * (KV_HEADS * GROUP) + kv_head * GROUP + m
    q_MD = tl.load(q + head_M[:, None] * HEAD_SIZE + d[None, :], mask=inside_MD, other=0.0)
    position_M = tl.zeros([M], dtype=tl.int32) + (end - 1)
    best_M = tl.full([M], float("-inf"), dtype=tl.float32)
    total_M = tl.zeros([M], dtype=tl.float32)
    sum_MD = tl.zeros([M, D], dtype=tl.float32)
    for first_key in range(start, end, N):
        best_M, total_M, sum_MD = attend_tile(
            q_MD, position_M, best_M, total_M, sum_MD, heads, scales, table, first_key, end, scale,
            KV_HEADS, HEAD_SIZE, N, True, SCALED,
        )  # fmt: skip
    part_M = head_M * SPLITS + split
    tl.store(parts + part_M[:, None] * HEAD_SIZE + d[None, :], sum_MD / total_M[:, None], mask=inside_MD)
    tl.store(lse + part_M, best_M + tl.log2(total_M), mask=m < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def _merge(
    parts, lse, lengths, out,
    HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = token * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + token)
    s = tl.arange(0, S)
    d = tl.arange(0, D)
    used_S = s * keys_per_split(length, SPLITS, SPLIT, N) < length
    lse_S = tl.load(lse + head * SPLITS + s, mask=used_S, other=float("-inf"))
    weight_S = tl.exp2(lse_S - tl.max(lse_S, 0))
    part_SD = tl.load(
        parts + (head * SPLITS + s)[:, None] * HEAD_SIZE + d[None, :],
        mask=used_S[:, None] & (d < HEAD_SIZE)[None, :],
        other=0.0,
    )
    merged_D = tl.sum(weight_S[:, None] * part_SD, 0) / tl.sum(weight_S, 0)
    tl.store(out + head * HEAD_SIZE + d, merged_D.to(out.dtype.element_ty), mask=d < HEAD_SIZE)
