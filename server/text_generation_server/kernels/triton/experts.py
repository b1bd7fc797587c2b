"""A mixture of experts: which experts each token goes to, and what they compute.

    a_p = silu(gate_e · x_t) · (up_e · x_t)        out_t = Σ_p score_p · down_e · a_p

for the pairs p of token t, with e the pair's expert; with what adapters add and with biases after the products, and
with the clamped gate of `ExpertWeights`, where there are such. Pairs lie in the order of their experts, so that a block
of pairs has one expert, whose weights a program reads once for all of them. The grid depends on the number of tokens
only: which blocks an expert has is read on the device, and blocks that no expert has end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_common.models.architecture import ClampedGate
from text_generation_common.quantized.values import Dense
from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import AdaptedPairs, ExpertWeights, Routes

MIN_PAIRS = 16  # least number of rows of a tl.dot
OUTPUTS, INPUTS = 64, 64  # outputs of a program, and inputs that it takes at a time
WARPS = 4


def route(logits_TE: Tensor, chosen: int, over_chosen: bool) -> Routes:
    tokens, experts = logits_TE.shape
    assert logits_TE.stride(1) == 1
    ids = torch.empty(tokens * chosen, dtype=torch.int32, device=logits_TE.device)
    scores = torch.empty(tokens * chosen, dtype=torch.float32, device=logits_TE.device)
    _route[(tokens,)](
        logits_TE, ids, scores, STRIDE=logits_TE.stride(0), EXPERTS=experts, CHOSEN=chosen,
        OVER_CHOSEN=over_chosen, E=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    in_order, pairs = torch.sort(ids, stable=True)
    bounds = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
    return Routes(scores, pairs.int(), torch.searchsorted(in_order, bounds, out_int32=True))


def experts(x_TH: Tensor, routes: Routes, weights: ExpertWeights, adapted: AdaptedPairs | None = None) -> Tensor:
    if not (isinstance(weights.gate_up, Dense) and isinstance(weights.down, Dense)):
        return reference.experts(x_TH, routes, weights, adapted)
    gate_up, down = weights.gate_up.values, weights.down.values
    clamped = weights.clamped or ClampedGate(0.0, 0.0)
    (tokens, width), (count, _, inner), pairs = x_TH.shape, down.shape, len(routes.pairs_P)
    assert x_TH.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    biases = weights.gate_up_bias, weights.down_bias
    assert all(bias is None or bias.is_contiguous() for bias in biases)
    opened = torch.empty((pairs, inner), dtype=x_TH.dtype, device=x_TH.device)
    parts = torch.empty((pairs, width), dtype=x_TH.dtype, device=x_TH.device)
    # An upper bound: the last block of each expert may be partly filled.
    blocks = min(pairs, triton.cdiv(pairs, MIN_PAIRS) + count)
    tiles = dict(
        EXPERTS=count, E=triton.next_power_of_2(count), CHOSEN=pairs // tokens, M=MIN_PAIRS, N=OUTPUTS, K=INPUTS,
        num_warps=WARPS,
    )  # fmt: skip
    _experts_up[(blocks, triton.cdiv(inner, OUTPUTS))](
        x_TH, routes.pairs_P, routes.offsets, gate_up, biases[0], out=opened,
        addend=None if adapted is None else adapted.of_gate_up(x_TH, routes), WIDTH=width, INNER=inner,
        BIASED=biases[0] is not None, LIMIT=clamped.limit, SLOPE=clamped.slope, **tiles,
    )  # fmt: skip
    _experts_down[(blocks, triton.cdiv(width, OUTPUTS))](
        opened, routes.pairs_P, routes.offsets, routes.scores_P, down, bias=biases[1], out=parts,
        addend=None if adapted is None else adapted.of_down(opened), WIDTH=width, INNER=inner,
        BIASED=biases[1] is not None, **tiles,
    )  # fmt: skip
    return parts.view(tokens, -1, width).sum(1, dtype=torch.float32).to(x_TH.dtype)


def add_scored(x_TH: Tensor, y_TH: Tensor, inputs_TH: Tensor, weight_H: Tensor, addend: Tensor | None = None) -> Tensor:
    tokens, width = x_TH.shape
    assert all(x.is_contiguous() for x in (x_TH, y_TH, inputs_TH, weight_H))
    _add_scored[(tokens,)](
        x_TH, y_TH, inputs_TH, weight_H, addend, STRIDE=0 if addend is None else addend.stride(0), WIDTH=width,
        N=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return x_TH


@triton.jit
def _route(
    logits, ids, scores, STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, OVER_CHOSEN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A program: one token."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    values = tl.load(logits + token * STRIDE + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    total = 0.0
    if not OVER_CHOSEN:
        total = tl.sum(tl.exp(values - largest), 0)
    left = values
    if OVER_CHOSEN:
        for _ in range(CHOSEN):
            best = tl.max(left, 0)
            first = tl.min(tl.where(left == best, e, E), 0)
            total += tl.exp(best - largest)
            left = tl.where(e == first, float("-inf"), left)
        left = values
    for k in range(CHOSEN):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, e, E), 0)
        tl.store(ids + token * CHOSEN + k, first)
        tl.store(scores + token * CHOSEN + k, tl.exp(best - largest) / total)
        left = tl.where(e == first, float("-inf"), left)


@triton.jit
def _find_block(offsets, block, EXPERTS: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """(expert, first pair, end of the expert's pairs) of a block of M pairs. Without an expert, first = end."""
    e = tl.arange(0, E)
    start = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    end = tl.load(offsets + e + 1, mask=e < EXPERTS, other=0)
    blocks = tl.where(e < EXPERTS, tl.cdiv(end - start, M), 0)
    after = tl.cumsum(blocks, 0)
    mine = (after - blocks <= block) & (block < after)
    expert = tl.sum(tl.where(mine, e, 0), 0)
    first = tl.sum(tl.where(mine, start + (block - (after - blocks)) * M, 0), 0)
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _experts_up(
    x, pairs, offsets, gate_up, bias, out, addend,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BIASED: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr,
    EXPERTS: tl.constexpr, E: tl.constexpr, CHOSEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program: N inner numbers of M pairs of one expert."""
    expert, first, end = _find_block(offsets, tl.program_id(0), EXPERTS, E, M)
    if first >= end:
        return
    dtype = out.dtype.element_ty
    at_M = first + tl.arange(0, M)
    pair_M = tl.load(pairs + at_M, mask=at_M < end, other=0)
    row_M = (pair_M // CHOSEN).to(tl.int64) * WIDTH
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    weights = gate_up + expert.to(tl.int64) * (2 * INNER * WIDTH)
    gate_MN = tl.zeros([M, N], dtype=tl.float32)
    up_MN = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, WIDTH, K):
        there = start + k < WIDTH
        x_MK = tl.load(x + row_M[:, None] + start + k[None, :], mask=(at_M < end)[:, None] & there[None, :], other=0.0)
        inside_KN = there[:, None] & (n < INNER)[None, :]
        at_KN = n[None, :].to(tl.int64) * WIDTH + start + k[:, None]
        gate_KN = tl.load(weights + at_KN, mask=inside_KN, other=0.0)
        up_KN = tl.load(weights + INNER * WIDTH + at_KN, mask=inside_KN, other=0.0)
        gate_MN = tl.dot(x_MK, gate_KN, gate_MN, input_precision="ieee")
        up_MN = tl.dot(x_MK, up_KN, up_MN, input_precision="ieee")
    if addend is not None:
        addend_MN = addend + at_M[:, None].to(tl.int64) * (2 * INNER) + n[None, :]
        inside_MN = (at_M < end)[:, None] & (n < INNER)[None, :]
        gate_MN += tl.load(addend_MN, mask=inside_MN, other=0.0)
        up_MN += tl.load(addend_MN + INNER, mask=inside_MN, other=0.0)
    if BIASED:
        bias_N = bias + expert.to(tl.int64) * (2 * INNER) + n
        gate_MN += tl.load(bias_N, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        up_MN += tl.load(bias_N + INNER, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
    gate_MN = gate_MN.to(dtype).to(tl.float32)
    if LIMIT > 0:
        up_MN = up_MN.to(dtype).to(tl.float32)
        # Unlike a minimum, a comparison keeps NaN.
        gate_MN = tl.where(gate_MN > LIMIT, LIMIT, gate_MN)
        up_MN = tl.where(up_MN > LIMIT, LIMIT, tl.where(up_MN < -LIMIT, -LIMIT, up_MN))
        opened_MN = (up_MN + 1.0) * gate_MN / (1.0 + tl.exp(-SLOPE * gate_MN))
    else:
        opened_MN = gate_MN / (1.0 + tl.exp(-gate_MN)) * up_MN.to(dtype).to(tl.float32)
    place = out + at_M[:, None].to(tl.int64) * INNER + n[None, :]
    tl.store(place, opened_MN.to(dtype), mask=(at_M < end)[:, None] & (n < INNER)[None, :])


@triton.jit
def _experts_down(
    x, pairs, offsets, scores, down, bias, out, addend,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BIASED: tl.constexpr, EXPERTS: tl.constexpr, E: tl.constexpr,
    CHOSEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program: N outputs of M pairs of one expert, stored in the order of the pairs' numbers."""
    expert, first, end = _find_block(offsets, tl.program_id(0), EXPERTS, E, M)
    if first >= end:
        return
    dtype = out.dtype.element_ty
    at_M = first + tl.arange(0, M)
    pair_M = tl.load(pairs + at_M, mask=at_M < end, other=0)
    n = tl.program_id(1) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    weights = down + expert.to(tl.int64) * (WIDTH * INNER)
    sum_MN = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, INNER, K):
        there = start + k < INNER
        row = x + at_M[:, None].to(tl.int64) * INNER + start
        x_MK = tl.load(row + k[None, :], mask=(at_M < end)[:, None] & there[None, :], other=0.0)
        at_KN = n[None, :].to(tl.int64) * INNER + start + k[:, None]
        w_KN = tl.load(weights + at_KN, mask=there[:, None] & (n < WIDTH)[None, :], other=0.0)
        sum_MN = tl.dot(x_MK, w_KN, sum_MN, input_precision="ieee")
    if addend is not None:
        addend_MN = addend + at_M[:, None].to(tl.int64) * WIDTH + n[None, :]
        sum_MN += tl.load(addend_MN, mask=(at_M < end)[:, None] & (n < WIDTH)[None, :], other=0.0)
    if BIASED:
        bias_N = bias + expert.to(tl.int64) * WIDTH + n
        sum_MN += tl.load(bias_N, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    score_M = tl.load(scores + pair_M, mask=at_M < end, other=0.0).to(dtype).to(tl.float32)
    part_MN = sum_MN.to(dtype).to(tl.float32) * score_M[:, None]
    place = out + pair_M[:, None].to(tl.int64) * WIDTH + n[None, :]
    tl.store(place, part_MN.to(dtype), mask=(at_M < end)[:, None] & (n < WIDTH)[None, :])


@triton.jit
def _add_scored(x, y, inputs, weight, addend, STRIDE: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):
    """Each program computes one token: x += y · sigmoid(inputs · weight + addend)."""
    n = tl.arange(0, N)
    inside = n < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + n
    product_N = tl.load(inputs + row, mask=inside, other=0.0).to(tl.float32)
    product_N *= tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    logit = tl.sum(product_N, 0)
    if addend is not None:
        logit += tl.load(addend + tl.program_id(0).to(tl.int64) * STRIDE)
    score = 1.0 / (1.0 + tl.exp(-logit))
    sum_N = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    sum_N += tl.load(y + row, mask=inside, other=0.0).to(tl.float32) * score
    tl.store(x + row, sum_N.to(x.dtype.element_ty), mask=inside)
