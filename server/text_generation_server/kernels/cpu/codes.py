"""Linear layers of weights that `gemm` does not multiply: codes in groups, and numbers of any type, by the compiled
product of codes. csrc/README.md draws their panels."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.quantized.tensors.checks import NAN_IN_F8
from text_generation_common.quantized.tensors.codes import NUMBERS_AT_ONCE
from text_generation_common.quantized.tensors.matrix import in_bytes, order_of, zero_of
from text_generation_common.quantized.tensors.splits import padded_inputs, size_of
from text_generation_common.quantized.tensors.stored import tensors_of
from text_generation_common.quantized.values import Codes, Dense, Fp8, Int4, Int8, Planes, Table4, Weight
from text_generation_server.device.arena import SharedPages
from text_generation_server.kernels.cpu.build import CONSTANTS
from text_generation_server.kernels.cpu.library import TYPES, Argument, Library
from text_generation_server.kernels.cpu.linear import Scratch, addend_words, rows_of_codes
from text_generation_server.kernels.cpu.panels import WORD_BYTES, aligned, in_panels, places
from text_generation_server.kernels.cpu.scales import NO_GROUPS, group_panels

STEP = CONSTANTS["CODES_STEP"]
WEIGHT_TYPES = TYPES | {torch.float16: CONSTANTS["F16"]}


class CodesLinear:
    """y = factor * x Wᵀ + b. `gated`: the first half of the outputs are gates, and y = silu(gate) * up. A row of y has
    the same bits whatever the other rows are, and for any number of threads."""

    def __init__(
        self, library: Library, threads: int, scratch: Scratch, pages: SharedPages, *, weight: Weight,
        bias: Tensor | None, gated: bool, x_type: torch.dtype, y_type: torch.dtype, factor: float,
    ) -> None:  # fmt: skip
        outputs, self._x_inputs = size_of(weight)
        self._outputs = outputs // 2 if gated else outputs
        self._library = library
        self._threads = threads
        self._scratch = scratch
        self._x_type, self._y_type = x_type, y_type
        weight, order = in_steps(weight)
        self._inputs = size_of(weight)[1]
        of_places = places(outputs, gated)

        def packed(numbers: Tensor, unit: int = 0) -> Tensor:
            return in_panels(library, threads, pages, numbers, of_places, unit=unit, sorts=unit == WORD_BYTES)

        codes, unit, code_type = packed_codes(weight)
        self._codes = packed(codes, unit)
        self._high = None
        if isinstance(weight, Planes) and weight.high is not None:
            self._high = packed(weight.high, weight.bits - 4)
        self._groups = None if isinstance(weight, Dense) else group_panels(weight.groups, of_places, packed)
        self._group = self._inputs if self._groups is None else self._groups.size
        has_own = isinstance(weight, Dense) or weight.groups.zeros is not None or weight.groups.offsets is not None
        self._zero = 0 if has_own else zero_of(weight)
        self._has_rows = not gated and factor == 1 and (order is None or order_of(weight) is not None)
        self._fixed: dict[str, Argument] = {
            "x_type": TYPES[x_type], "x_inputs": self._x_inputs, "inputs": self._inputs, "codes": self._codes,
            "high": self._high, "type": code_type,
            "table": weight.table.float() if isinstance(weight, Table4) else None, "outputs": len(of_places),
            "group": self._group, "order": order,
            "output_scales": aligned(_output_scales(weight, factor), of_places), "bias": aligned(bias, of_places),
            "gated": int(gated), "y_type": TYPES[y_type], "columns": self._outputs,
            **(NO_GROUPS if self._groups is None else self._groups.words),
        }  # fmt: skip
        exact = {} if self._groups is None else self._groups.exact
        self._table = library.table("gemm_codes", [{**self._fixed, **exact}])  # for `rows`

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        x, count = x.contiguous(), x.shape[0]
        threads = self._library.allowed(self._threads)
        size = self._library.gemm_codes_scratch(count, self._inputs, self._group, threads)
        self._scratch.reserve(size)
        y = torch.empty((count, self._outputs), dtype=self._y_type) if out is None else out
        self._library.call(
            self._threads, "gemm_codes", x=x, rows=count, y=y, y_stride=y.stride(0), scratch=self._scratch.data_ptr(),
            **addend_words(addend), **self._fixed,
        )  # fmt: skip
        return y

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, and of what belongs to their groups."""
        parts = [self._codes, self._high, *({} if self._groups is None else self._groups.words).values()]
        return sum(part.nbytes for part in parts if isinstance(part, Tensor))

    @property
    def words(self) -> Mapping[str, Argument]:
        """The arguments of `gemm_codes` that are the same in every call."""
        return self._fixed

    @property
    def sizes_of_scratch(self) -> tuple[int, ...]:
        """What the scratch memory of an expert with this product depends on."""
        return self._inputs, self._group

    @property
    def has_rows(self) -> bool:
        return self._has_rows

    def rows(self, ids_T: Tensor) -> Tensor:
        return rows_of_codes(
            self._library, self._threads, self._table, ids_T, width=self._x_inputs, dtype=self._x_type,
            layout="IN_STEPS", zero=self._zero,
        )  # fmt: skip


def in_steps(weight: Weight) -> tuple[Weight, Tensor | None]:
    """The weight with inputs and groups of whole steps, and the number of x that each of its inputs multiplies: None if
    these are the first ones in order. Inputs that x lacks have numbers behind its last."""
    inputs = size_of(weight)[1]
    if isinstance(weight, Planes) and weight.groups.scales.shape[1] > 1 and weight.groups.size % STEP:
        weight = in_bytes(weight)  # no block of a file has such groups, nor a part that begins with a whole byte
    if not isinstance(weight, Dense):
        if weight.groups.scales.shape[1] == 1:
            weight = replace(weight, groups=replace(weight.groups, size=_whole_steps(inputs)))
        elif weight.groups.size % STEP:
            return _with_wide_groups(weight)
    weight = padded_inputs(weight, STEP)
    order = weight.order if isinstance(weight, Int4 | Int8) else None
    return weight, None if order is None else order.int().contiguous()


def _with_wide_groups(weight: Codes) -> tuple[Weight, Tensor]:
    """The same for groups that are not whole steps: each group is followed by inputs that x lacks."""
    inputs, groups = size_of(weight)[1], weight.groups
    of_group, wide = torch.arange(_whole_steps(groups.size)), _whole_steps(groups.size)
    places = torch.arange(groups.scales.shape[1]).unsqueeze(1) * groups.size + of_group
    places = places.masked_fill((of_group >= groups.size) | (places > inputs), inputs).flatten()
    q = weight.q.view(torch.uint8)
    if isinstance(weight, Int4 | Table4):
        halves = F.pad(torch.stack([q & 15, q >> 4], dim=-1).flatten(-2), (0, 1))[:, places]
        q = halves[:, 0::2] | halves[:, 1::2] << 4
    else:
        q = F.pad(q, (0, 1))[:, places]
    order = places
    if isinstance(weight, Int4 | Int8) and weight.order is not None:
        order = F.pad(weight.order, (0, 1), value=inputs)[places]
        weight = replace(weight, order=None)
    widened = replace(weight, q=q.view(weight.q.dtype), groups=replace(groups, size=wide))
    return widened, order.int().contiguous()


def _whole_steps(inputs: int) -> int:
    return -(-inputs // STEP) * STEP


def packed_codes(weight: Weight) -> tuple[Tensor, int, int]:
    """The codes of each output, the bytes that 8 codes of less than 8 bits take, and their type in C."""
    match weight:
        case Dense(values):
            return values, 0, WEIGHT_TYPES[values.dtype]
        case Planes(bits, q):
            return q, 2 if bits == 2 else WORD_BYTES, CONSTANTS[f"PLANES{bits}"]
        case Int4(q) | Table4(q):
            return q, WORD_BYTES, CONSTANTS["I4" if isinstance(weight, Int4) else "TABLE4"]
        case _:
            return weight.q.view(torch.uint8), 0, WEIGHT_TYPES[weight.q.dtype]


def _output_scales(weight: Weight, factor: float) -> Tensor | None:
    """What each output is multiplied by: the factor, or NaN where its codes of 8 bits have one."""
    has_nan = _has_nan(weight.q.view(torch.uint8)) if isinstance(weight, Fp8) else None
    if factor == 1 and (has_nan is None or not has_nan.any()):
        return None
    scales = torch.full((size_of(weight)[0],), factor)
    return scales if has_nan is None else scales.masked_fill(has_nan, float("nan"))


def _has_nan(codes: Tensor) -> Tensor:
    """For each output; some outputs at a time."""
    at_once = max(1, NUMBERS_AT_ONCE // codes.shape[1])
    parts = [part for of in tensors_of(codes) for part in torch.split(of, at_once)]
    return torch.cat([(part & NAN_IN_F8).amax(1) == NAN_IN_F8 for part in parts])
