"""What adapters add to a linear layer, out = (x downᵀ) upᵀ for each token and part of the layer, in float32. One kernel
multiplies by `down`, another by `up`. Each sum runs in an order of its own, so a token's bits depend on the token and
its adapter only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import AdapterMatrices, Routes

RANKS, INPUTS, OUTPUTS = 16, 256, 256  # numbers that a program has in registers


def adapt(x: Tensor, slots_T: Tensor, matrices: AdapterMatrices, routes: Routes | None = None) -> Tensor:
    inputs, (_, rank, outputs), parts, tokens = x.shape[1], matrices.up.shape, len(matrices.ends), len(slots_T)
    pairs = None if routes is None else routes.pairs_P
    assert x.is_contiguous() and matrices.down.is_contiguous() and matrices.up.is_contiguous()
    hidden = torch.empty((tokens, parts, rank), dtype=torch.float32, device=x.device)
    out = torch.empty((tokens, outputs), dtype=torch.float32, device=x.device)
    _adapt_down[(tokens, parts, triton.cdiv(rank, RANKS))](
        x, slots_T, matrices.down, matrices.ranks, hidden, pairs=pairs, CHOSEN=tokens // len(x), INPUTS=inputs,
        PARTS=parts, RANK=rank, ROWS=RANKS, COLUMNS=INPUTS,
    )  # fmt: skip
    _adapt_up[(tokens, triton.cdiv(outputs, OUTPUTS))](
        hidden, slots_T, matrices.up, matrices.ranks, matrices.bias, base=None, ends=matrices.ends_P, out=out,
        OUTPUTS=outputs, PARTS=parts, RANK=rank, COLUMNS=OUTPUTS,
    )  # fmt: skip
    return out


def pair_slots(slots_T: Tensor, routes: Routes) -> Tensor:
    pairs, experts = len(routes.pairs_P), len(routes.offsets) - 1
    out = torch.empty_like(routes.pairs_P)
    _pair_slots[(pairs,)](
        slots_T, routes.pairs_P, routes.offsets, out, EXPERTS=experts, E=triton.next_power_of_2(experts),
        CHOSEN=pairs // len(slots_T), num_warps=1,
    )  # fmt: skip
    return out


def adapt_embeddings(x_TH: Tensor, ids_T: Tensor, slots_T: Tensor, matrices: AdapterMatrices) -> Tensor:
    (tokens, width), (_, vocabulary, rank) = x_TH.shape, matrices.down.shape
    assert x_TH.is_contiguous() and matrices.down.is_contiguous() and matrices.up.is_contiguous()
    hidden = torch.empty((tokens, rank), dtype=torch.float32, device=x_TH.device)
    out = torch.empty_like(x_TH)
    _adapt_ids[(tokens,)](
        ids_T, slots_T, matrices.down, hidden, VOCABULARY=vocabulary, RANK=rank, ROWS=triton.next_power_of_2(rank)
    )
    _adapt_up[(tokens, triton.cdiv(width, OUTPUTS))](
        hidden, slots_T, matrices.up, matrices.ranks, None, base=x_TH, ends=matrices.ends_P, out=out, OUTPUTS=width,
        PARTS=1, RANK=rank, COLUMNS=OUTPUTS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _pair_slots(slots, pairs, offsets, out, EXPERTS: tl.constexpr, E: tl.constexpr, CHOSEN: tl.constexpr):
    """A program: one pair, whose expert is the number of experts that end before it."""
    at = tl.program_id(0)
    e = tl.arange(0, E)
    ends = tl.load(offsets + 1 + e, mask=e < EXPERTS, other=2**31 - 1)
    expert = tl.sum((ends <= at).to(tl.int32), 0)
    slot = tl.load(slots + tl.load(pairs + at) // CHOSEN)
    tl.store(out + at, tl.where(slot < 0, -1, slot * EXPERTS + expert))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _adapt_down(
    x, slots, down, ranks, hidden, pairs, CHOSEN: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        x_row = token
        if pairs is not None:
            x_row = (tl.load(pairs + token) // CHOSEN).to(tl.int64)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        within = row < tl.load(ranks + slot * PARTS + part)
        first = down + (slot * PARTS + part) * RANK * INPUTS
        sums = tl.zeros([ROWS], tl.float32)
        for start in range(0, INPUTS, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < INPUTS
            value = tl.load(x + x_row * INPUTS + column, mask=inside, other=0.0).to(tl.float32)
            at = row[:, None] * INPUTS + column[None, :]
            weight = tl.load(first + at, mask=within[:, None] & inside[None, :], other=0.0).to(tl.float32)
            sums += tl.sum(weight * value[None, :], axis=1)
        tl.store(hidden + (token * PARTS + part) * RANK + row, sums, mask=within)


@triton.jit(do_not_specialize_on_alignment=["ids", "slots"])
def _adapt_ids(ids, slots, down, hidden, VOCABULARY: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = tl.arange(0, ROWS)
        first = down + (slot * VOCABULARY + tl.load(ids + token)) * RANK
        value = tl.load(first + row, mask=row < RANK, other=0.0).to(tl.float32)
        tl.store(hidden + token * RANK + row, value, mask=row < RANK)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _adapt_up(
    hidden, slots, up, ranks, bias, base, ends, out, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < OUTPUTS
    sums = tl.full([COLUMNS], -(2**31), tl.int32).to(tl.float32, bitcast=True)  # -0, which changes no sum
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        if bias is not None:
            sums = tl.load(bias + slot * OUTPUTS + column, mask=inside, other=0.0)
        part = tl.zeros([COLUMNS], tl.int32)
        for p in tl.static_range(PARTS - 1):
            part += (column >= tl.load(ends + p)).to(tl.int32)
        own = tl.load(ranks + slot * PARTS + part)
        for r in range(RANK):
            has = inside & (r < own)
            value = tl.load(hidden + (token * PARTS + part) * RANK + r, mask=has, other=0.0)
            weight = tl.load(up + (slot * RANK + r) * OUTPUTS + column, mask=has, other=0.0).to(tl.float32)
            sums = tl.where(has, sums + value * weight, sums)
    at = token * OUTPUTS + column
    if base is not None:
        sums += tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)
