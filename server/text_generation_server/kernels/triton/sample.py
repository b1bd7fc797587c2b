"""The next token of each row: argmax of logit + Gumbel noise over a vocabulary that many programs share.

With v uniform in (0, 1), hashed from (seed, position, token), the noise is -log(-log(1 - v)), and the argmax is a draw
from softmax(logits) (the Gumbel-max trick). Each program reduces one block of one row to its best score and to
(peak, Σ exp(logit - peak)); a second kernel merges a row's blocks. If any row asks for bias, penalties, masks or
cuts, their kernels run before.

Each row's parameters are tested on the device, so that one compiled form of each kernel serves all mixtures of rows. A
row's reductions have the same order whatever the other rows are. They also have the same order if the vocabulary is
split over ranks at multiples of BLOCK: then each rank reduces its own blocks, and rank 0 merges the blocks of all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import Choices, Chosen
from text_generation_server.kernels.triton.sample_cuts import find_bounds
from text_generation_server.kernels.triton.sample_masks import add_bias, exclude_tokens, penalize
from text_generation_server.kernels.triton.sample_prepare import (
    BOUND_WORDS,
    LARGEST,
    MINUS_INFINITY,
    WARPS,
    asks_for_cut,
    check,
    prepare_cuts,
    stays,
    width,
)

BLOCK = 4096  # number of logits that one program reduces
ALIGNED_LOGITS = 4  # logits of 16 bytes: rows begin at multiples of it
# The share of a vocabulary that may be added as padding so that each rank's part begins at a multiple of BLOCK.
MAX_PADDING = 1 / 8
# Words of a block: best score, its logit, peak, Σ exp(logit - peak); best id, whether all logits are finite.
PART_WORDS = 6
ALIGNED_WORDS = 4


def vocabulary_part(vocab_size: int, ranks: int) -> int:
    part = -(-vocab_size // ranks)
    aligned = -(-part // BLOCK) * BLOCK
    if ranks > 1 and ranks * aligned <= vocab_size * (1 + MAX_PADDING):
        return aligned
    return -(-part // ALIGNED_LOGITS) * ALIGNED_LOGITS


def splits_draws(part: int) -> bool:
    return part % BLOCK == 0


def sorts() -> bool:
    return False


def sample(logits_RV: Tensor, choices: Choices) -> Chosen:
    return sample_tiled(logits_RV, choices, min(BLOCK, triton.next_power_of_2(logits_RV.shape[1])))


def sample_tiled(logits_RV: Tensor, choices: Choices, block: int) -> Chosen:
    """Like `sample`, but each program reduces `block` logits, a power of two."""
    parts = _empty_parts(logits_RV, logits_RV.shape[1], block)
    if choices.any_changes:
        check(logits_RV, parts, block)
        if choices.bias is not None:
            add_bias(logits_RV, choices.bias)
        if choices.any_penalties:
            penalize(logits_RV, choices)
        exclude_tokens(logits_RV, choices)
    bounds = parts  # Not read if no row asks for a cut; any tensor, so that the compiled form is the same.
    if choices.any_cuts:
        measures = prepare_cuts(logits_RV, choices, parts, choices.any_changes, block)
        bounds = find_bounds(logits_RV, choices, measures, block)
    _draw(logits_RV, choices, parts, bounds, 0, is_checked=choices.any_changes or choices.any_cuts, block=block)
    return _merge(parts, logits_RV)


def reduce_part(logits_RV: Tensor, choices: Choices, ids: range) -> Tensor:
    own = logits_RV[:, : len(ids)]
    parts = _empty_parts(logits_RV, logits_RV.shape[1], BLOCK)
    _draw(own, choices, parts, parts, ids.start, is_checked=False, block=BLOCK)
    return parts


def merge_parts(parts: list[Tensor], vocab_size: int) -> Chosen:
    # Blocks beyond the vocabulary are left out, so that the merge has the same order as in `sample`.
    together = torch.cat(parts, dim=2)[:, :, : triton.cdiv(vocab_size, BLOCK)].contiguous()
    return _merge(together, together.new_empty((together.shape[1], 0), dtype=torch.float32))


def _empty_parts(logits_RV: Tensor, vocabulary: int, block: int) -> Tensor:
    """int32 [PART_WORDS, R, blocks], of which the first four are float32."""
    shape = (PART_WORDS, logits_RV.shape[0], triton.cdiv(vocabulary, block))
    return torch.empty(shape, dtype=torch.int32, device=logits_RV.device)


def _draw(
    logits_RV: Tensor, choices: Choices, parts: Tensor, bounds: Tensor, first_id: int, is_checked: bool,
    block: int,
) -> None:  # fmt: skip
    assert logits_RV.stride(1) == 1 and logits_RV.dtype == torch.float32
    _, rows, blocks = parts.shape
    _draw_block[(rows, blocks)](
        logits_RV, parts.view(torch.float32), parts, bounds, choices.rows_R, lengths=choices.lengths,
        draws_R=choices.draws_R, seeds_R=choices.seeds_R, temperature_R=choices.temperature_R, top_k_R=choices.top_k_R,
        top_p_R=choices.top_p_R, log_min_p_R=choices.log_min_p_R, typical_p_R=choices.typical_p_R, rows=rows,
        is_checked=int(is_checked), first_id=first_id, VOCABULARY=logits_RV.shape[1], STRIDE=logits_RV.stride(0),
        WIDTH=width(logits_RV), BLOCK=block, WORDS=BOUND_WORDS, num_warps=WARPS,
    )  # fmt: skip


def _merge(parts: Tensor, logits_RV: Tensor) -> Chosen:
    """Also overwrites the logits of the rows that are not finite."""
    _, rows, blocks = parts.shape
    # All results lie in one buffer, so that one copy brings them to the host.
    words = torch.empty((3, triton.cdiv(rows, ALIGNED_WORDS) * ALIGNED_WORDS), dtype=torch.int32, device=parts.device)
    chosen = Chosen.in_words(words, rows)
    _merge_blocks[(rows,)](
        logits_RV, parts.view(torch.float32), parts, chosen.ids_R, chosen.logprobs_R, finite_R=chosen.finite_R,
        rows=rows, WIDTH=width(logits_RV), STRIDE=logits_RV.stride(0), BLOCK=BLOCK, BLOCKS=blocks,
        B=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["rows", "is_checked", "first_id"])
def _draw_block(
    logits, parts, words, bounds, rows_R, lengths, draws_R, seeds_R,
    temperature_R, top_k_R, top_p_R, log_min_p_R, typical_p_R, rows, is_checked, first_id,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Divides a block by the temperature, or excludes tokens if the row asks for a cut, and reduces the block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = row * tl.num_programs(1) + block
    stride = rows.to(tl.int64) * tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    at = logits + row * STRIDE + token
    x = tl.load(at, mask=token < WIDTH, other=0.0)
    if is_checked == 0:
        is_finite = tl.abs(x) <= LARGEST
        tl.store(words + 5 * stride + here, tl.min((is_finite | (inside == 0)).to(tl.int32), 0))
        x = tl.where(is_finite, x, 0.0)
    temperature = tl.load(temperature_R + row)
    is_cut = asks_for_cut(row, top_k_R, top_p_R, log_min_p_R, typical_p_R)
    if is_cut:
        x = tl.where(stays(x, token, bounds + row * WORDS), x, MINUS_INFINITY)
        tl.store(at, x, mask=token < WIDTH)
    elif temperature != 1.0:
        x = tl.div_rn(x, temperature)
        tl.store(at, x, mask=token < WIDTH)
    score = x
    if tl.load(draws_R + row) != 0:
        position = tl.load(lengths + tl.load(rows_R + row))
        score = x + gumbel_noise(tl.load(seeds_R + row), position, first_id + token)
    x = tl.where(inside, x, MINUS_INFINITY)
    score = tl.where(inside, score, MINUS_INFINITY)
    best = tl.argmax(score, 0)
    peak = tl.max(x, 0)
    # If all tokens of a block have been excluded, there is no peak to subtract.
    total = tl.sum(tl.exp(x - tl.where(peak == MINUS_INFINITY, 0.0, peak)), 0)
    tl.store(parts + here, tl.max(score, 0))
    tl.store(parts + stride + here, tl.max(tl.where(token == block * BLOCK + best, x, MINUS_INFINITY), 0))
    tl.store(parts + 2 * stride + here, peak)
    tl.store(parts + 3 * stride + here, total)
    tl.store(words + 4 * stride + here, first_id + block * BLOCK + best)


@triton.jit(do_not_specialize=["rows"])
def _merge_blocks(
    logits, parts, words, ids_R, logprobs_R, finite_R, rows,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
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
    has_tokens = peak > MINUS_INFINITY  # False if masks have excluded all tokens of the row
    base = tl.where(has_tokens, peak, 0.0)
    total = tl.sum(totals * tl.exp(peaks - base), 0)
    logprob = logit - base - tl.log(tl.where(has_tokens, total, 1.0))
    was_finite = tl.min(tl.load(words + 5 * stride + here, mask=inside, other=1), 0) != 0
    is_finite = was_finite & has_tokens
    tl.store(ids_R + row, tl.where(is_finite, tl.load(words + 4 * stride + row * BLOCKS + best), 0))
    tl.store(logprobs_R + row, tl.where(is_finite, logprob, tl.where(was_finite, MINUS_INFINITY, 0.0)))
    tl.store(finite_R + row, is_finite)
    if is_finite == 0:
        for first in range(0, WIDTH, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(logits + row * STRIDE + token, tl.zeros([BLOCK], tl.float32), mask=token < WIDTH)


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
