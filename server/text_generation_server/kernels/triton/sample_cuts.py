"""Top-k, top-p, min-p and typical-p without a sort: finds, for each row that asks for a cut, which tokens stay.

Top-k, top-p and typical-p rank the tokens: the first two by logit, typical-p by how near a token's halvings are to
their mean; equal tokens by id. A token is kept if the total weight of the tokens before it is less than a target:
for top-k each token has weight 1 and the target is k; otherwise weights and target are the integers of
`interface.Kernels.sample`. With f(v) the weight of all tokens that rank at v or better, the last kept value is

    K = max { v : f(v) ≥ target }.

Tokens that rank before K stay, tokens after K go, and of the tokens at K the first ones by id stay. So K and the last
id are the bound of a cut. Top-k, top-p and min-p rank alike, so one bound describes all three.

The kernels of `sample_prepare`, many programs for a row, have found which token of each group of neighbouring tokens
ranks first. Here one program for each row does the rest. Among these first tokens it searches for a floor, a value such
that the first tokens at the floor or above have the target's weight already: K is not below the floor. Then it lists
the groups whose first token is at the floor or above, and searches for K among the tokens of these groups only. For
usual logits they have some hundred tokens. For a flat row they have all tokens; as soon as few enough tokens are left
between the limits of K, those are listed one by one, and the weight of the tokens above is kept as a number.

Counts and masses are integers, so f has the same value in whatever order it is summed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import Choices
from text_generation_server.kernels.triton.sample_prepare import (
    BOUND_WORDS,
    MINUS_INFINITY,
    Measures,
    asks_for_cut,
    asks_for_typical_only,
    mean_of,
    merged_extremes,
    merged_sums,
    to_float,
    to_int,
    typical_image,
    weigh,
)
from text_generation_server.kernels.triton.sample_search import (
    LARGEST_INT,
    SMALLEST_INT,
    find_bound,
    items,
    look,
    narrow,
    pivots_between,
)

WARPS = 16
BLOCK_TILES = 4  # a block of the other sampling kernels has as many logits as this number of tiles here
MAX_VOCABULARY = 1 << 24  # the weights of this number of tokens have a sum below 2^63
IDS_PER_GROUP = 4  # a row's list of ids has room for this number of ids for each group
# Number of looks at the group maxima. A list with some groups too many costs less than another look.
COARSE_LOOKS = tl.constexpr(4)


def find_bounds(logits_RV: Tensor, choices: Choices, measures: Measures, block: int) -> Tensor:
    """int32 [R, BOUND_WORDS]: what `stays` reads, for the rows that ask for a cut. The logits must have been divided
    by the temperature."""
    rows, vocabulary = logits_RV.shape
    assert vocabulary < MAX_VOCABULARY
    groups, blocks = measures.maxima_RG.shape[1], measures.sums.shape[2]
    room = IDS_PER_GROUP * groups
    listed = torch.empty((rows, groups + room), dtype=torch.int32, device=logits_RV.device)
    bounds = torch.empty((rows, BOUND_WORDS), dtype=torch.int32, device=logits_RV.device)
    _find_bounds[(rows,)](
        logits_RV, measures.maxima_RG, measures.extremes, measures.sums, listed, bounds=bounds, top_k_R=choices.top_k_R,
        top_p_R=choices.top_p_R, log_min_p_R=choices.log_min_p_R, typical_p_R=choices.typical_p_R, rows=rows,
        VOCABULARY=vocabulary, STRIDE=logits_RV.stride(0), GROUP_SHIFT=measures.group.bit_length() - 1,
        GROUPS=groups, ROOM=room, BLOCKS=blocks, B=triton.next_power_of_2(blocks),
        TILE=max(block // BLOCK_TILES, measures.group), WORDS=BOUND_WORDS, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return bounds


@triton.jit(do_not_specialize=["rows"])
def _find_bounds(
    logits, maxima, extremes, sums, listed, bounds, top_k_R, top_p_R, log_min_p_R, typical_p_R, rows,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, GROUP_SHIFT: tl.constexpr, GROUPS: tl.constexpr,
    ROOM: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A program processes one row."""
    i = tl.program_id(0).to(tl.int64)
    if asks_for_cut(i, top_k_R, top_p_R, log_min_p_R, typical_p_R):
        row, maxima, groups = logits + i * STRIDE, maxima + i * GROUPS, listed + i * (GROUPS + ROOM)
        tokens = groups + GROUPS
        peak, least = merged_extremes(extremes, i, rows, BLOCKS, B)
        total, mean = merged_sums(sums, i, rows, BLOCKS, B)
        top_k, top_p = tl.load(top_k_R + i), tl.load(top_p_R + i)
        log_min_p, typical_p = tl.load(log_min_p_R + i), tl.load(typical_p_R + i)
        is_top_k = (top_k > 0) & (top_k < VOCABULARY)
        high, floor = to_int(peak), to_int(least)
        farthest = _farthest(peak, least, mean)
        nearest = tl.maximum(farthest, 0)  # the image of distance 0
        kept, last = SMALLEST_INT, LARGEST_INT
        likely = _least_likely(peak, log_min_p)
        if asks_for_typical_only(i, top_k_R, top_p_R, log_min_p_R, typical_p_R):
            farthest = _find_floor(
                maxima, _target(typical_p, total), farthest, nearest, peak, mean=mean, GROUPS=GROUPS, TILE=TILE,
                MASS=True, TYPICAL=True,
            )  # fmt: skip
            count = _list_groups(maxima, groups, farthest, peak, mean, GROUPS=GROUPS, TILE=TILE, TYPICAL=True)
        else:
            floor = _floor_of_logits(
                maxima,
                is_top_k,
                top_k,
                top_p,
                likely,
                low=floor,
                high=high,
                total=total,
                peak=peak,
                GROUPS=GROUPS,
                TILE=TILE,
            )
            count = _list_groups(maxima, groups, floor, 0.0, 0.0, GROUPS=GROUPS, TILE=TILE, TYPICAL=False)
        count = count << GROUP_SHIFT
        if is_top_k:
            kept, last = find_bound(
                row, groups, tokens, count, top_k, low=floor, high=high, kept=kept, last=last, peak=peak, mean=0.0,
                VOCABULARY=VOCABULARY, GROUP_SHIFT=GROUP_SHIFT, ROOM=ROOM, TILE=TILE, MASS=False, TYPICAL=False,
            )  # fmt: skip
        if top_p < 1.0:
            if is_top_k:
                total, mean = _measure(
                    row, groups, count, peak, kept, last=last, VOCABULARY=VOCABULARY, GROUP_SHIFT=GROUP_SHIFT, TILE=TILE
                )
            kept, last = find_bound(
                row, groups, tokens, count, _target(top_p, total), low=floor, high=high, kept=kept, last=last,
                peak=peak, mean=0.0, VOCABULARY=VOCABULARY, GROUP_SHIFT=GROUP_SHIFT, ROOM=ROOM, TILE=TILE, MASS=True,
                TYPICAL=False,
            )  # fmt: skip
        last = tl.where(likely > kept, LARGEST_INT, last)
        kept = tl.maximum(kept, likely)
        typical_kept, typical_last = SMALLEST_INT, LARGEST_INT
        if typical_p < 1.0:
            if kept > SMALLEST_INT:
                total, mean = _measure(
                    row, groups, count, peak, kept, last=last, VOCABULARY=VOCABULARY, GROUP_SHIFT=GROUP_SHIFT, TILE=TILE
                )
                farthest = _farthest(peak, least, mean)
            typical_kept, typical_last = find_bound(
                row, groups, tokens, count, _target(typical_p, total), low=farthest, high=nearest, kept=kept, last=last,
                peak=peak, mean=mean, VOCABULARY=VOCABULARY, GROUP_SHIFT=GROUP_SHIFT, ROOM=ROOM, TILE=TILE, MASS=True,
                TYPICAL=True,
            )  # fmt: skip
        bounds += i * WORDS
        tl.store(bounds, kept)
        tl.store(bounds + 1, last)
        tl.store(bounds + 2, typical_kept)
        tl.store(bounds + 3, typical_last)
        tl.store(bounds + 4, peak.to(tl.int32, bitcast=True))
        tl.store(bounds + 5, mean.to(tl.int32, bitcast=True))


@triton.jit
def _floor_of_logits(
    maxima, is_top_k, top_k, top_p, likely, low, high, total, peak, GROUPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The image of a logit, `low` or greater, that the bound of top-k is not below; without top-k, that the bound of
    top-p and min-p is not below."""
    floor = low
    if is_top_k:
        # Top-k changes the masses of top-p, so all tokens that top-k keeps must be listed.
        floor = _find_floor(
            maxima, top_k, low, high, peak, mean=0.0, GROUPS=GROUPS, TILE=TILE, MASS=False, TYPICAL=False
        )
    else:
        if top_p < 1.0:
            floor = _find_floor(
                maxima, _target(top_p, total), low, high, peak, mean=0.0, GROUPS=GROUPS, TILE=TILE, MASS=True,
                TYPICAL=False,
            )  # fmt: skip
        floor = tl.maximum(floor, likely)
    return floor


@triton.jit
def _least_likely(peak, log_min_p):
    """The image of the least logit that min-p keeps."""
    image = SMALLEST_INT
    if log_min_p > MINUS_INFINITY:
        image = to_int(peak + log_min_p)
    return image


@triton.jit
def _target(share, total):
    """What the weights of the tokens before a kept token may not reach. It is at least 1: the first token stays."""
    return tl.maximum((share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _farthest(peak, least, mean):
    """The typical image of the token whose halvings are farthest from their mean, or a lower image."""
    return tl.minimum(typical_image(peak, peak, mean), typical_image(least, peak, mean))


@triton.jit
def _find_floor(
    maxima, target, low, high, peak, mean,
    GROUPS: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """A value that K is not below: `low`, or a greater value such that the maxima from there on have the target's
    weight."""
    floor = low
    turn = 0
    while (low < high) & (turn < COARSE_LOOKS):
        pivots = pivots_between(low, high, turn)
        weights, up, down, _ = look(
            maxima, maxima, 0, GROUPS, pivots, low=low, high=high, kept=SMALLEST_INT, last=LARGEST_INT, peak=peak,
            mean=mean, VOCABULARY=GROUPS, TILE=TILE, LISTED=False, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
        floor = tl.maximum(floor, tl.max(tl.where(weights >= target, pivots, floor), 0))
        low, high = narrow(pivots, weights >= target, low, high, up, down=down)
        turn += 1
    return floor


@triton.jit
def _list_groups(
    maxima, listed, floor, peak, mean, GROUPS: tl.constexpr, TILE: tl.constexpr, TYPICAL: tl.constexpr
):  # fmt: skip
    """Lists the groups whose maximum is at the floor or above, in order. Returns their number."""
    count = 0
    for first in range(0, GROUPS, TILE):
        group = first + tl.arange(0, TILE)
        x = tl.load(maxima + group, mask=group < GROUPS, other=MINUS_INFINITY)
        image = typical_image(x, peak, mean) if TYPICAL else to_int(x)
        is_listed = ((image >= floor) & (x > MINUS_INFINITY)).to(tl.int32)
        place = count + tl.cumsum(is_listed, 0) - 1
        tl.store(listed + place, group, mask=is_listed != 0)
        count += tl.sum(is_listed, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _measure(
    row, groups, count, peak, kept, last, VOCABULARY: tl.constexpr, GROUP_SHIFT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The sum of the weights, and the mean of the halvings, of the listed tokens that the bound (kept, last) keeps."""
    totals, products = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for first in range(0, count, TILE):
        _, image, weight = items(
            row, groups, GROUP_SHIFT, first, count, kept=kept, last=last, peak=peak, mean=0.0, VOCABULARY=VOCABULARY,
            TILE=TILE, LISTED=True, MASS=True, TYPICAL=False,
        )  # fmt: skip
        _, product = weigh(tl.where(weight > 0, to_float(image), MINUS_INFINITY), peak)
        totals += weight
        products += product
    total = tl.sum(totals, 0)
    return total, mean_of(total, tl.sum(products, 0))
