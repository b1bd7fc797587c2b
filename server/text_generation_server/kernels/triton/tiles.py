"""One step of attention's online softmax, which decode and prefill share: a tile of queries over a tile of keys.

For queries q, keys k_j and values v_j, in base 2 (exp2 is one instruction, exp is two):

    s_j = log2(e) · scale · q · k_j        out = Σ_j 2^(s_j - best) · v_j / total        total = Σ_j 2^(s_j - best)

`best`, `total` and the sum are carried in float32 from tile to tile. In 8 bits a key is `number * scale`, so its scale
multiplies the score; a value's scale multiplies the probability: no tile is dequantized.

Legend: M queries of a tile, N keys of a tile, D head size padded to a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def slot_offset(slot, SIZE: tl.constexpr):
    """Offset of a slot of SIZE elements, in 64 bits, because a GPU's memory holds more than 2^31 numbers."""
    return slot.to(tl.int64) * SIZE


@triton.jit
def attend_tile(
    q_MD, position_M, best_M, total_M, sum_MD, heads, scales, table, first_key, end, scale,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Returns (best, total, sum) after adding the keys first_key … first_key + N - 1.

    heads and scales point to the key head in slot 0, table to the row's slots, and scale includes the factor log2(e). A
    query attends to keys up to its position. MASKED: keys from `end` on are not read, because their slots may hold
    anything. The first tile must hold a key to which all queries attend: from then on `best` is finite.
    """
    D: tl.constexpr = q_MD.shape[1]
    key_N = first_key + tl.arange(0, N)
    d = tl.arange(0, D)
    slot_N = tl.load(table + key_N, mask=key_N < end, other=0) if MASKED else tl.load(table + key_N)
    base_N = slot_offset(slot_N, 2 * KV_HEADS * HEAD_SIZE)
    keys = heads + base_N[None, :] + d[:, None]
    values = heads + KV_HEADS * HEAD_SIZE + base_N[:, None] + d[None, :]
    if MASKED or HEAD_SIZE != D:
        k_DN = tl.load(keys, mask=(key_N < end)[None, :] & (d < HEAD_SIZE)[:, None], other=0.0)
        v_ND = tl.load(values, mask=(key_N < end)[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    else:
        k_DN = tl.load(keys)
        v_ND = tl.load(values)

    score_MN = tl.dot(q_MD, k_DN.to(q_MD.dtype), input_precision="ieee") * scale
    if SCALED:
        scale_N = scales + slot_offset(slot_N, 2 * KV_HEADS)
        k_scale_N = tl.load(scale_N, mask=key_N < end, other=0.0)
        v_scale_N = tl.load(scale_N + KV_HEADS, mask=key_N < end, other=0.0)
        score_MN *= k_scale_N[None, :]
    if MASKED:
        score_MN = tl.where(key_N[None, :] <= position_M[:, None], score_MN, float("-inf"))

    new_best_M = tl.maximum(best_M, tl.max(score_MN, 1))
    weight_MN = tl.exp2(score_MN - new_best_M[:, None])
    shrink_M = tl.exp2(best_M - new_best_M)
    total_M = total_M * shrink_M + tl.sum(weight_MN, 1)
    sum_MD = sum_MD * shrink_M[:, None]
    v_ND = v_ND.to(q_MD.dtype)
    if SCALED:
        # Scales are divided by the tile's largest scale, because a weight times a small scale may be too small for
        # float16.
        largest = tl.max(v_scale_N, 0)
        weight_MN *= (v_scale_N / largest)[None, :]
        sum_MD += tl.dot(weight_MN.to(q_MD.dtype), v_ND, input_precision="ieee") * largest
    else:
        sum_MD = tl.dot(weight_MN.to(q_MD.dtype), v_ND, sum_MD, input_precision="ieee")
    return new_best_M, total_M, sum_MD
