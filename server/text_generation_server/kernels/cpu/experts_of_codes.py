"""Experts whose weights are codes, by one call for the products of all experts that a step has chosen."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from text_generation_common.models.architecture import ClampedGate
from text_generation_common.quantized.values import Int4, Int8, Weight
from text_generation_server.kernels.cpu.codes import CodesLinear
from text_generation_server.kernels.cpu.ints import IntLinear
from text_generation_server.kernels.cpu.library import TYPES, Library
from text_generation_server.kernels.cpu.linear import Scratch
from text_generation_server.kernels.interface import AdaptedPairs, ExpertCodes, Routes

Product = CodesLinear | IntLinear
# A product of a weight, a bias, whether it is gated, and a factor.
Make = Callable[[Weight, Tensor | None, bool, float], Product]


class ExpertProducts:
    """One layer of all experts, each with its own form of weights."""

    def __init__(self, library: Library, threads: int, scratch: Scratch, linears: Sequence[Product]) -> None:
        self._library = library
        self._threads = threads
        self._scratch = scratch
        self._linears = linears  # the table has the addresses of their tensors
        self._are_ints = isinstance(linears[0], IntLinear)
        kernel = "gemm_ints" if self._are_ints else "gemm_codes"
        self._table = library.table(kernel, [linear.words for linear in linears])
        self._sizes = {linear.sizes_of_scratch for linear in linears}
        self._scratch_of = library.experts_ints_scratch if self._are_ints else library.experts_codes_scratch
        self.columns = int(linears[0].words["columns"])  # type: ignore[arg-type]

    def __call__(
        self, x: Tensor, routes: Routes, tokens: int, clamped: ClampedGate | None = None, *, addend: Tensor | None,
        is_scored: bool = False,
    ) -> Tensor:  # fmt: skip
        """y of each pair, [P, columns]: see `experts_codes` in csrc/arguments.h."""
        stride = max(self._scratch_of(tokens, *sizes) for sizes in self._sizes)
        self._scratch.reserve(2 * stride * self._library.allowed(self._threads))
        y = torch.empty((len(routes.pairs_P), self.columns), dtype=x.dtype)
        limit, slope = (None, None) if clamped is None else (clamped.limit, clamped.slope)
        self._library.call(
            self._threads, "experts_codes", products=self._table, are_ints=int(self._are_ints), x=x,
            pairs=routes.pairs_P, offsets=routes.offsets, scores=routes.scores_P if is_scored else None,
            experts=len(self._linears), chosen=len(routes.pairs_P) // tokens, addend=addend, limit=limit, slope=slope,
            y=y, scratch=self._scratch.data_ptr(), scratch_stride=stride,
        )  # fmt: skip
        return y


class ExpertsOfCodes:
    """`ExpertKernel`: gates and ups, then downs times their scores, then the sum of each token."""

    def __init__(
        self, library: Library, threads: int, up: ExpertProducts, down: ExpertProducts, clamped: ClampedGate | None
    ) -> None:
        self._library = library
        self._threads = threads
        self._up, self._down = up, down
        self._clamped = clamped

    def __call__(self, x_TH: Tensor, routes: Routes, *, adapted: AdaptedPairs | None = None) -> Tensor:
        (tokens, width), pairs, x_TH = x_TH.shape, len(routes.pairs_P), x_TH.contiguous()
        addend = None if adapted is None else adapted.of_gate_up(x_TH, routes)
        opened = self._up(x_TH, routes, tokens, self._clamped, addend=addend)
        addend = None if adapted is None else adapted.of_down(opened)
        parts = self._down(opened, routes, tokens, addend=addend, is_scored=True)
        out = torch.empty((tokens, width), dtype=x_TH.dtype)
        self._library.call(
            self._threads, "experts_sum", parts=parts, tokens=tokens, chosen=pairs // tokens, width=width,
            type=TYPES[x_TH.dtype], out=out,
        )  # fmt: skip
        return out


def linears_of(expert: ExpertCodes, make: Make) -> tuple[Product, Product] | None:
    """The products of an expert. None, if gates and ups have different forms, or x is not read in one order."""
    if len(expert.gate_up) > 1 or any(_picks(weight) for weight in (*expert.gate_up, expert.down)):
        return None
    up = make(expert.gate_up[0], expert.gate_up_bias, True, 1.0)
    return up, make(expert.down, expert.down_bias, False, expert.factor)


def _picks(weight: Weight) -> bool:
    """Whether columns of the weight, parts of several ranks', multiply the same input."""
    order = weight.order if isinstance(weight, Int4 | Int8) else None
    return order is not None and int(order.max()) + 1 < len(order)
