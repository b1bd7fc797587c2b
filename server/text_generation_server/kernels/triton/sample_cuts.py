"""Top-k, top-p, min-p and typical-p without a sort: finds, for each row that asks for a cut, which tokens stay.

Top-k, top-p and typical-p rank the tokens: the first two by logit, typical-p by how near a token's surprise (-log p) is
to the entropy; equal tokens by id. A token is kept if the total weight of the tokens before it is less than a target:
for top-k each token has weight 1 and the target is k; otherwise a token's weight is its probability and the target is a
mass. With f(v) the weight of all tokens that rank at v or better, the last kept value is

    K = max { v : f(v) ≥ target }.

Tokens that rank before K stay, tokens after K go, and of the tokens at K the first ones by id stay. So K and the last
id are the bound of a cut. Top-k, top-p and min-p rank alike, so one bound describes all three.

The kernels of `sample_prepare`, many programs for a row, have found which token of each group of neighbouring tokens
ranks first. Here one program for each row does the rest. Among these first tokens it searches for a floor, a value such
that the first tokens at the floor or above have the target's weight already: K is not below the floor. Then it lists
the groups whose first token is at the floor or above, and searches for K among the tokens of these groups only. For
usual logits they have some hundred tokens. For a flat row they have all tokens; as soon as few enough tokens are left
between the limits of K, those are listed one by one, and the weight of the tokens above is kept as a number.

Counts are exact. Masses are float32 sums, in a tree that does not depend on the pivot, so f is monotonic. If the mass
before a token is within about 1e-6 of the target, another order of summation may decide otherwise.
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
    merged_measures,
    to_float,
    to_int,
    typical_image,
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
BLOCK_TILES = 2  # a block of the other sampling kernels has as many logits as this number of tiles here
MAX_VOCABULARY = 1 << 24  # float32 represents counts below this number exactly
IDS_PER_GROUP = 4  # a row's list of ids has room for this number of ids for each group
# Number of looks at the group maxima. A list with some groups too many costs less than another look.
COARSE_LOOKS = tl.constexpr(4)
# By this factor the mass of the maxima must exceed the target, because sums have rounding errors.
MARGIN = tl.constexpr(1.00001)


def find_bounds(logits_RV: Tensor, choices: Choices, measures: Measures, block: int) -> Tensor:
    """int32 [R, BOUND_WORDS]: what `stays` reads, for the rows that ask for a cut. The logits must have been divided
    by the temperature."""
    rows, vocabulary = logits_RV.shape
    assert vocabulary < MAX_VOCABULARY
    groups, blocks = measures.maxima_RG.shape[1], measures.of_blocks.shape[2]
    room = IDS_PER_GROUP * groups
    listed = torch.empty((rows, groups + room), dtype=torch.int32, device=logits_RV.device)
    bounds = torch.empty((rows, BOUND_WORDS), dtype=torch.int32, device=logits_RV.device)
    _find_bounds[(rows,)](
        logits_RV, measures.maxima_RG, measures.of_blocks, listed, bounds, choices.top_k_R, choices.top_p_R,
        choices.min_p_R, choices.typical_p_R, rows,
        VOCABULARY=vocabulary, STRIDE=logits_RV.stride(0), GROUP_SHIFT=measures.group.bit_length() - 1,
        GROUPS=groups, ROOM=room, BLOCKS=blocks, B=triton.next_power_of_2(blocks),
        TILE=max(block // BLOCK_TILES, measures.group), WORDS=BOUND_WORDS, num_warps=WARPS,
    )  # fmt: skip
    return bounds


@triton.jit(do_not_specialize=["rows"])
def _find_bounds(
    logits, maxima, measures, listed, bounds, top_k_R, top_p_R, min_p_R, typical_p_R, rows,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, GROUP_SHIFT: tl.constexpr, GROUPS: tl.constexpr,
    ROOM: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A program processes one row."""
    i = tl.program_id(0).to(tl.int64)
    if asks_for_cut(i, top_k_R, top_p_R, min_p_R, typical_p_R):
        row, maxima, groups = logits + i * STRIDE, maxima + i * GROUPS, listed + i * (GROUPS + ROOM)
        tokens = groups + GROUPS
        peak, least, log_total, entropy = merged_measures(measures, i, rows, BLOCKS, B)
        top_k, top_p = tl.load(top_k_R + i), tl.load(top_p_R + i)
        min_p, typical_p = tl.load(min_p_R + i), tl.load(typical_p_R + i)
        is_top_k = (top_k > 0) & (top_k < VOCABULARY)
        high, floor = to_int(peak), to_int(least)
        farthest = _farthest(peak, least, log_total, entropy)
        nearest = tl.maximum(farthest, 0)  # the image of distance 0
        kept, last = SMALLEST_INT, LARGEST_INT
        likely = _least_likely(peak, min_p)
        if asks_for_typical_only(i, top_k_R, top_p_R, min_p_R, typical_p_R):
            farthest = _find_floor(
                maxima, typical_p * MARGIN, farthest, nearest, log_total, entropy, GROUPS, TILE, MASS=True, TYPICAL=True
            )  # fmt: skip
            count = _list_groups(maxima, groups, farthest, log_total, entropy, GROUPS, TILE, TYPICAL=True)
        else:
            floor = _floor_of_logits(maxima, is_top_k, top_k, top_p, likely, floor, high, log_total, GROUPS, TILE)
            count = _list_groups(maxima, groups, floor, 0.0, 0.0, GROUPS, TILE, TYPICAL=False)
        count = count << GROUP_SHIFT
        if is_top_k:
            kept, last = find_bound(
                row, groups, tokens, count, top_k.to(tl.float32), floor, high, kept, last, 0.0, 0.0,
                VOCABULARY, GROUP_SHIFT, ROOM, TILE, MASS=False, TYPICAL=False,
            )  # fmt: skip
        if top_p < 1.0:
            if is_top_k:
                log_total, entropy = _measure(row, groups, count, peak, kept, last, VOCABULARY, GROUP_SHIFT, TILE)
            kept, last = find_bound(
                row, groups, tokens, count, top_p, floor, high, kept, last, log_total, 0.0,
                VOCABULARY, GROUP_SHIFT, ROOM, TILE, MASS=True, TYPICAL=False,
            )  # fmt: skip
        last = tl.where(likely > kept, LARGEST_INT, last)
        kept = tl.maximum(kept, likely)
        typical_kept, typical_last = SMALLEST_INT, LARGEST_INT
        if typical_p < 1.0:
            if kept > SMALLEST_INT:
                log_total, entropy = _measure(row, groups, count, peak, kept, last, VOCABULARY, GROUP_SHIFT, TILE)
                farthest = _farthest(peak, least, log_total, entropy)
            typical_kept, typical_last = find_bound(
                row, groups, tokens, count, typical_p, farthest, nearest, kept, last, log_total, entropy,
                VOCABULARY, GROUP_SHIFT, ROOM, TILE, MASS=True, TYPICAL=True,
            )  # fmt: skip
        bounds += i * WORDS
        tl.store(bounds, kept)
        tl.store(bounds + 1, last)
        tl.store(bounds + 2, typical_kept)
        tl.store(bounds + 3, typical_last)
        tl.store(bounds + 4, log_total.to(tl.int32, bitcast=True))
        tl.store(bounds + 5, entropy.to(tl.int32, bitcast=True))


@triton.jit
def _floor_of_logits(
    maxima, is_top_k, top_k, top_p, likely, low, high, log_total, GROUPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The image of a logit, `low` or greater, that the bound of top-k is not below; without top-k, that the bound of
    top-p and min-p is not below."""
    floor = low
    if is_top_k:
        # Top-k changes the masses of top-p, so all tokens that top-k keeps must be listed.
        floor = _find_floor(maxima, top_k.to(tl.float32), low, high, 0.0, 0.0, GROUPS, TILE, MASS=False, TYPICAL=False)
    else:
        if top_p < 1.0:
            floor = _find_floor(
                maxima, top_p * MARGIN, low, high, log_total, 0.0, GROUPS, TILE, MASS=True, TYPICAL=False
            )  # fmt: skip
        floor = tl.maximum(floor, likely)
    return floor


@triton.jit
def _least_likely(peak, min_p):
    """The image of the least logit that min-p keeps."""
    image = SMALLEST_INT
    if min_p > 0.0:
        image = to_int(peak + tl.log(min_p))
    return image


@triton.jit
def _farthest(peak, least, log_total, entropy):
    """The typical image of the token whose surprise is farthest from the entropy, or a lower image."""
    return tl.minimum(typical_image(peak, log_total, entropy), typical_image(least, log_total, entropy))


@triton.jit
def _find_floor(
    maxima, target, low, high, log_total, entropy,
    GROUPS: tl.constexpr, TILE: tl.constexpr, MASS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """A value that K is not below: `low`, or a greater value such that the maxima from there on have the target's
    weight."""
    floor = low
    turn = 0
    while (low < high) & (turn < COARSE_LOOKS):
        pivots = pivots_between(low, high, turn)
        weights, up, down, _ = look(
            maxima, maxima, 0, GROUPS, pivots, low, high, SMALLEST_INT, LARGEST_INT, log_total, entropy,
            GROUPS, TILE, LISTED=False, MASS=MASS, TYPICAL=TYPICAL,
        )  # fmt: skip
        floor = tl.maximum(floor, tl.max(tl.where(weights >= target, pivots, floor), 0))
        low, high = narrow(pivots, weights >= target, low, high, up, down)
        turn += 1
    return floor


@triton.jit
def _list_groups(
    maxima, listed, floor, log_total, entropy, GROUPS: tl.constexpr, TILE: tl.constexpr, TYPICAL: tl.constexpr
):  # fmt: skip
    """Lists the groups whose maximum is at the floor or above, in order. Returns their number."""
    count = 0
    for first in range(0, GROUPS, TILE):
        group = first + tl.arange(0, TILE)
        x = tl.load(maxima + group, mask=group < GROUPS, other=MINUS_INFINITY)
        image = typical_image(x, log_total, entropy) if TYPICAL else to_int(x)
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
    """Returns log Σ exp(x), and the entropy -Σ p · log p, of the listed tokens that the bound (kept, last) keeps."""
    totals, products = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for first in range(0, count, TILE):
        _, image, weight = items(
            row, groups, GROUP_SHIFT, first, count, kept, last, peak, 0.0, VOCABULARY, TILE,
            LISTED=True, MASS=True, TYPICAL=False,
        )  # fmt: skip
        totals += weight
        products += weight * tl.where(weight > 0.0, to_float(image) - peak, 0.0)
    total = tl.sum(totals, 0)
    return peak + tl.log(total), tl.log(total) - tl.sum(products, 0) / total
