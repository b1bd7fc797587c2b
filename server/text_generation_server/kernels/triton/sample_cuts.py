"""Top-k, top-p, min-p and typical-p without a sort: excluded tokens get the logit minus infinity.

Top-k, top-p and typical-p rank the tokens: the first two by logit, typical-p by how near a token's surprise (-log p) is
to the entropy; equal tokens by id. A token is kept if the total weight of the tokens before it is less than a target:
for top-k each token has weight 1 and the target is k; otherwise a token's weight is its probability and the target is a
mass. With f(v) the weight of all tokens that rank at v or better, the last kept value is

    K = max { v : f(v) ≥ target },

found by bisection. Both bounds are values of tokens. Each pass over the row halves the interval between them and moves
the bounds to the next values of tokens. Midpoints are taken alternately between the bounds' values and between their
images in the integers, which have the same order: the first kind is quick for usual logits, the second kind always
ends.

Tokens that rank before K stay, tokens after K go, and of the tokens at K the first ones by id stay.

Counts are exact. Masses are float32 sums, in a tree that does not depend on where a bound is, so f is monotonic. If the
mass before a token is within about 1e-6 of the target, another order of summation may decide otherwise.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import Choices

WARPS = 16
BLOCKS = 2  # blocks (of the other sampling kernels' size) that a program reads at a time
MAX_VOCABULARY = 1 << 24  # float32 represents counts below this number exactly
MINUS_INFINITY = tl.constexpr(float("-inf"))
LARGEST_INT = tl.constexpr(2**31 - 1)
SMALLEST_INT = tl.constexpr(-(2**31))
SMALLEST_TARGET = tl.constexpr(1e-30)  # greater than 0, so that the first token always stays


def cut(logits_RV: Tensor, choices: Choices, block: int) -> None:
    """Applies top-k, top-p, min-p and typical-p to the logits of each row that uses one of them. Divides these logits
    by the row's temperature first.
    """
    rows, vocabulary = logits_RV.shape
    assert vocabulary < MAX_VOCABULARY
    _cut[(rows,)](
        logits_RV, choices.temperature_R, choices.top_k_R, choices.top_p_R, choices.min_p_R, choices.typical_p_R,
        VOCABULARY=vocabulary, BLOCK=BLOCKS * block, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def asks_for_cut(row, top_k_R, top_p_R, min_p_R, typical_p_R):
    ranks = (tl.load(top_k_R + row) > 0) | (tl.load(top_p_R + row) < 1.0)
    return ranks | (tl.load(min_p_R + row) > 0.0) | (tl.load(typical_p_R + row) < 1.0)


@triton.jit
def _cut(
    logits, temperature_R, top_k_R, top_p_R, min_p_R, typical_p_R, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program processes one row."""
    i = tl.program_id(0)
    if asks_for_cut(i, top_k_R, top_p_R, min_p_R, typical_p_R):
        row = logits + i.to(tl.int64) * VOCABULARY
        peak = _divide(row, tl.load(temperature_R + i), VOCABULARY, BLOCK)
        top_k = tl.load(top_k_R + i)
        if (top_k > 0) & (top_k < VOCABULARY):
            _keep(row, top_k.to(tl.float32), 0.0, 0.0, VOCABULARY, BLOCK, MASS=False, TYPICAL=False)
        top_p = tl.load(top_p_R + i)
        if top_p < 1.0:
            log_total, _ = _measure(row, peak, VOCABULARY, BLOCK)
            _keep(row, top_p, log_total, 0.0, VOCABULARY, BLOCK, MASS=True, TYPICAL=False)
        min_p = tl.load(min_p_R + i)
        if min_p > 0.0:
            _keep_from(row, peak + tl.log(min_p), VOCABULARY, BLOCK)
        typical_p = tl.load(typical_p_R + i)
        if typical_p < 1.0:
            log_total, entropy = _measure(row, peak, VOCABULARY, BLOCK)
            _keep(row, typical_p, log_total, entropy, VOCABULARY, BLOCK, MASS=True, TYPICAL=True)


@triton.jit
def _divide(row, temperature, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Divides a row by its temperature, and returns its largest logit."""
    peaks = tl.full([BLOCK], MINUS_INFINITY, tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < VOCABULARY, other=MINUS_INFINITY)
        x = tl.div_rn(x, temperature)
        tl.store(row + token, x, mask=token < VOCABULARY)
        peaks = tl.maximum(peaks, x)
    tl.debug_barrier()
    return tl.max(peaks, 0)


@triton.jit
def _measure(row, peak, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Returns log Σ exp(x), and the entropy -Σ p · log p."""
    totals, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < VOCABULARY, other=MINUS_INFINITY) - peak
        weight = tl.exp(x)
        totals += weight
        products += weight * tl.where(x == MINUS_INFINITY, 0.0, x)
    total = tl.sum(totals, 0)
    return peak + tl.log(total), tl.log(total) - tl.sum(products, 0) / total


@triton.jit
def _keep(
    row, target, log_total, entropy, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
):  # fmt: skip
    """Keeps a token if the total weight of the tokens that rank before it is less than `target`."""
    target = tl.maximum(target, SMALLEST_TARGET)
    low, high = _bounds(row, log_total, entropy, VOCABULARY, BLOCK, TYPICAL)
    above = 0.0  # total weight of the tokens that rank before `high`
    turn = 0
    while low < high:
        middle = _middle(low, high, turn)
        mass, next_up, next_down = _look(
            row, middle, log_total, entropy, VOCABULARY, BLOCK, MASS=MASS, TYPICAL=TYPICAL
        )  # fmt: skip
        is_enough = mass >= target
        low = tl.where(is_enough, next_up, low)
        high = tl.where(is_enough, high, next_down)
        above = tl.where(is_enough, above, mass)
        turn += 1
    equals = 0.0  # total weight of the tokens at the bound, up to this block
    for first in range(0, VOCABULARY, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < VOCABULARY, other=MINUS_INFINITY)
        image = _image(x, log_total, entropy, TYPICAL)
        weight = tl.where(image == low, _weight(x, log_total, MASS), 0.0)
        before = above + equals + (tl.cumsum(weight, 0) - weight)
        stays = (image > low) | ((image == low) & (before < target))
        tl.store(row + token, tl.full([BLOCK], MINUS_INFINITY, tl.float32), mask=(token < VOCABULARY) & (stays == 0))
        equals += tl.sum(weight, 0)
    tl.debug_barrier()


@triton.jit
def _look(
    row, middle, log_total, entropy, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
):  # fmt: skip
    """One pass over the row: the weight of the tokens that rank at `middle` or better, the least image among these
    tokens, and the largest image below.
    """
    weights = tl.zeros([BLOCK], tl.float32)
    ups, downs = tl.full([BLOCK], LARGEST_INT, tl.int32), tl.full([BLOCK], SMALLEST_INT, tl.int32)
    for first in range(0, VOCABULARY, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < VOCABULARY, other=MINUS_INFINITY)
        image = _image(x, log_total, entropy, TYPICAL)
        is_up = image >= middle
        weights += tl.where(is_up, _weight(x, log_total, MASS), 0.0)
        ups = tl.minimum(ups, tl.where(is_up, image, LARGEST_INT))
        downs = tl.maximum(downs, tl.where(is_up, SMALLEST_INT, image))
    return tl.sum(weights, 0), tl.min(ups, 0), tl.max(downs, 0)


@triton.jit
def _bounds(row, log_total, entropy, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, TYPICAL: tl.constexpr):
    """The least and the largest image of the tokens that are not excluded yet."""
    lows, highs = tl.full([BLOCK], LARGEST_INT, tl.int32), tl.full([BLOCK], SMALLEST_INT, tl.int32)
    for first in range(0, VOCABULARY, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < VOCABULARY, other=MINUS_INFINITY)
        image = _image(x, log_total, entropy, TYPICAL)
        lows = tl.minimum(lows, tl.where(x == MINUS_INFINITY, LARGEST_INT, image))
        highs = tl.maximum(highs, image)
    return tl.min(lows, 0), tl.max(highs, 0)


@triton.jit
def _keep_from(row, least, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Keeps the logits that are at least `least`, and excludes the others."""
    for first in range(0, VOCABULARY, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < VOCABULARY, other=0.0)
        tl.store(
            row + token, tl.full([BLOCK], MINUS_INFINITY, tl.float32), mask=(token < VOCABULARY) & (x < least)
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def _weight(x, log_total, MASS: tl.constexpr):
    return tl.exp(x - log_total) if MASS else tl.where(x == MINUS_INFINITY, 0.0, 1.0)


@triton.jit
def _image(x, log_total, entropy, TYPICAL: tl.constexpr):
    """A token's rank value as an int32 with the same order. Equal values have equal images, as do zeros of both
    signs.
    """
    value = x
    if TYPICAL:
        value = -tl.abs(log_total - x - entropy)
    return _to_int(tl.where(value == 0.0, 0.0, value))


@triton.jit
def _middle(low, high, turn):
    """A midpoint above `low` and at most `high`."""
    by_image = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up; low + high could overflow
    by_value = _to_int(0.5 * _to_float(low) + 0.5 * _to_float(high))
    is_good = ((turn & 1) == 0) & (by_value > low) & (by_value <= high)
    return tl.where(is_good, by_value, by_image)


@triton.jit
def _to_int(value):
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _to_float(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
