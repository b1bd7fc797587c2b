"""Checks a step's logits, and prepares them for cuts. Many programs share a row: each reads and writes one block.

The rows that ask for a cut are divided by their temperatures here. For each group of GROUP neighbouring tokens the
kernel stores the largest logit, and for each block the parts of the row's mass and entropy: the peak, the least logit,
Σ exp(x - peak) and Σ exp(x - peak) · (x - peak).

For rows whose only cut is typical-p, another kernel stores the logit of each group's most typical token instead of the
largest logit. Which token is the most typical is known only when the blocks' measures are.

The image of a number is an int32; images have the same order as the numbers. The cuts of a row are described by a bound
(kept, last): tokens stay if their image is greater than `kept`, or equal to `kept` with an id of at most `last`. For
typical-p there is a second bound, for the image of minus the distance between a token's surprise and the entropy.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import Choices

WARPS = 8
GROUP = 16
# Words of a row's bounds: kept, last, the same for typical-p, log Σ exp(x), entropy.
BOUND_WORDS = 6
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
MINUS_INFINITY = tl.constexpr(float("-inf"))


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of R rows, undefined for rows that ask for no cut."""

    maxima_RG: Tensor  # float32: the largest logit of each group, or the logit of its most typical token
    of_blocks: Tensor  # float32 [4, R, blocks]
    group: int  # number of tokens in a group


def check(logits_RV: Tensor, parts: Tensor, block: int) -> None:
    """Records in the last of `parts`, int32 [6, R, blocks], whether all logits of a block are finite. Replaces logits
    that are not finite by zeros."""
    _check_block[parts.shape[1:]](
        logits_RV, parts, logits_RV.shape[0],
        VOCABULARY=logits_RV.shape[1], STRIDE=logits_RV.stride(0), WIDTH=width(logits_RV), BLOCK=block, num_warps=WARPS,
    )  # fmt: skip


def prepare_cuts(logits_RV: Tensor, choices: Choices, parts: Tensor, is_checked: bool, block: int) -> Measures:
    """Divides the rows that ask for a cut, and measures them. Checks all rows, unless `check` has done so."""
    rows, vocabulary = logits_RV.shape
    group = min(GROUP, block)
    groups = triton.cdiv(vocabulary, group)
    maxima = torch.empty((rows, groups), device=logits_RV.device)
    blocks = parts.shape[2]
    measures = torch.empty((4, rows, blocks), device=logits_RV.device)
    _prepare_block[(rows, blocks)](
        logits_RV, parts, maxima, measures, choices.temperature_R, choices.top_k_R, choices.top_p_R, choices.min_p_R,
        choices.typical_p_R, rows, int(is_checked),
        VOCABULARY=vocabulary, STRIDE=logits_RV.stride(0), WIDTH=width(logits_RV), BLOCK=block, GROUP=group,
        GROUPS=groups, num_warps=WARPS,
    )  # fmt: skip
    if choices.any_typical:
        _most_typical[(rows, blocks)](
            logits_RV, maxima, measures, choices.top_k_R, choices.top_p_R, choices.min_p_R, choices.typical_p_R, rows,
            VOCABULARY=vocabulary, STRIDE=logits_RV.stride(0), WIDTH=width(logits_RV), BLOCK=block, GROUP=group,
            GROUPS=groups, BLOCKS=blocks, B=triton.next_power_of_2(blocks), num_warps=WARPS,
        )  # fmt: skip
    return Measures(maxima, measures, group)


def width(logits_RV: Tensor) -> int:
    """Number of columns that kernels load and store in a row. If rows have columns of padding, the number is a multiple
    of 4, so that a thread loads and stores 16 bytes at a time."""
    return min(logits_RV.stride(0), -(-logits_RV.shape[1] // 4) * 4)


@triton.jit
def asks_for_cut(row, top_k_R, top_p_R, min_p_R, typical_p_R):
    ranks = (tl.load(top_k_R + row) > 0) | (tl.load(top_p_R + row) < 1.0)
    return ranks | (tl.load(min_p_R + row) > 0.0) | (tl.load(typical_p_R + row) < 1.0)


@triton.jit
def asks_for_typical_only(row, top_k_R, top_p_R, min_p_R, typical_p_R):
    others = (tl.load(top_k_R + row) > 0) | (tl.load(top_p_R + row) < 1.0) | (tl.load(min_p_R + row) > 0.0)
    return (others == 0) & (tl.load(typical_p_R + row) < 1.0)


@triton.jit(do_not_specialize=["rows"])
def _check_block(
    logits, words, rows, VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * STRIDE + token
    x = tl.load(at, mask=token < WIDTH, other=0.0)
    # The comparison is also false for NaN.
    is_finite = (tl.abs(x) <= LARGEST) | (token >= VOCABULARY)
    are_finite = tl.min(is_finite.to(tl.int32), 0)
    tl.store(words + (5 * rows.to(tl.int64) + row) * tl.num_programs(1) + block, are_finite)
    if are_finite == 0:
        tl.store(at, tl.where(is_finite, x, 0.0), mask=token < WIDTH)


@triton.jit(do_not_specialize=["rows", "is_checked"])
def _prepare_block(
    logits, words, maxima, measures, temperature_R, top_k_R, top_p_R, min_p_R, typical_p_R, rows, is_checked,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = row * tl.num_programs(1) + block
    is_cut = asks_for_cut(row, top_k_R, top_p_R, min_p_R, typical_p_R)
    if is_cut | (is_checked == 0):
        token = block * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * STRIDE + token
        x = tl.load(at, mask=token < WIDTH, other=0.0)
        are_finite = 1
        if is_checked == 0:
            is_finite = (tl.abs(x) <= LARGEST) | (token >= VOCABULARY)
            are_finite = tl.min(is_finite.to(tl.int32), 0)
            tl.store(words + 5 * rows.to(tl.int64) * tl.num_programs(1) + here, are_finite)
            x = tl.where(is_finite, x, 0.0)
        if is_cut:
            x = tl.div_rn(x, tl.load(temperature_R + row))
        if is_cut | (are_finite == 0):
            tl.store(at, x, mask=token < WIDTH)
        if is_cut:
            x = tl.where(token < VOCABULARY, x, MINUS_INFINITY)
            group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            largest = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
            tl.store(maxima + row * GROUPS + group, largest, mask=group < GROUPS)
            peak = tl.max(x, 0)
            # If all tokens of a block are excluded, there is no peak to subtract.
            below = x - tl.where(peak == MINUS_INFINITY, 0.0, peak)
            weight = tl.exp(below)
            stride = rows.to(tl.int64) * tl.num_programs(1)
            measures += here
            tl.store(measures, peak)
            tl.store(measures + stride, -tl.max(tl.where(x == MINUS_INFINITY, MINUS_INFINITY, -x), 0))
            tl.store(measures + 2 * stride, tl.sum(weight, 0))
            tl.store(measures + 3 * stride, tl.sum(weight * tl.where(x == MINUS_INFINITY, 0.0, below), 0))


@triton.jit(do_not_specialize=["rows"])
def _most_typical(
    logits, maxima, measures, top_k_R, top_p_R, min_p_R, typical_p_R, rows,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if asks_for_typical_only(row, top_k_R, top_p_R, min_p_R, typical_p_R):
        _, _, log_total, entropy = merged_measures(measures, row, rows, BLOCKS, B)
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * STRIDE + token, mask=token < WIDTH, other=0.0)
        x = tl.reshape(tl.where(token < VOCABULARY, x, MINUS_INFINITY), [BLOCK // GROUP, GROUP])
        image = typical_image(x, log_total, entropy)
        is_best = image == tl.max(image, 1)[:, None]
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        best = tl.max(tl.where(is_best, x, MINUS_INFINITY), 1)
        tl.store(maxima + row * GROUPS + group, best, mask=group < GROUPS)


@triton.jit
def merged_measures(measures, row, rows, BLOCKS: tl.constexpr, B: tl.constexpr):
    """The peak, the least logit above minus infinity, log Σ exp(x), and the entropy -Σ p · log p of a row."""
    block = tl.arange(0, B)
    inside = block < BLOCKS
    measures += row * BLOCKS + block
    stride = rows.to(tl.int64) * BLOCKS
    peaks = tl.load(measures, mask=inside, other=MINUS_INFINITY)
    leasts = tl.load(measures + stride, mask=inside, other=-MINUS_INFINITY)
    totals = tl.load(measures + 2 * stride, mask=inside, other=0.0)
    products = tl.load(measures + 3 * stride, mask=inside, other=0.0)
    peak = tl.max(peaks, 0)
    below = tl.where(peaks == MINUS_INFINITY, 0.0, peaks - peak)
    scales = tl.where(peaks == MINUS_INFINITY, 0.0, tl.exp(below))
    total = tl.sum(totals * scales, 0)
    product = tl.sum(scales * (products + below * totals), 0)
    return peak, tl.min(leasts, 0), peak + tl.log(total), tl.log(total) - product / total


@triton.jit
def stays(x, token, bound):
    """Whether the cuts of a row keep the tokens."""
    kept, last = tl.load(bound), tl.load(bound + 1)
    typical_kept, typical_last = tl.load(bound + 2), tl.load(bound + 3)
    log_total = tl.load(bound + 4).to(tl.float32, bitcast=True)
    entropy = tl.load(bound + 5).to(tl.float32, bitcast=True)
    image, typical = to_int(x), typical_image(x, log_total, entropy)
    is_likely = (image > kept) | ((image == kept) & (token <= last))
    return is_likely & ((typical > typical_kept) | ((typical == typical_kept) & (token <= typical_last)))


@triton.jit
def typical_image(x, log_total, entropy):
    return to_int(-tl.abs(log_total - x - entropy))


@triton.jit
def to_int(value):
    """The image of a float32. Equal values have equal images, as do zeros of both signs."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_float(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
