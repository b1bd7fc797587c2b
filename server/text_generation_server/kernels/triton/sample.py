"""The next token of each row: argmax of logit + Gumbel noise over a vocabulary that many programs share.

With v uniform in (0, 1), hashed from (seed, position, token), the noise is -log(-log(1 - v)), and the argmax is a draw
from softmax(logits) (the Gumbel-max trick). Each program reduces one block of one row to its best score and to (peak, Σ
exp(logit - peak)); a second kernel merges a row's blocks. If any row asks for bias, penalties or cuts, their kernels
run before.

Each row's parameters are tested on the device, so that one compiled form of each kernel serves all mixtures of rows. A
row's reductions have the same order whatever the other rows are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import Choices, Chosen
from text_generation_server.kernels.triton.sample_cuts import asks_for_cut, cut
from text_generation_server.kernels.triton.sample_penalties import add_bias, penalize

BLOCK = 4096  # number of logits that one program reduces
WARPS = 8
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
MINUS_INFINITY = tl.constexpr(float("-inf"))


def sample(logits_RV: Tensor, choices: Choices) -> Chosen:
    return sample_tiled(logits_RV, choices, min(BLOCK, triton.next_power_of_2(logits_RV.shape[1])))


def sample_tiled(logits_RV: Tensor, choices: Choices, block: int) -> Chosen:
    """Like `sample`, but each program reduces `block` logits, a power of two."""
    rows, vocabulary = logits_RV.shape
    assert logits_RV.is_contiguous() and logits_RV.dtype == torch.float32
    device, blocks = logits_RV.device, triton.cdiv(vocabulary, block)
    finite = torch.empty((rows, blocks), dtype=torch.int8, device=device)
    checked = choices.bias is not None or choices.any_penalties or choices.any_cuts
    if checked:
        _check_block[(rows, blocks)](logits_RV, finite, VOCABULARY=vocabulary, BLOCK=block, num_warps=WARPS)
        if choices.bias is not None:
            add_bias(logits_RV, choices.bias)
        if choices.any_penalties:
            penalize(logits_RV, choices)
        if choices.any_cuts:
            cut(logits_RV, choices, block)
    parts = torch.empty((4, rows, blocks), device=device)
    part_ids = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    _draw_block[(rows, blocks)](
        logits_RV, finite, parts, part_ids, choices.rows_R, choices.lengths, choices.draws_R, choices.seeds_R,
        choices.temperature_R, choices.top_k_R, choices.top_p_R, choices.min_p_R, choices.typical_p_R, rows,
        int(checked),
        VOCABULARY=vocabulary, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    ids_R = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs_R = torch.empty(rows, device=device)
    finite_R = torch.empty(rows, dtype=torch.bool, device=device)
    _merge_blocks[(rows,)](
        logits_RV, finite, parts, part_ids, ids_R, logprobs_R, finite_R, rows, VOCABULARY=vocabulary, BLOCK=block,
        BLOCKS=blocks, B=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return Chosen(ids_R, logprobs_R, finite_R)


@triton.jit
def _check_block(logits, finite, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Records whether all logits of a block are finite. Replaces logits that are not finite by zeros."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    at = logits + row * VOCABULARY + token
    # The comparison is also false for NaN.
    is_finite = tl.abs(tl.load(at, mask=inside, other=0.0)) <= LARGEST
    tl.store(at, tl.zeros([BLOCK], tl.float32), mask=inside & (is_finite == 0))
    tl.store(finite + row * tl.num_programs(1) + block, tl.min(is_finite.to(tl.int32), 0).to(tl.int8))


@triton.jit(do_not_specialize=["rows", "checked"])
def _draw_block(
    logits, finite, parts, part_ids, rows_R, lengths, draws_R, seeds_R,
    temperature_R, top_k_R, top_p_R, min_p_R, typical_p_R, rows, checked,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Divides a block by the temperature, unless the kernel of the cuts has done this already, and reduces the
    block.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    here = row.to(tl.int64) * tl.num_programs(1) + block
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    at = logits + row.to(tl.int64) * VOCABULARY + token
    x = tl.load(at, mask=inside, other=0.0)
    if checked == 0:
        is_finite = tl.abs(x) <= LARGEST
        x = tl.where(is_finite, x, 0.0)
        tl.store(finite + here, tl.min(is_finite.to(tl.int32), 0).to(tl.int8))
    temperature = tl.load(temperature_R + row)
    is_cut = asks_for_cut(row, top_k_R, top_p_R, min_p_R, typical_p_R)
    if (temperature != 1.0) & (is_cut == 0):
        x = tl.div_rn(x, temperature)
        tl.store(at, x, mask=inside)
    score = x
    if tl.load(draws_R + row) != 0:
        position = tl.load(lengths + tl.load(rows_R + row))
        score = x + gumbel_noise(tl.load(seeds_R + row), position, token)
    x = tl.where(inside, x, MINUS_INFINITY)
    score = tl.where(inside, score, MINUS_INFINITY)
    best = tl.argmax(score, 0)
    peak = tl.max(x, 0)
    # If all tokens of a block have been excluded, there is no peak to subtract.
    total = tl.sum(tl.exp(x - tl.where(peak == MINUS_INFINITY, 0.0, peak)), 0)
    stride = rows.to(tl.int64) * tl.num_programs(1)
    tl.store(part_ids + here, block * BLOCK + best)
    tl.store(parts + here, tl.max(score, 0))
    tl.store(parts + stride + here, tl.max(tl.where(token == block * BLOCK + best, x, MINUS_INFINITY), 0))
    tl.store(parts + 2 * stride + here, peak)
    tl.store(parts + 3 * stride + here, total)


@triton.jit(do_not_specialize=["rows"])
def _merge_blocks(
    logits, finite, parts, part_ids, ids_R, logprobs_R, finite_R, rows,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, B)
    inside = block < BLOCKS
    here = row * BLOCKS + block
    stride = rows.to(tl.int64) * BLOCKS
    best = tl.argmax(tl.load(parts + here, mask=inside, other=MINUS_INFINITY), 0)
    logit = tl.load(parts + stride + row * BLOCKS + best)
    peaks = tl.load(parts + 2 * stride + here, mask=inside, other=MINUS_INFINITY)
    totals = tl.load(parts + 3 * stride + here, mask=inside, other=0.0)
    peak = tl.max(peaks, 0)
    logprob = logit - peak - tl.log(tl.sum(totals * tl.exp(peaks - peak), 0))
    is_finite = tl.min(tl.load(finite + here, mask=inside, other=1).to(tl.int32), 0) != 0
    tl.store(ids_R + row, tl.where(is_finite, tl.load(part_ids + row * BLOCKS + best), 0))
    tl.store(logprobs_R + row, tl.where(is_finite, logprob, 0.0))
    tl.store(finite_R + row, is_finite)
    if is_finite == 0:
        for first in range(0, VOCABULARY, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(logits + row * VOCABULARY + token, tl.zeros([BLOCK], tl.float32), mask=token < VOCABULARY)


@triton.jit
def gumbel_noise(seed, position, token):
    """Gumbel noise in float32, a pure function of (seed int64, position int32, token int32)."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(_mix(_mix(low) ^ high) ^ position.to(tl.uint32))
    bits = _mix(_mix(key ^ (token.to(tl.uint32) * 0x9E3779B1)) + key)
    # v is uniform in (0, 1). It is exact to 32 bits near 0, where the noise is so large that it decides which token is
    # drawn.
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # Near 0, -log(1 - v) = v + v²/2 + v³/3 + … is used, because computing 1 - v would lose most bits of v.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v * (1 / 7)))))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(1 - v)))


@triton.jit
def _mix(x):
    """The 32-bit finalizer of the hash MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
