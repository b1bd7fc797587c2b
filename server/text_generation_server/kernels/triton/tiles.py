"""One step of attention's online softmax, which decode and prefill share: a tile of queries over a tile of keys.

For queries q, keys k_j and values v_j, in base 2 (exp2 is one instruction, exp is two):

    s_j = q · k_j        out = Σ_j 2^(scale · s_j - best) · v_j / total        total = Σ_j 2^(scale · s_j - best)

with best = scale · max s_j, so that each score meets its scale in one multiplication and addition, the exponent's.
`best`, `total` and the sum are carried in float32 from tile to tile.

In 8 bits a key is `number * scale`, so its scale multiplies the score; a value's scale multiplies the probability: no
tile is dequantized. The numbers become float16, which holds them exactly, and so do the queries and the probabilities,
whose magnitudes are first brought into float16's range by powers of two, which round nothing.

Legend: M queries of a tile, N keys of a tile, D head size padded to a power of two.
"""

import math
from typing import Any

import triton
import triton.language as tl

from text_generation_server.kernels.interface import AttentionOptions

LOG2E = tl.constexpr(math.log2(math.e))


def kernel_arguments(options: AttentionOptions) -> dict[str, Any]:
    # Names in capital letters are constants of a kernel, so that options that a layer does not use compile away.
    """Scores are multiplied by log2(e), for exponentials in base 2. With a cap, `scale` makes tanh's arguments."""
    is_capped = options.softcap is not None
    return {
        "scale": options.scale / options.softcap if options.softcap is not None else options.scale * LOG2E.value,
        "cap": (options.softcap or 0.0) * LOG2E.value,
        "slopes": options.slopes_H,
        "sinks": options.sinks_H,
        "CAPPED": is_capped,
        "SLOPED": options.slopes_H is not None,
        "SUNK": options.sinks_H is not None,
        "WINDOW": options.window or 0,  # 0: a query sees all keys up to its own
    }


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit
def tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|); near 0, where the difference would cancel, the polynomial of Cephes' tanhf."""
    z = x * x
    y = -5.70498872745e-3 * z + 2.06390887954e-2
    y = y * z - 5.37397155531e-2
    y = y * z + 1.33314422036e-1
    y = y * z - 3.33332819422e-1
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    outside = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.625, y * z * x + x, tl.where(x < 0, -outside, outside))


@triton.jit
def alter_scores(score_MN, position_M, key_N, cap, slope_M, CAPPED: tl.constexpr, SLOPED: tl.constexpr):
    if CAPPED:
        score_MN = tanh(score_MN) * cap
    if SLOPED:
        score_MN += slope_M[:, None] * (key_N[None, :] - position_M[:, None]).to(tl.float32)
    return score_MN


@triton.jit
def find_visible(position_M, key_N, is_read_N, SLOPED: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys of a tile each query attends to."""
    visible_MN = key_N[None, :] <= position_M[:, None]
    if WINDOW > 0:
        visible_MN = visible_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
    if WINDOW > 0 or SLOPED:  # the positions of queries may lie behind the end of a split
        visible_MN = visible_MN & is_read_N[None, :]
    return visible_MN


# float16's largest power of two is 2^15: numbers below 2 have room for this power.
HEADROOM = tl.constexpr(14)
# Triton's interpreter runs no instructions of a GPU.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Four int8, plus 128, become the low bytes of float16 numbers from 1024 on, whose last bit is 1; 1152 is subtracted.
UNPACK_INT8 = tl.constexpr("""
{
    .reg .b32 bytes, bias;
    xor.b32 bytes, $2, 0x80808080;
    mov.b32 bias, 0xE480E480;
    prmt.b32 $0, bytes, 0x64646464, 0x4140;
    prmt.b32 $1, bytes, 0x64646464, 0x4342;
    add.rn.f16x2 $0, $0, bias;
    add.rn.f16x2 $1, $1, bias;
}
""")
UNPACK_FP8 = tl.constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")


@triton.jit
def slot_offset(slot, SIZE: tl.constexpr):
    """Offset of a slot of SIZE elements, in 64 bits, because a GPU's memory holds more than 2^31 numbers."""
    return slot.to(tl.int64) * SIZE


@triton.jit
def power_of_two(x):
    """The largest power of two that is not above x: the exponent of a float32, as its bits."""
    return x.to(tl.int32, bitcast=True) & 0x7F800000


@triton.jit
def prepare_queries(q_MD, scale, SCALED: tl.constexpr):
    """(queries, scale of each query's scores). For a cache of 8 bits, a query's largest number becomes 2^14 … 2^15."""
    scale_M = tl.zeros([q_MD.shape[0]], tl.float32) + scale
    if SCALED:
        numbers = q_MD.to(tl.float32)
        power_M = power_of_two(tl.maximum(tl.max(tl.abs(numbers), 1), 1e-30)) - (HEADROOM << 23)
        scale_M *= power_M.to(tl.float32, bitcast=True)
        inverse_M = ((254 << 23) - power_M).to(tl.float32, bitcast=True)
        q_MD = (numbers * inverse_M[:, None]).to(tl.float32 if q_MD.dtype == tl.float32 else tl.float16)
    return q_MD, scale_M


@triton.jit
def unpack(x):
    """8-bit numbers as float16, exactly: four by a few instructions. Plain conversions take one or more for each.

    The instructions are called impure so that the compiler leaves them where the numbers are loaded, in wide words. It
    would move them behind the exchange between threads, which it would then do byte by byte, and in every warp again.
    """
    if INTERPRETED:
        return x.to(tl.float16)
    elif x.dtype == tl.int8:
        return tl.inline_asm_elementwise(UNPACK_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
    else:
        return tl.inline_asm_elementwise(UNPACK_FP8, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)


@triton.jit
def attend_tile(
    q_MD, scale_M, position_M, best_M, total_M, sum_MD, unit, heads, scales, table, first_key, seen, end, cap, slope_M,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns (best, total, sum, unit) after adding the keys first_key … first_key + N - 1.

    queries and scale come from `prepare_queries`; heads and scales point to the key head in slot 0, table to the row's
    slots, and the scale, which is positive, includes the factor log2(e). A query attends to keys up to its position.
    With a WINDOW it attends to the last of these, and all tiles are MASKED. MASKED: keys from `end` on, and with a
    WINDOW those before `seen`, are not read, because their slots may hold anything. The first tile must hold a key to
    which all queries attend, unless there is a WINDOW: from then on `best` is finite. SCALED: the sum is to be
    multiplied by `unit`, a power of two, which is 0 before the first tile.
    """
    D: tl.constexpr = q_MD.shape[1]
    key_N = first_key + tl.arange(0, N)
    d = tl.arange(0, D)
    is_read_N = key_N < end
    if WINDOW > 0:
        is_read_N = is_read_N & (key_N >= seen)
    slot_N = tl.load(table + key_N, mask=is_read_N, other=0) if MASKED else tl.load(table + key_N)
    base_N = slot_offset(slot_N, 2 * KV_HEADS * HEAD_SIZE)
    keys = heads + base_N[None, :] + d[:, None]
    values = heads + KV_HEADS * HEAD_SIZE + base_N[:, None] + d[None, :]
    if MASKED or HEAD_SIZE != D:
        k_DN = tl.load(keys, mask=is_read_N[None, :] & (d < HEAD_SIZE)[:, None], other=0.0)
        v_ND = tl.load(values, mask=is_read_N[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    else:
        k_DN = tl.load(keys)
        v_ND = tl.load(values)
    if SCALED:
        k_DN = unpack(k_DN)
        v_ND = unpack(v_ND)

    score_MN = tl.dot(q_MD, k_DN.to(q_MD.dtype), input_precision="ieee")
    if SCALED:
        scale_N = scales + slot_offset(slot_N, 2 * KV_HEADS)
        k_scale_N = tl.load(scale_N, mask=is_read_N, other=0.0) if MASKED else tl.load(scale_N)
        values = scale_N + KV_HEADS
        v_scale_N = tl.load(values, mask=is_read_N, other=0.0) if MASKED else tl.load(values)
        score_MN *= k_scale_N[None, :]
    if CAPPED or SLOPED:
        score_MN = alter_scores(
            score_MN * scale_M[:, None], position_M, key_N, cap, slope_M, CAPPED=CAPPED, SLOPED=SLOPED
        )
        scale_M = tl.full([q_MD.shape[0]], 1.0, tl.float32)
    if MASKED:
        visible_MN = find_visible(position_M, key_N, is_read_N, SLOPED, WINDOW)
        score_MN = tl.where(visible_MN, score_MN, float("-inf"))

    new_best_M = tl.maximum(best_M, tl.max(score_MN, 1) * scale_M)
    base_M = new_best_M
    if WINDOW > 0:  # a query may see no key of the first tiles, whose scores would then become NaN
        base_M = tl.where(new_best_M == float("-inf"), 0.0, new_best_M)
    weight_MN = tl.exp2(tl.fma(score_MN, scale_M[:, None], -base_M[:, None]))
    shrink_M = tl.exp2(best_M - base_M)
    total_M = total_M * shrink_M + tl.sum(weight_MN, 1)
    if SCALED:
        # A weight times a small scale may be too small for float16: scales are divided by the largest one so far.
        power = power_of_two(tl.max(v_scale_N, 0)) - (HEADROOM << 23)
        new_unit = tl.maximum(unit, power.to(tl.float32, bitcast=True))
        weight_MN *= (v_scale_N / new_unit)[None, :]
        shrink_M *= unit / new_unit
        unit = new_unit
    sum_MD = tl.dot(
        weight_MN.to(q_MD.dtype), v_ND.to(q_MD.dtype), sum_MD * shrink_M[:, None], input_precision="ieee"
    )  # fmt: skip
    return new_best_M, total_M, sum_MD, unit
