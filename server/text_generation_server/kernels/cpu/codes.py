"""Linear layers of weights that `gemm` does not multiply: codes in groups, and numbers of any type, by the compiled
product of codes. csrc/README.md draws their panels."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.quantized.tensors.codes import pack_pairs
from text_generation_common.quantized.tensors.matrix import exact_weight, in_bytes, order_of
from text_generation_common.quantized.tensors.splits import on_outputs, padded_inputs, size_of
from text_generation_common.quantized.values import Codes, Dense, Fp8, Groups, Int4, Int8, Planes, Table4, Weight
from text_generation_server.device.arena import SharedPages
from text_generation_server.kernels.cpu.build import CONSTANTS
from text_generation_server.kernels.cpu.library import TYPES, Argument, Library
from text_generation_server.kernels.cpu.linear import BLOCK, PANEL, Scratch, addend_words

STEP = CONSTANTS["CODES_STEP"]
NAN_IN_F8 = 0x7F  # beside the sign
WEIGHT_TYPES = TYPES | {torch.float16: CONSTANTS["F16"]}
# Types in which C reads scales.
SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        self._y_type = y_type
        weight, order = in_steps(in_bytes(weight) if isinstance(weight, Planes) else weight)
        self._inputs = size_of(weight)[1]
        groups = None if isinstance(weight, Dense) else weight.groups
        self._group = self._inputs if groups is None else groups.size
        scales, offsets = (None, None) if groups is None else _scales(weight, groups, factor)
        zeros = None if groups is None or groups.zeros is None else groups.zeros.to(torch.int8)

        def in_panels(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else _in_panels(numbers, gated, pages)

        codes, code_type = _codes(weight)
        self._codes = _in_panels(codes, gated, pages)
        self._scales, self._zeros, self._offsets = map(in_panels, (scales, zeros, offsets))
        self._form = on_outputs(weight, lambda numbers: numbers[:0].clone())
        self._has_rows = not gated and factor == 1 and (order is None or order_of(weight) is not None)
        self._fixed: dict[str, Argument] = {
            "x_type": TYPES[x_type], "x_inputs": self._x_inputs, "inputs": self._inputs, "codes": self._codes,
            "type": code_type, "table": weight.table.float() if isinstance(weight, Table4) else None,
            "outputs": self._codes.shape[0] * BLOCK, "group": self._group, "scales": self._scales,
            "scale_type": WEIGHT_TYPES[torch.float32 if scales is None else scales.dtype],
            "zeros": self._zeros, "offsets": self._offsets, "order": order,
            "bias": in_panels(None if bias is None else bias.float().unsqueeze(1)), "gated": int(gated),
            "y_type": TYPES[y_type], "columns": self._outputs,
        }  # fmt: skip

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        x, count = x.contiguous(), x.shape[0]
        size = self._library.gemm_codes_scratch(count, self._inputs, self._group, self._threads)
        self._scratch.reserve(size)
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
        def picked(panels: Tensor) -> Tensor:
            return panels[ids_T // BLOCK, :, ids_T % BLOCK].contiguous()

        form, codes = self._form, picked(self._codes)
        if isinstance(form, Dense):
            return codes[:, : self._x_inputs]
        assert self._scales is not None
        zeros, offsets = (None if part is None else picked(part) for part in (self._zeros, self._offsets))
        q = pack_pairs(_of_words(codes)) if isinstance(form, Int4 | Table4) else codes.view(form.q.dtype)
        rows = replace(form, q=q, groups=Groups(self._group, picked(self._scales), zeros, offsets))
        return exact_weight(rows)[:, : self._x_inputs]


def in_steps(weight: Weight) -> tuple[Weight, Tensor | None]:
    """The weight with inputs and groups of whole steps, and the number of x that each of its inputs multiplies: None if
    these are the first ones in order. Inputs that x lacks have numbers behind its last."""
    inputs = size_of(weight)[1]
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


def _codes(weight: Weight) -> tuple[Tensor, int]:
    """The codes of each output, [N, K] numbers or [N, K / 8] words, and their type in C."""
    if isinstance(weight, Dense):
        return weight.values, WEIGHT_TYPES[weight.values.dtype]
    if not isinstance(weight, Int4 | Table4):
        return weight.q.view(torch.uint8), WEIGHT_TYPES[weight.q.dtype]
    pairs = weight.q.view(weight.q.shape[0], -1, STEP // 2)
    even, odd = pairs & 15, pairs >> 4
    words = torch.cat([half[..., 0::2] | half[..., 1::2] << 4 for half in (even, odd)], dim=-1)
    return words.view(torch.int32).squeeze(-1), CONSTANTS["I4" if isinstance(weight, Int4) else "TABLE4"]


def _of_words(words: Tensor) -> Tensor:
    """The codes of 4 bits, [N, K], in words that `_codes` has made."""
    shifts = torch.arange(STEP // 2).unsqueeze(1) * 4 + torch.tensor([0, 16])
    return (words.unsqueeze(-1) >> shifts.flatten() & 15).to(torch.uint8).flatten(1)


def _scales(weight: Weight, groups: Groups, factor: float) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets, times the factor, in the smallest type that holds both exactly. A NaN in codes of 8 bits
    becomes the scale of its output, where it makes the same numbers NaN."""
    scales, offsets = groups.scales.float(), None if groups.offsets is None else groups.offsets.float()
    if factor != 1:
        scales, offsets = scales * factor, None if offsets is None else offsets * factor
    both = [numbers for numbers in (scales, offsets) if numbers is not None]
    fitting = (t for t in SCALE_TYPES if all(torch.equal(numbers.to(t).float(), numbers) for numbers in both))
    dtype = next(fitting, torch.float32)
    if isinstance(weight, Fp8):
        has_nan = (weight.q.view(torch.uint8) & NAN_IN_F8 == NAN_IN_F8).any(1, keepdim=True)
        scales = scales.masked_fill(has_nan, float("nan"))
    return scales.to(dtype), None if offsets is None else offsets.to(dtype)


def _in_panels(numbers: Tensor, gated: bool, pages: SharedPages) -> Tensor:
    """[N, M] as [N / 32, M, 32]: outputs in the order of the panels. Zeros fill the last panels."""
    width = numbers.shape[1]
    if gated:
        halves = F.pad(numbers.view(2, -1, width), (0, 0, 0, -(numbers.shape[0] // 2) % PANEL))
        numbers = halves.view(2, -1, PANEL, width).transpose(0, 1).reshape(-1, width)
    numbers = F.pad(numbers, (0, 0, 0, -numbers.shape[0] % BLOCK))
    out = pages.empty((numbers.shape[0] // BLOCK, width, BLOCK), numbers.dtype)
    return out.copy_(numbers.view(-1, BLOCK, width).transpose(1, 2))
