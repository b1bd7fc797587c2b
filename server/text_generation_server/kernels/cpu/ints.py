"""Linear layers of weights that are integers, by activations that become integers of 8 bits (`--activations int8`).
csrc/README.md says what they compute, to the bit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from text_generation_common.errors import ModelError
from text_generation_common.quantized.tensors.matrix import order_of, zero_of
from text_generation_common.quantized.tensors.splits import padded_inputs, size_of
from text_generation_common.quantized.values import (
    CodedScales,
    Codes,
    Dense,
    Fp8,
    Int4,
    Int8,
    Planes,
    RunNumbers,
    Shared,
    Table4,
)
from text_generation_server.device.arena import SharedPages
from text_generation_server.kernels.cpu.build import CONSTANTS
from text_generation_server.kernels.cpu.codes import packed_codes
from text_generation_server.kernels.cpu.library import TYPES, Argument, Library
from text_generation_server.kernels.cpu.linear import Scratch, addend_words, rows_of_codes
from text_generation_server.kernels.cpu.panels import WORD_BYTES, aligned, in_panels, places
from text_generation_server.kernels.cpu.scales import (
    NO_GROUPS,
    TYPES_OF_SCALES,
    GroupPanels,
    Pack,
    group_panels,
)

INPUTS = 32  # inputs of x that have one scale where weights are in groups; all inputs are a multiple
LEVEL_INPUTS = 256  # inputs of x that have one scale where groups have scales of two levels
LEVEL_GROUPS = (16, 32)
MAX_INPUTS = 65536  # where all inputs have one scale, the sum of their products must fit 32 bits
SIGN = 0x80
LARGEST = 127  # the largest integer of a table


@dataclass(frozen=True, slots=True)
class IntCodes:
    """Codes without a sign: W = scales * factor * (codes - zeros - zero), or the same with offsets."""

    words: Tensor  # uint8 [N, K], or [N, K / 2]: words of 8 codes; of planes, what they have in values.py
    type: int
    largest: int
    zero: int
    table: Tensor | None = None  # [16]: uint8
    factor: float = 1.0
    unit: int = WORD_BYTES  # bytes of `words` that lie together


class IntLinear:
    """y = factor * x Wᵀ + b. `gated`: the first half of the outputs are gates, and y = silu(gate) * up. A row of y has
    the same bits whatever the other rows are, for any number of threads and on any processor."""

    def __init__(
        self, library: Library, threads: int, scratch: Scratch, pages: SharedPages, *, weight: Codes,
        bias: Tensor | None, gated: bool, x_type: torch.dtype, y_type: torch.dtype, factor: float,
    ) -> None:  # fmt: skip
        outputs, x_inputs = size_of(weight)
        self._outputs = outputs // 2 if gated else outputs
        self._library = library
        self._threads = threads
        self._scratch = scratch
        self._x_type, self._y_type = x_type, y_type
        weight = _in_blocks(weight)
        self._x_inputs, self._inputs = x_inputs, size_of(weight)[1]
        of_places = places(outputs, gated)

        def packed(numbers: Tensor, unit: int = 0, sorts: bool = False) -> Tensor:
            return in_panels(library, threads, pages, numbers, of_places, unit=unit, sorts=sorts)

        found, order, is_planes = _integers(weight), order_of(weight), isinstance(weight, Planes)
        self._codes = packed(found.words, found.unit, is_planes and found.unit == WORD_BYTES)
        self._high = None
        if isinstance(weight, Planes) and weight.high is not None:
            self._high = packed(weight.high, weight.bits - 4)
        self._zero = found.zero
        x_block, self._groups = _groups(weight, of_places, packed)
        row_scales = None if self._groups is not None else weight.groups.scales.float()[:, 0]
        factors = torch.full((outputs,), factor * found.factor) if factor * found.factor != 1 else None
        if row_scales is not None:
            factors = row_scales * factor
        self._has_rows = not gated and factor == 1 and order is None
        words = NO_GROUPS if self._groups is None else self._groups.words
        self._fixed: dict[str, Argument] = {
            "x_type": TYPES[x_type], "x_inputs": x_inputs, "x_block": x_block or self._inputs, "inputs": self._inputs,
            "codes": self._codes, "high": self._high, "type": found.type, "table": found.table,
            "largest": found.largest, "zero": found.zero, "outputs": len(of_places),
            "group": self._inputs if self._groups is None else self._groups.size,
            "output_scales": aligned(factors, of_places), "order": None if order is None else order.int().contiguous(),
            "bias": aligned(bias, of_places), "gated": int(gated), "y_type": TYPES[y_type], "columns": self._outputs,
            "has_vnni": int(library.has_vnni),
            **{name: word for name, word in words.items() if name not in ("scale_table", "extras")},
        }  # fmt: skip
        # A row of the weight has the numbers of the files' table, of which `found` may have a multiple.
        self._numbers = weight.table.float() if isinstance(weight, Table4) else None
        of_rows: dict[str, Argument] = {**self._fixed, "table": self._numbers}
        if row_scales is not None:
            self._row_scales = aligned(row_scales, of_places)
            of_rows |= {"scales": self._row_scales, "scale_type": TYPES[torch.float32]}
        self._table = library.table("gemm_codes", [of_rows])  # for `rows`
        self._layout = "IN_STEPS" if is_planes else "IN_WORDS"

    def __call__(self, x: Tensor, out: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        x, count = x.contiguous(), x.shape[0]
        self._scratch.reserve(self._library.gemm_ints_scratch(count, self._inputs))
        y = torch.empty((count, self._outputs), dtype=self._y_type) if out is None else out
        self._library.call(
            self._threads, "gemm_ints", x=x, rows=count, y=y, y_stride=y.stride(0), scratch=self._scratch.data_ptr(),
            **addend_words(addend), **self._fixed,
        )  # fmt: skip
        return y

    @property
    def words(self) -> Mapping[str, Argument]:
        """The arguments of `gemm_ints` that are the same in every call."""
        return self._fixed

    @property
    def sizes_of_scratch(self) -> tuple[int, ...]:
        """What the scratch memory of an expert with this product depends on."""
        return (self._inputs,)

    @property
    def has_rows(self) -> bool:
        return self._has_rows

    def rows(self, ids_T: Tensor) -> Tensor:
        return rows_of_codes(
            self._library, self._threads, self._table, ids_T, width=self._x_inputs, dtype=self._x_type,
            layout=self._layout, zero=0 if self._numbers is not None else self._zero,
        )  # fmt: skip


def refuse_kind(kind: str) -> ModelError:
    return ModelError(f"--activations int8 does not multiply {kind}: start without it")


def _in_blocks(weight: Codes) -> Codes:
    """The weight with inputs that are a multiple of INPUTS. If all inputs are one group, it grows."""
    padded = padded_inputs(weight, INPUTS)
    assert not isinstance(padded, Dense)
    if padded.groups.scales.shape[1] == 1:
        return replace(padded, groups=replace(padded.groups, size=size_of(padded)[1]))
    return padded


def _integers(weight: Codes) -> IntCodes:
    bare = weight.groups.zeros is None and weight.groups.offsets is None
    match weight:
        case Int8(q):
            return IntCodes(q.view(torch.uint8) ^ SIGN, CONSTANTS["U8"], largest=255, zero=SIGN)
        case Planes():
            zero = zero_of(weight) if bare else 0
            codes, unit, code_type = packed_codes(weight)
            return IntCodes(codes, code_type, (1 << weight.bits) - 1, zero, unit=unit)
        case Int4(q):
            zero = zero_of(weight) if bare else 0
            return IntCodes(q, CONSTANTS["I4"], largest=15, zero=zero)
        case Table4(q, _, table):
            for power in range(-4, 5):
                numbers = table.float() * 2.0**power
                if torch.equal(numbers, numbers.round()) and numbers.abs().max() <= LARGEST:
                    codes, own = q, (numbers + SIGN).to(torch.uint8)
                    return IntCodes(codes, CONSTANTS["TABLE4"], 255, SIGN, own, factor=2.0**-power)
            raise refuse_kind("4-bit weights whose table holds other numbers than integers")
        case Fp8():
            raise refuse_kind("weights in fp8")


def _groups(weight: Codes, of_places: Tensor, pack: Pack) -> tuple[int, GroupPanels | None]:
    """The inputs of x that have one scale, and what belongs to the groups. 0 and None: all inputs have one scale."""
    groups, inputs = weight.groups, size_of(weight)[1]
    if isinstance(weight, Int8) and groups.scales.shape[1] == 1 and groups.zeros is None and groups.offsets is None:
        if inputs > MAX_INPUTS:
            raise refuse_kind(f"weights of {inputs} inputs with one scale")
        return 0, None
    if (levels := _levels(weight, pack)) is not None:
        return LEVEL_INPUTS, levels
    if groups.size % INPUTS:
        raise refuse_kind(f"weights in groups of {groups.size}")
    scales = groups.scales.float() if isinstance(groups.scales, CodedScales) else groups.scales
    offsets = groups.offsets.float() if isinstance(groups.offsets, CodedScales) else groups.offsets
    return INPUTS, group_panels(replace(groups, scales=scales, offsets=offsets), of_places, pack)


def _levels(weight: Codes, pack: Pack) -> GroupPanels | None:
    """Scales, and offsets if there are any, that are integers with factors for LEVEL_INPUTS inputs. Otherwise None."""
    groups, inputs = weight.groups, size_of(weight)[1]
    if isinstance(weight, Int8) or groups.zeros is not None or groups.size not in LEVEL_GROUPS or inputs % LEVEL_INPUTS:
        return None
    run = LEVEL_INPUTS // groups.size
    scales = _level(groups.scales, run)
    offsets = None if groups.offsets is None else _level(groups.offsets, run)
    if scales is None or (groups.offsets is not None and (offsets is None or offsets[0].dtype != torch.uint8)):
        return None
    of_all = [level[1] for level in (scales, offsets) if level is not None]
    dtype = torch.float16 if all(factors.dtype == torch.float16 for factors in of_all) else torch.float32
    words = NO_GROUPS | {
        "scales": pack(scales[0]), "scale_type": TYPES_OF_SCALES[scales[0].dtype],
        "factors": pack(scales[1].to(dtype)), "factor_type": TYPES_OF_SCALES[dtype], "groups_of_factor": run,
    }  # fmt: skip
    if offsets is not None:
        words |= {
            "offsets": pack(offsets[0]), "offset_type": CONSTANTS["U8"], "offset_factors": pack(offsets[1].to(dtype)),
        }  # fmt: skip
    return GroupPanels(groups.size, words)


def _level(scales: Tensor | Shared | CodedScales, run: int) -> tuple[Tensor, Tensor] | None:
    """Integers and their factors, each of which belongs to `run` groups."""
    match scales:
        case CodedScales(codes, None, RunNumbers(numbers, _, of_run), None) if of_run == run:
            return codes, numbers
        case _:
            return None
