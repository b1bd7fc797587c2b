"""Linear layers by the compiled matrix products. Their weights are copied into panels, which csrc/README.md draws:
panels of 16 outputs in bfloat16 and int8, of 32 outputs in float32."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_common.quantized.values import Dense, Int8, Weight
from text_generation_server.device.arena import SharedPages, empty
from text_generation_server.kernels.cpu.build import CONSTANTS
from text_generation_server.kernels.cpu.library import TYPES, Argument, Library
from text_generation_server.kernels.cpu.panels import BLOCK, PANEL, aligned, in_panels, places
from text_generation_server.kernels.interface import LinearKernel
from text_generation_server.kernels.products import has_row_scales

CPU = torch.device("cpu")
NO_ADDEND: dict[str, Argument] = dict.fromkeys(("addend", "addend_stride", "addend_type"))


class Scratch:
    """Scratch memory that all products use, one after the other. It is as large as the largest product needs.

    When the memory grows, the old memory is kept as well, because a program may have its address.
    """

    def __init__(self) -> None:
        self._memory = [empty((0,), torch.bfloat16, CPU)]

    def reserve(self, count: int) -> None:
        if count > len(self._memory[-1]):
            self._memory.append(empty((max(count, 2 * len(self._memory[-1])),), torch.bfloat16, CPU))

    def data_ptr(self) -> int:
        return self._memory[-1].data_ptr()


@dataclass(frozen=True, slots=True)
class RowScaled:
    """W = values * scales, which `gemm` computes."""

    values: Tensor  # [N, K]: bfloat16 or int8
    scales_N: Tensor | None = None  # float32


def packable(weight: Weight, gated: bool, factor: float) -> RowScaled | None:
    """The weight times the factor for `gemm`. None if it is in another form, or does not fill whole panels: its inputs
    must, and each half of its outputs must if `gated`."""
    match weight:
        case Dense(values) if values.dtype == torch.bfloat16 and factor == 1:
            found = RowScaled(values)
        case Int8(q) if has_row_scales(weight):
            found = RowScaled(q, weight.groups.scales.float()[:, 0] * factor)
        case _:
            return None
    outputs, inputs = found.values.shape
    return found if inputs % BLOCK == 0 and (not gated or outputs % BLOCK == 0) else None


class PackedLinear:
    """y = x Wᵀ + b for bfloat16 x [T, K]. `gated`: the first half of the outputs are gates, and y = silu(gate) * up."""

    def __init__(
        self,
        library: Library,
        threads: int,
        scratch: "Scratch",
        pages: SharedPages,
        weight: RowScaled,
        bias: Tensor | None,
        gated: bool,
        y_type: torch.dtype,
    ) -> None:
        values = weight.values
        outputs, self._inputs = values.shape
        self._outputs = outputs // 2 if gated else outputs
        self._library = library
        self._threads = threads
        self._gated = gated
        self._y_type = y_type
        of_places = places(outputs, gated)
        self._weight = in_panels(
            library, threads, pages, values, of_places, width=PANEL, unit=2 * values.element_size()
        )
        self._is_int8 = values.dtype == torch.int8
        self._scratch = scratch
        rows = self._weight.shape[0] * PANEL
        self._rows = rows
        self._scales_N = aligned(weight.scales_N, of_places)
        one_group: dict[str, Argument] = {
            "codes": self._weight, "type": TYPES[values.dtype], "inputs": self._inputs, "group": self._inputs,
            "scales": self._scales_N, "scale_type": TYPES[torch.float32], "scale_width": BLOCK, "groups_of_factor": 1,
        }  # fmt: skip
        self._table = library.table("gemm_codes", [one_group])
        self._fixed: dict[str, Argument] = {
            "inputs": self._inputs, "weights": self._weight, "outputs": rows, "is_int8": int(self._is_int8),
            "scales": self._scales_N, "bias": aligned(bias, of_places), "gated": int(gated),
            "y_type": TYPES[y_type], "columns": self._outputs,
        }  # fmt: skip

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        count = x.shape[0]
        x = x.contiguous()
        threads = self._library.allowed(self._threads)
        self._scratch.reserve(self._library.gemm_scratch(count, self._inputs, self._rows, self._is_int8, threads))
        y = torch.empty((count, self._outputs), dtype=self._y_type) if out is None else out
        self._library.call(
            self._threads, "gemm", x=x, rows=count, y=y, y_stride=y.stride(0), scratch=self._scratch.data_ptr(),
            **addend_words(addend), **self._fixed,
        )  # fmt: skip
        return y

    @property
    def has_rows(self) -> bool:
        return not self._gated

    def rows(self, ids_T: Tensor) -> Tensor:
        if self._scales_N is not None:
            return rows_of_codes(
                self._library,
                self._threads,
                self._table,
                ids_T,
                width=self._inputs,
                dtype=torch.bfloat16,
                layout="IN_PAIRS",
            )
        return _rows(self._library, self._threads, self._weight, ids_T, self._inputs)


class Float32Linear:
    """y = x Wᵀ + b in float32. A row of y has the same bits whatever the other rows are, and for any number of
    threads.
    """

    def __init__(self, library: Library, threads: int, pages: SharedPages, weight: Tensor, bias: Tensor | None) -> None:
        """weight [N, K]"""
        self._outputs, self._inputs = weight.shape
        self._library = library
        self._threads = threads
        self._weight = in_panels(library, threads, pages, weight, places(self._outputs, gated=False))
        self._bias = None if bias is None else bias.contiguous()

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        y = torch.empty((x.shape[0], self._outputs), dtype=torch.float32) if out is None else out
        words = addend_words(addend)
        self._library.call(
            self._threads, "gemm_f32", x=x, rows=x.shape[0], inputs=self._inputs, weights=self._weight,
            outputs=self._outputs, bias=self._bias, y=y, y_stride=y.stride(0), **words,
        )  # fmt: skip
        return y

    has_rows = True

    def rows(self, ids_T: Tensor) -> Tensor:
        return _rows(self._library, self._threads, self._weight, ids_T, self._inputs)


class Gated:
    """y = silu(gate) * up of a product whose first half are gates."""

    def __init__(self, linear: LinearKernel, silu_mul: Callable[[Tensor], Tensor]) -> None:
        self._linear = linear
        self._silu_mul = silu_mul

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        y = self._silu_mul(self._linear(x, addend=addend))
        return y if out is None else out.copy_(y)


def addend_words(addend: Tensor | None) -> dict[str, Argument]:
    if addend is None:
        return NO_ADDEND
    assert addend.stride(1) == 1
    return {"addend": addend, "addend_stride": addend.stride(0), "addend_type": TYPES[addend.dtype]}


def _rows(library: Library, threads: int, panels: Tensor, ids_T: Tensor, inputs: int) -> Tensor:
    """Rows of the weight [N, inputs] in panels. A panel has the words, 4 bytes each, of its outputs in turns."""
    words = inputs * panels.element_size() // 4
    out = torch.empty((len(ids_T), inputs), dtype=panels.dtype)
    library.call(
        threads if len(ids_T) > 1 else 1, "embed_panels", ids=ids_T, tokens=len(ids_T), panels=panels,
        outputs=panels[0].nbytes // (4 * words), words=words, out=out,
    )  # fmt: skip
    return out


def rows_of_codes(
    library: Library, threads: int, product: Tensor, ids_T: Tensor, *, width: int, dtype: torch.dtype, layout: str,
    zero: int = 0,
) -> Tensor:  # fmt: skip
    """Rows of the weight of a product by codes, whose arguments `product` has. A kernel makes them, so decode steps can
    be recorded. `layout`: of the codes, by its name in C. `zero` is subtracted from all codes."""
    out = torch.empty((len(ids_T), width), dtype=dtype)
    library.call(
        threads if len(ids_T) > 1 else 1, "embed_codes", ids=ids_T, tokens=len(ids_T), product=product,
        layout=CONSTANTS[layout], zero=zero, width=width, type=TYPES[dtype], out=out,
    )  # fmt: skip
    return out
