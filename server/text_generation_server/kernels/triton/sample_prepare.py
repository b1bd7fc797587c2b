"""Checks a step's logits, and prepares them for cuts. Many programs share a row: each reads and writes one block.

The rows that ask for a cut are divided by their temperatures here. For each group of GROUP neighbouring tokens the
first kernel stores the largest logit, and for each block the peak and the least logit. When the row's peak is known,
the second kernel stores for each block the sum of the tokens' weights, and the sum of weights times halvings, both as
`interface.Kernels.sample` defines them: in integers, so that their order does not matter.

For rows whose only cut is typical-p, a third kernel stores the logit of each group's most typical token instead of the
largest logit. Which token is the most typical is known only when the blocks' sums are.

No operation of a weight may be fused with the next, or its bits would not be the reference's: kernels that weigh are
compiled without fusion.

The image of a number is an int32; images have the same order as the numbers. The cuts of a row are described by a bound
(kept, last): tokens stay if their image is greater than `kept`, or equal to `kept` with an id of at most `last`. For
typical-p there is a second bound, for the image of minus the distance between a token's halvings and their mean.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels import interface
from text_generation_server.kernels.interface import Choices

WARPS = 8
GROUP = 16
# Words of a row's bounds: kept, last, the same for typical-p, peak, mean of the halvings.
BOUND_WORDS = 6
LARGEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
MINUS_INFINITY = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(interface.LOG2E)
MAX_HALVINGS = tl.constexpr(interface.MAX_HALVINGS)
C5, C4, C3, C2, C1, C0 = (tl.constexpr(coefficient) for coefficient in interface.HALVING)


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of R rows, undefined for rows that ask for no cut."""

    maxima_RG: Tensor  # float32: the largest logit of each group, or the logit of its most typical token
    extremes: Tensor  # float32 [2, R, blocks]: the largest and the least logit of each block
    sums: Tensor  # int64 [2, R, blocks]: Σ weight, Σ weight · halvings
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
    extremes = torch.empty((2, rows, blocks), device=logits_RV.device)
    sums = torch.empty((2, rows, blocks), dtype=torch.int64, device=logits_RV.device)
    cuts = {
        "top_k_R": choices.top_k_R, "top_p_R": choices.top_p_R, "log_min_p_R": choices.log_min_p_R,
        "typical_p_R": choices.typical_p_R,
    }  # fmt: skip
    sizes = {"VOCABULARY": vocabulary, "STRIDE": logits_RV.stride(0), "WIDTH": width(logits_RV), "BLOCK": block}
    _prepare_block[(rows, blocks)](
        logits_RV, parts, maxima, extremes, choices.temperature_R, rows=rows, is_checked=int(is_checked), **cuts,
        **sizes, GROUP=group, GROUPS=groups, num_warps=WARPS,
    )  # fmt: skip
    merged = {"BLOCKS": blocks, "B": triton.next_power_of_2(blocks), "num_warps": WARPS, "enable_fp_fusion": False}
    _weigh_block[(rows, blocks)](
        logits_RV, extremes, sums, choices.top_p_R, choices.typical_p_R, rows=rows, **sizes, **merged
    )  # fmt: skip
    if choices.any_typical:
        _most_typical[(rows, blocks)](
            logits_RV, maxima, extremes, sums, rows=rows, **cuts, **sizes, **merged, GROUP=group, GROUPS=groups
        )  # fmt: skip
    return Measures(maxima, extremes, sums, group)


def width(logits_RV: Tensor) -> int:
    """Number of columns that kernels load and store in a row. If rows have columns of padding, the number is a multiple
    of 4, so that a thread loads and stores 16 bytes at a time."""
    return min(logits_RV.stride(0), -(-logits_RV.shape[1] // 4) * 4)


@triton.jit
def asks_for_cut(row, top_k_R, top_p_R, log_min_p_R, typical_p_R):
    ranks = (tl.load(top_k_R + row) > 0) | (tl.load(top_p_R + row) < 1.0)
    return ranks | (tl.load(log_min_p_R + row) > MINUS_INFINITY) | (tl.load(typical_p_R + row) < 1.0)


@triton.jit
def asks_for_typical_only(row, top_k_R, top_p_R, log_min_p_R, typical_p_R):
    others = (
        (tl.load(top_k_R + row) > 0) | (tl.load(top_p_R + row) < 1.0) | (tl.load(log_min_p_R + row) > MINUS_INFINITY)
    )
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
    logits, words, maxima, extremes, temperature_R, top_k_R, top_p_R, log_min_p_R, typical_p_R, rows, is_checked,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = row * tl.num_programs(1) + block
    is_cut = asks_for_cut(row, top_k_R, top_p_R, log_min_p_R, typical_p_R)
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
            extremes += here
            tl.store(extremes, peak)
            least = -tl.max(tl.where(x == MINUS_INFINITY, MINUS_INFINITY, -x), 0)
            tl.store(extremes + rows.to(tl.int64) * tl.num_programs(1), least)


@triton.jit(do_not_specialize=["rows"])
def _weigh_block(
    logits, extremes, sums, top_p_R, typical_p_R, rows,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(top_p_R + row) < 1.0) | (tl.load(typical_p_R + row) < 1.0):
        peak, _ = merged_extremes(extremes, row, rows, BLOCKS, B)
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * STRIDE + token, mask=token < WIDTH, other=MINUS_INFINITY)
        x = tl.where(token < VOCABULARY, x, MINUS_INFINITY)
        weight, product = weigh(x, peak)
        sums += row * BLOCKS + block
        tl.store(sums, tl.sum(weight, 0))
        tl.store(sums + rows.to(tl.int64) * BLOCKS, tl.sum(product, 0))


@triton.jit(do_not_specialize=["rows"])
def _most_typical(
    logits, maxima, extremes, sums, top_k_R, top_p_R, log_min_p_R, typical_p_R, rows,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    B: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if asks_for_typical_only(row, top_k_R, top_p_R, log_min_p_R, typical_p_R):
        peak, _ = merged_extremes(extremes, row, rows, BLOCKS, B)
        _, mean = merged_sums(sums, row, rows, BLOCKS, B)
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * STRIDE + token, mask=token < WIDTH, other=0.0)
        x = tl.reshape(tl.where(token < VOCABULARY, x, MINUS_INFINITY), [BLOCK // GROUP, GROUP])
        image = typical_image(x, peak, mean)
        is_best = image == tl.max(image, 1)[:, None]
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        best = tl.max(tl.where(is_best, x, MINUS_INFINITY), 1)
        tl.store(maxima + row * GROUPS + group, best, mask=group < GROUPS)


@triton.jit
def merged_extremes(extremes, row, rows, BLOCKS: tl.constexpr, B: tl.constexpr):
    """The peak of a row, and its least logit above minus infinity. Without such a logit both are 0, so that nothing
    is computed from them that is not a number."""
    block = tl.arange(0, B)
    inside = block < BLOCKS
    extremes += row * BLOCKS + block
    peaks = tl.load(extremes, mask=inside, other=MINUS_INFINITY)
    leasts = tl.load(extremes + rows.to(tl.int64) * BLOCKS, mask=inside, other=-MINUS_INFINITY)
    peak = tl.max(peaks, 0)
    peak = tl.where(peak == MINUS_INFINITY, 0.0, peak)
    return peak, tl.minimum(tl.min(leasts, 0), peak)


@triton.jit
def merged_sums(sums, row, rows, BLOCKS: tl.constexpr, B: tl.constexpr):
    """The sum of the weights of a row, and the mean of its halvings."""
    block = tl.arange(0, B)
    inside = block < BLOCKS
    sums += row * BLOCKS + block
    total = tl.sum(tl.load(sums, mask=inside, other=0), 0)
    product = tl.sum(tl.load(sums + rows.to(tl.int64) * BLOCKS, mask=inside, other=0), 0)
    return total, mean_of(total, product)


@triton.jit
def mean_of(total, product):
    # If the row asks for no mass, both are undefined, and the mean is not used.
    return (product.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)).to(tl.float32)


@triton.jit
def halvings(x, peak):
    """How many times a token's likelihood is half of the largest one. The minimum changes nothing, and keeps a compiler
    from fusing the product with a difference that follows."""
    return tl.minimum((peak - x) * LOG2E, LARGEST)


@triton.jit
def weigh(x, peak):
    """The weights of tokens, and weights times halvings, int64. To be called in kernels without fusion."""
    h = tl.minimum(halvings(x, peak), MAX_HALVINGS)
    whole = h.to(tl.int32)
    f = h - whole.to(tl.float32)
    y = ((((f * C5 + C4) * f + C3) * f + C2) * f + C1) * f + C0
    weight = ((y * 1073741824.0).to(tl.int32).to(tl.int64) << 8) >> whole.to(tl.int64)
    return weight, (weight * (h * 1048576.0).to(tl.int32).to(tl.int64)) >> 20


@triton.jit
def stays(x, token, bound):
    """Whether the cuts of a row keep the tokens."""
    kept, last = tl.load(bound), tl.load(bound + 1)
    typical_kept, typical_last = tl.load(bound + 2), tl.load(bound + 3)
    peak = tl.load(bound + 4).to(tl.float32, bitcast=True)
    mean = tl.load(bound + 5).to(tl.float32, bitcast=True)
    image, typical = to_int(x), typical_image(x, peak, mean)
    is_likely = (image > kept) | ((image == kept) & (token <= last))
    return is_likely & ((typical > typical_kept) | ((typical == typical_kept) & (token <= typical_last)))


@triton.jit
def typical_image(x, peak, mean):
    return to_int(-tl.abs(halvings(x, peak) - mean))


@triton.jit
def to_int(value):
    """The image of a float32. Equal values have equal images, as do zeros of both signs."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_float(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
