"""Linear layers of codes of 4 or 8 bits in groups, by the compiled product of codes. csrc/README.md draws panels."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.quantized.tensors.matrix import exact_weight, zero_of
from text_generation_common.quantized.tensors.splits import on_outputs, size_of
from text_generation_common.quantized.values import Groups, Int4, Int8, Weight
from text_generation_server.device.arena import SharedPages
from text_generation_server.kernels.cpu.library import TYPES, Argument, Library
from text_generation_server.kernels.cpu.linear import (
    BLOCK,
    PANEL,
    Scratch,
    addend_words,
    aligned,
    interleaved,
    panels,
    rows_of_panels,
)


def has_product(weight: Weight, gated: bool) -> bool:
    """Whether `CodesLinear` computes this weight, which must fill whole panels."""
    if not isinstance(weight, Int4 | Int8) or weight.groups.offsets is not None:
        return False
    outputs, inputs = size_of(weight)
    return inputs % BLOCK == 0 and weight.groups.size % 2 == 0 and (not gated or outputs % BLOCK == 0)


class CodesLinear:
    """y = x Wᵀ + b for bfloat16 x [T, K]. `gated`: the first half of the outputs are gates, and y = silu(gate) * up."""

    def __init__(
        self, library: Library, threads: int, scratch: Scratch, pages: SharedPages, *, weight: Int4 | Int8,
        bias: Tensor | None, gated: bool, y_type: torch.dtype, factor: float,
    ) -> None:  # fmt: skip
        outputs, self._inputs = size_of(weight)
        self._outputs = outputs // 2 if gated else outputs
        self._library = library
        self._threads = threads
        self._scratch = scratch
        self._y_type = y_type
        order = interleaved(outputs) if gated else None

        def in_panels(numbers: Tensor, dtype: torch.dtype) -> Tensor:
            """[N, M] as [N / 16, M, 16]. Zeros fill the last panels. Codes are copied once, because they are large."""
            missing, width = -outputs % BLOCK, numbers.shape[1]
            numbers = F.pad(numbers, (0, 0, 0, missing)) if missing else numbers
            out = pages.empty((numbers.shape[0] // PANEL, width, PANEL), dtype)
            turns = 2 if gated else 1
            panels = numbers.view(turns, -1, PANEL, width).transpose(0, 1)
            out.view(-1, turns, width, PANEL).copy_(panels.transpose(2, 3))
            return out

        is_int4 = isinstance(weight, Int4)
        codes = (
            in_panels(weight.q, torch.uint8)
            if is_int4
            else panels(weight.q if order is None else weight.q[order], pages)
        )
        zeros = None if weight.groups.zeros is None else in_panels(weight.groups.zeros, torch.int8)
        groups = Groups(weight.groups.size, in_panels(weight.groups.scales.float() * factor, torch.float32), zeros)
        self._panels = replace(weight, q=codes, groups=groups)
        self._has_rows = not gated and factor == 1
        self._fixed: dict[str, Argument] = {
            "inputs": self._inputs, "codes": codes, "outputs": codes.shape[0] * PANEL, "is_int4": int(is_int4),
            "group": groups.size, "scales": groups.scales, "zeros": zeros, "zero": zero_of(weight),
            "order": None if weight.order is None else weight.order.int().contiguous(),
            "bias": aligned(bias, order), "gated": int(gated), "y_type": TYPES[y_type], "columns": self._outputs,
        }  # fmt: skip

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        x, count = x.contiguous(), x.shape[0]
        self._scratch.reserve(self._library.gemm_codes_scratch(count, self._inputs, self._threads))
        y = torch.empty((count, self._outputs), dtype=self._y_type) if out is None else out
        self._library.call(
            self._threads, "gemm_codes", x=x, rows=count, y=y, y_stride=y.stride(0), scratch=self._scratch.data_ptr(),
            **addend_words(addend), **self._fixed,
        )  # fmt: skip
        return y

    @property
    def has_rows(self) -> bool:
        return self._has_rows

    def rows(self, ids_T: Tensor) -> Tensor:
        return exact_weight(on_outputs(self._panels, lambda numbers: rows_of_panels(numbers, ids_T)))
