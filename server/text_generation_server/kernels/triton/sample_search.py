"""The search of a row's program for the bound of a cut, K and the last id at K, as `sample_cuts` defines them.

A look computes f at PIVOTS values between a lower and an upper limit of K, and moves both limits to the nearest pivots
and to the nearest values of tokens. The pivots of two looks in three are evenly spaced between the limits' values, and
the pivots of the third look between the limits' images in the integers, which have the same order. The first kind is
quick for usual logits, the second kind always ends.
"""

import triton
import triton.language as tl

from text_generation_server.kernels.triton.sample_prepare import (
    MINUS_INFINITY,
    to_float,
    to_int,
    typical_image,
    weigh,
)

PIVOTS = tl.constexpr(8)
LARGEST_INT = tl.constexpr(2**31 - 1)
SMALLEST_INT = tl.constexpr(-(2**31))  # below the image of minus infinity


@triton.jit
def find_bound(
    row, groups, tokens, count, target, low, high, kept, last, peak, mean,
    VOCABULARY: tl.constexpr, GROUP_SHIFT: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
):  # fmt: skip
    """Returns K and the last id at K, for the listed tokens that the bound (kept, last) keeps. K is in low … high.
    `tokens` has room for ROOM ids. The target is at least 1: int64 for masses, int32 for counts."""
    listed = groups
    shift = GROUP_SHIFT
    base = target * 0  # total weight of the tokens that are not listed, and rank before the listed ones
    above = target * 0  # total weight of the tokens that rank before `high`
    turn = 0
    while low < high:
        pivots = pivots_between(low, high, turn)
        weights, up, down, between = look(
            row, listed, shift, count, pivots, low=low, high=high, kept=kept, last=last, peak=peak, mean=mean,
            VOCABULARY=VOCABULARY, TILE=TILE, LISTED=True, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
        weights += base
        above = tl.maximum(above, tl.max(tl.where(weights >= target, 0, weights), 0))
        low, high = narrow(pivots, weights >= target, low, high, up, down=down)
        turn += 1
        if (low < high) & (count > TILE) & (shift > 0) & (between <= ROOM):
            count = _list_tokens(
                row, groups, GROUP_SHIFT, count, tokens, low=low, high=high, kept=kept, last=last, peak=peak, mean=mean,
                VOCABULARY=VOCABULARY, TILE=TILE, TYPICAL=TYPICAL,
            )  # fmt: skip
            listed = tokens
            shift = 0
            base = above
    equals = tl.zeros([TILE], tl.int32)
    for first in range(0, count, TILE):
        _, image, _ = items(
            row, listed, shift, first, count, kept=kept, last=last, peak=peak, mean=mean, VOCABULARY=VOCABULARY,
            TILE=TILE, LISTED=True, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
        equals += (image == low).to(tl.int32)
    last_equal = LARGEST_INT
    if tl.sum(equals, 0) > 1:
        last_equal = _last_equal(
            row, listed, shift, count, target, above=above, bound=low, kept=kept, last=last, peak=peak, mean=mean,
            VOCABULARY=VOCABULARY, TILE=TILE, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
    return low, last_equal


@triton.jit
def _list_tokens(
    row, groups, shift, count, tokens, low, high, kept, last, peak, mean,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """Lists the tokens of the listed groups whose images are in low … high, in order. Returns their number."""
    listed = 0
    for first in range(0, count, TILE):
        token, image, _ = items(
            row, groups, shift, first, count, kept=kept, last=last, peak=peak, mean=mean, VOCABULARY=VOCABULARY,
            TILE=TILE, LISTED=True, MASS=False, TYPICAL=TYPICAL,
        )  # fmt: skip
        is_listed = ((image >= low) & (image <= high)).to(tl.int32)
        place = listed + tl.cumsum(is_listed, 0) - 1
        tl.store(tokens + place, token, mask=is_listed != 0)
        listed += tl.sum(is_listed, 0)
    tl.debug_barrier()
    return listed


@triton.jit
def _last_equal(
    row, listed, shift, count, target, above, bound, kept, last, peak, mean,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """The largest id of the tokens at `bound` for which the tokens that rank before it weigh less than the target."""
    weight_before = above  # total weight of the tokens that rank before the equal tokens of this tile
    last_equal = -1
    for first in range(0, count, TILE):
        token, image, weight = items(
            row, listed, shift, first, count, kept=kept, last=last, peak=peak, mean=mean, VOCABULARY=VOCABULARY,
            TILE=TILE, LISTED=True, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
        weight = tl.where(image == bound, weight, 0)
        before = weight_before + (tl.cumsum(weight, 0) - weight)
        last_equal = tl.maximum(last_equal, tl.max(tl.where((image == bound) & (before < target), token, -1), 0))
        weight_before += tl.sum(weight, 0)
    return last_equal


@triton.jit
def look(
    row, listed, shift, count, pivots, low, high, kept, last, peak, mean,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, MASS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """One pass over the items: for each pivot the weight of the items that rank at the pivot or better; of the items
    in low … high the least and the largest image, and the number of items."""
    weights, counts = tl.zeros([PIVOTS, TILE], tl.int64 if MASS else tl.int32), tl.zeros([TILE], tl.int32)
    ups, downs = tl.full([TILE], LARGEST_INT, tl.int32), tl.full([TILE], SMALLEST_INT, tl.int32)
    for first in range(0, count, TILE):
        _, image, weight = items(
            row, listed, shift, first, count, kept=kept, last=last, peak=peak, mean=mean, VOCABULARY=VOCABULARY,
            TILE=TILE, LISTED=LISTED, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
        weights += tl.where(image[None, :] >= pivots[:, None], weight[None, :], 0)
        between = (image >= low) & (image <= high)
        ups = tl.minimum(ups, tl.where(between, image, LARGEST_INT))
        downs = tl.maximum(downs, tl.where(between, image, SMALLEST_INT))
        counts += between.to(tl.int32)
    return tl.sum(weights, 1), tl.min(ups, 0), tl.max(downs, 0), tl.sum(counts, 0)


@triton.jit
def items(
    row, listed, shift, first, count, kept, last, peak, mean,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, MASS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """Ids, images and weights of TILE items: tokens of the listed groups of 2^shift tokens, or, if not LISTED, numbers
    of `row`. Items after the last of `count`, excluded tokens, and tokens that the bound (kept, last) does not keep
    have the least image and no weight."""
    place = first + tl.arange(0, TILE)
    inside = place < count
    token = place
    if LISTED:
        entry = place >> shift
        token = (tl.load(listed + entry, mask=inside, other=0) << shift) + (place - (entry << shift))
        inside = inside & (token < VOCABULARY)
    x = tl.load(row + token, mask=inside, other=MINUS_INFINITY)
    image = to_int(x)
    counts = (x > MINUS_INFINITY) & ((image > kept) | ((image == kept) & (token <= last)))
    if TYPICAL:
        image = typical_image(x, peak, mean)
    weight = counts.to(tl.int32)
    if MASS:
        weight, _ = weigh(x, peak)
    return token, tl.where(counts, image, SMALLEST_INT), tl.where(counts, weight, 0)


@triton.jit
def pivots_between(low, high, turn):
    """PIVOTS images above `low` and at most `high`. The last pivot is `high`."""
    j = tl.arange(0, PIVOTS) + 1
    lowest, highest = tl.full([PIVOTS], low, tl.int64), tl.full([PIVOTS], high, tl.int64)
    by_image = (lowest + (highest - lowest) * j // PIVOTS).to(tl.int32)
    share = j.to(tl.float32) / PIVOTS
    by_value = to_int(to_float(low) * (1 - share) + to_float(high) * share)
    pivots = tl.where(turn % 3 == 2, by_image, by_value)
    return tl.where(j == PIVOTS, high, tl.minimum(tl.maximum(pivots, low + 1), high))


@triton.jit
def narrow(pivots, is_enough, low, high, up, down):
    """Moves the bounds to the nearest pivots, and from there to the nearest images between the bounds."""
    next_low = tl.max(tl.where(is_enough, pivots, low), 0)
    next_high = tl.min(tl.where(is_enough, high, pivots - 1), 0)
    return tl.maximum(next_low, up), tl.minimum(next_high, down)
