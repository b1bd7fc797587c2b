"""What belongs to the groups of a weight, in panels: in the fewest bits that hold it exactly, because a product reads
it beside the codes. csrc/scales.h makes float32 of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from text_generation_common.quantized.values import CodedScales, Groups, RunNumbers, Shared, SharedNumbers
from text_generation_server.kernels.cpu.build import CONSTANTS
from text_generation_server.kernels.cpu.library import TYPES, Argument
from text_generation_server.kernels.cpu.panels import BLOCK, PANEL

SMALL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
TYPES_OF_SCALES = TYPES | {
    torch.float16: CONSTANTS["F16"], torch.uint8: CONSTANTS["U8"], torch.float8_e8m0fnu: CONSTANTS["E8M0"],
}  # fmt: skip
ONE_IN_F8 = 0x38
NUMBERS_AT_ONCE = 2**16
CLOSE = 2.0**-22  # relative difference of two numbers, of which one is rounded once more

Pack = Callable[[Tensor], Tensor]  # [N, M] as panels [N / 32, M, 32]


@dataclass(frozen=True, slots=True)
class _Scales:
    """scales * factors + extras, and what the product needs to know of them."""

    numbers: Tensor  # [N, G]
    type: int
    table: Tensor | None = None  # what the product makes of codes, if their type does not say
    exact: Tensor | None = None  # what codes stand for in the files, if they are not the numbers
    factors: Tensor | None = None  # [N, groups / run]
    run: int = 1
    extras: Tensor | None = None  # [N, 1]


@dataclass(frozen=True, slots=True)
class GroupPanels:
    """Panels of scales, zero points and offsets, and the arguments of `gemm_codes` for them."""

    size: int
    words: dict[str, Argument]
    exact: dict[str, Argument] = field(default_factory=dict)  # other ones that round no scale twice


NO_GROUPS: dict[str, Argument] = {
    "scales": None, "scale_type": 0, "scale_width": BLOCK, "scale_table": None, "factors": None, "factor_type": 0,
    "groups_of_factor": 1, "extras": None, "zeros": None, "offsets": None, "offset_type": 0, "offset_factors": None,
}  # fmt: skip


def group_panels(groups: Groups, rows: Tensor, pack: Pack) -> GroupPanels:
    """`rows`: the output at each place of the panels, or -1. `pack` brings numbers of outputs into this order."""
    zeros = None if groups.zeros is None else pack(groups.zeros.to(torch.int8))
    words = NO_GROUPS | {"zeros": zeros}
    if isinstance(groups.scales, SharedNumbers) and (shared := _of_panels(groups.scales, rows)) is not None:
        words |= {"scales": shared, "scale_type": TYPES_OF_SCALES[shared.dtype], "scale_width": shared.shape[2]}
        return GroupPanels(groups.size, words | _offset_words(groups, None, pack))
    found = _coded(groups.scales) if isinstance(groups.scales, CodedScales) else _plain(groups.scales)
    factors = None if found.factors is None else pack(fitting(found.factors))
    words |= {
        "scales": pack(found.numbers), "scale_type": found.type, "scale_table": found.table, "factors": factors,
        "factor_type": 0 if factors is None else TYPES_OF_SCALES[factors.dtype], "groups_of_factor": found.run,
        "extras": None if found.extras is None else pack(found.extras),
        **_offset_words(groups, None if factors is None else (factors.dtype, found.run), pack),
    }  # fmt: skip
    if found.type != CONSTANTS["F8"]:
        return GroupPanels(groups.size, words)
    exact: dict[str, Argument] = {"scale_type": CONSTANTS["TABLE8"], "scale_table": found.exact, "factors": None}
    return GroupPanels(groups.size, words, exact)


def _offset_words(groups: Groups, of_scales: tuple[torch.dtype, int] | None, pack: Pack) -> dict[str, Argument]:
    """`of_scales`: the type of the scales' factors and their run, which the factors of offsets share."""
    offsets = groups.offsets
    if offsets is None:
        return {}
    if isinstance(offsets, CodedScales):
        found = _coded(offsets)
        if found.table is None and found.extras is None and found.factors is not None:
            factors = fitting(found.factors)
            if of_scales == (factors.dtype, found.run):
                return {"offsets": pack(found.numbers), "offset_type": found.type, "offset_factors": pack(factors)}
    numbers = fitting(offsets if isinstance(offsets, Tensor) else offsets.float())
    return {"offsets": pack(numbers), "offset_type": TYPES_OF_SCALES[numbers.dtype]}


def fitting(numbers: Tensor) -> Tensor:
    """The numbers in the smallest type that holds all of them exactly."""
    return next((numbers.to(dtype) for dtype in SMALL_TYPES if _are_exact_in(dtype, numbers)), numbers.float())


def _are_exact_in(dtype: torch.dtype, numbers: Tensor) -> bool:
    """Most types that do not hold all numbers do not hold some of the first."""
    parts = torch.split(numbers, max(1, NUMBERS_AT_ONCE // max(1, numbers.shape[-1])))
    return numbers.dtype == dtype or all(torch.equal(part.to(dtype).float(), part.float()) for part in parts)


def _plain(scales: Tensor | Shared) -> _Scales:
    if isinstance(scales, Tensor) and scales.dtype == torch.float8_e8m0fnu:
        return _Scales(scales.view(torch.uint8), CONSTANTS["E8M0"])
    numbers = fitting(scales if isinstance(scales, Tensor) else scales.float())
    return _Scales(numbers, TYPES_OF_SCALES[numbers.dtype])


def _coded(scales: CodedScales) -> _Scales:
    extras = None if scales.offsets is None else _of_outputs(scales.offsets)
    if scales.offsets is not None and extras is None:
        return _plain(scales.float())
    factors, run = (None, 1) if scales.factors is None else _factors(scales.factors)
    codes, number_type, table = _codes(scales)
    exact = None if table is None else scales.table
    if number_type == CONSTANTS["F8"]:
        assert scales.table is not None
        factors, run, table = scales.table[ONE_IN_F8].expand(len(codes), 1), codes.shape[1], None
    return _Scales(codes, number_type, table=table, exact=exact, factors=factors, run=run, extras=extras)


def _of_outputs(shared: Shared) -> Tensor | None:
    """[N, 1]: a number for each output, if all its groups have the same. Otherwise None."""
    if isinstance(shared, SharedNumbers) and len(shared.numbers) == 1:
        return shared.numbers.float().expand(len(shared.starts), 1)
    numbers = shared.float()
    first = numbers[:, :1]
    return first if torch.equal(first.expand(numbers.shape), numbers) else None


def _codes(scales: CodedScales) -> tuple[Tensor, int, Tensor | None]:
    """Codes, their type, and the table of what codes stand for that are not numbers themselves."""
    if scales.table is None:
        return scales.codes, TYPES_OF_SCALES[scales.codes.dtype], None
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
    if scales.factors is None and scales.offsets is None and _is_close(numbers * scales.table[ONE_IN_F8], scales.table):
        return scales.codes, CONSTANTS["F8"], scales.table
    used, is_whole = torch.zeros(256, dtype=torch.bool), scales.table == scales.table.round()
    for codes in torch.split(scales.codes, 8):
        used[codes.flatten().int()] = True
        if not is_whole[used].all():
            return scales.codes, CONSTANTS["TABLE8"], scales.table
    table = scales.table.masked_fill(~used, 0)
    if torch.equal(table, table.round()):
        for dtype in (torch.uint8, torch.int8):
            if torch.iinfo(dtype).min <= table.min() and table.max() <= torch.iinfo(dtype).max:
                return table.to(dtype)[scales.codes.int()], TYPES_OF_SCALES[dtype], None
    return scales.codes, CONSTANTS["TABLE8"], scales.table


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=CLOSE, atol=0.0)


def _factors(shared: Shared) -> tuple[Tensor, int]:
    """[N, groups / run], and the run: how many groups have the same factor in every output."""
    if isinstance(shared, RunNumbers):
        return shared.numbers.float(), shared.run
    run = math.gcd(shared.run, *set((shared.starts % shared.run).flatten().tolist()))
    places = (shared.starts + torch.arange(0, shared.count, run)) // shared.run
    return shared.numbers.float()[places.clamp(max=len(shared.numbers) - 1)], run


def _of_panels(shared: SharedNumbers, rows: Tensor) -> Tensor | None:
    """[N / 32, G, 2]: a number for each panel, if all its outputs have the same. Otherwise None."""
    of_panels = rows.view(-1, PANEL)
    first = of_panels[:, :1].clamp(min=0)
    starts = shared.starts.flatten()
    if not torch.equal(starts[first].expand(of_panels.shape), starts[torch.where(of_panels < 0, first, of_panels)]):
        return None
    chosen = SharedNumbers(shared.numbers, starts[first], shared.count, shared.run)
    return fitting(chosen.float()).view(-1, BLOCK // PANEL, shared.count).transpose(1, 2).contiguous()
