"""Rotates queries and keys, and writes keys and values into their slots, in one launch.

A head's numbers are pairs (x_i, x_{i + D/2}), rotated by the angle of (position, i):

    x'_i = x_i · cos - x_{i + D/2} · sin        x'_{i + D/2} = x_{i + D/2} · cos + x_i · sin

In 8 bits, a head of keys or values becomes round(x / scale) with scale = max(|x|) / largest number, at least 1e-6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import HeadNorms, KvLayer
from text_generation_server.kernels.triton.tiles import slot_offset
from text_generation_server.kernels.triton.tuning import find_tile

LARGEST_INT8 = 127


def rope_and_store_kv(
    qkv: Tensor,
    heads: tuple[int, int],
    rotary: tuple[Tensor, Tensor],
    positions_T: Tensor,
    kv: KvLayer,
    slots_T: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    query_heads, kv_heads = heads
    tokens, all_heads = qkv.shape[0], query_heads + 2 * kv_heads
    size = kv.heads.shape[2]
    cos, sin = rotary
    assert qkv.shape[1] == all_heads * size and cos.shape[1] == size // 2
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and kv.heads.is_contiguous()
    tile = find_tile("rope_and_store_kv", 1, size, kv.heads.dtype, qkv.device)
    # Queries are not rotated in place: some threads would overwrite numbers that other threads have not read yet.
    q_THD = torch.empty((tokens, query_heads, size), dtype=qkv.dtype, device=qkv.device)
    number = kv.heads.dtype
    query_norm, key_norm, eps = (None, None, 0.0) if norms is None else (norms.query_D, norms.key_D, norms.eps)
    exact = norms is not None and norms.query_D.dtype != qkv.dtype
    _rope_and_store_kv[(tokens, triton.cdiv(all_heads, tile.rows))](
        qkv, cos, sin, positions_T, slots_T, q=q_THD, heads=kv.heads, scales=kv.scales, query_norm=query_norm,
        key_norm=key_norm, eps=eps, QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HALF=size // 2,
        D=triton.next_power_of_2(size // 2), ROWS=tile.rows, NORMED=norms is not None, EXACT=exact,
        SCALED=kv.scales is not None, INTEGERS=not number.is_floating_point,
        LARGEST=torch.finfo(number).max if number.is_floating_point else LARGEST_INT8, num_warps=tile.warps,
    )  # fmt: skip
    return q_THD


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_and_store_kv(
    qkv, cos, sin, positions, slots, q, heads, scales, query_norm, key_norm, eps,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr, EXACT: tl.constexpr, SCALED: tl.constexpr, INTEGERS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """A program rotates or stores ROWS consecutive heads of one token, of queries, keys or values. h: heads, d: half a
    head.
    """
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    inside = (h < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)
    at = (token * (QUERY_HEADS + 2 * KV_HEADS) + h)[:, None] * (2 * HALF) + d
    first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + token).to(tl.int64) * HALF + d
    c = tl.load(cos + angle, mask=d < HALF, other=0.0)
    s = tl.load(sin + angle, mask=d < HALF, other=0.0)
    turns = (h < QUERY_HEADS + KV_HEADS)[:, None]
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_query_head = (h < QUERY_HEADS)[:, None]
        normed_first = _weighted(
            first * factor, query_norm, key_norm, is_query_head, d, END=HALF, EXACT=EXACT, dtype=dtype
        )
        normed_second = _weighted(
            second * factor, query_norm, key_norm, is_query_head, d + HALF, END=2 * HALF, EXACT=EXACT, dtype=dtype
        )
        first, second = tl.where(turns, normed_first, first), tl.where(turns, normed_second, second)
    turned_first = tl.where(turns, first * c - second * s, first).to(dtype)
    turned_second = tl.where(turns, second * c + first * s, second).to(dtype)

    is_query = (h < QUERY_HEADS)[:, None]
    at = (token * QUERY_HEADS + h)[:, None] * (2 * HALF) + d
    tl.store(q + at, turned_first, mask=inside & is_query)
    tl.store(q + at + HALF, turned_second, mask=inside & is_query)

    is_stored = inside & (h >= QUERY_HEADS)[:, None]
    place = slot_offset(tl.load(slots + token), 2 * KV_HEADS) + (h - QUERY_HEADS)
    at = place[:, None] * (2 * HALF) + d
    if SCALED:
        first = turned_first.to(tl.float32)
        second = turned_second.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = tl.maximum(tl.div_rn(peak, LARGEST), 1e-6)
        tl.store(scales + place, scale, mask=(h >= QUERY_HEADS) & (h < QUERY_HEADS + 2 * KV_HEADS))
        tl.store(heads + at, _quantize(first, scale, heads, INTEGERS, LARGEST), mask=is_stored)
        tl.store(heads + at + HALF, _quantize(second, scale, heads, INTEGERS, LARGEST), mask=is_stored)
    else:
        tl.store(heads + at, turned_first.to(heads.dtype.element_ty), mask=is_stored)
        tl.store(heads + at + HALF, turned_second.to(heads.dtype.element_ty), mask=is_stored)


@triton.jit
def _weighted(x, query_norm, key_norm, is_query_head, d, END: tl.constexpr, EXACT: tl.constexpr, dtype: tl.constexpr):
    """x times the norm's weight, rounded to the model's type after it and, unless EXACT, before it; float32."""
    query_weight = tl.load(query_norm + d, mask=d < END, other=0.0)
    key_weight = tl.load(key_norm + d, mask=d < END, other=0.0)
    weight = tl.where(is_query_head, query_weight, key_weight).to(tl.float32)
    if not EXACT:
        x = x.to(dtype).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _quantize(x, scale, heads, INTEGERS: tl.constexpr, LARGEST: tl.constexpr):
    number = tl.clamp(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), -LARGEST, LARGEST)
    if INTEGERS:
        # 1.5 · 2^23: a float32 of this size has no fractional bits, so the addition rounds to the nearest, ties to
        # even. The division before it keeps the compiler from fusing the two roundings into one.
        number = (number + 12582912.0) - 12582912.0
    return number.to(heads.dtype.element_ty)
