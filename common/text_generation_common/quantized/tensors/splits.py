"""Parts of weights in any form, and several weights as one. Nothing is rounded: W of a part is a part of W."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.tensors.codes import BYTE, by_bits, pack_pairs, pairs, repeated
from text_generation_common.quantized.tensors.matrix import in_bytes, order_of, zero_of
from text_generation_common.quantized.tensors.stored import CodesInFile, stacked
from text_generation_common.quantized.values import (
    CodedScales,
    Codes,
    Dense,
    Groups,
    Int4,
    Int8,
    Planes,
    RunNumbers,
    Shared,
    SharedNumbers,
    Table4,
    Weight,
)  # fmt: skip

SMALLEST_GROUP = 8  # inputs of a group in joined weights; smaller ones would have more bytes of scales than of codes
SORTED_GROUP = 32  # inputs of a group in a part of a weight with an order; columns of zeros fill groups up

Change = Callable[[Tensor], Tensor]
OnShared = Callable[[Shared], Shared]
Scales = Tensor | Shared | CodedScales
OfCodes = TypeVar("OfCodes", bound=Codes)


def size_of(weight: Weight) -> tuple[int, int]:
    """(outputs, inputs). Columns of zeros in a part of a weight with an order count as inputs."""
    codes = weight.values if isinstance(weight, Dense) else weight.q
    return codes.shape[-2], codes.shape[-1] * _codes_of_number(weight)


def _codes_of_number(weight: Weight) -> int:
    """Inputs of each number of the tensor `q`."""
    if isinstance(weight, Planes) and weight.high is None:
        return BYTE // weight.bits
    return 2 if isinstance(weight, Int4 | Table4 | Planes) else 1


def _on_codes(weight: OfCodes, change: Callable[[Tensor, int], Tensor]) -> OfCodes:
    """The weight with what `change` makes of each tensor of codes and the number of inputs that its numbers have."""
    found = replace(weight, q=change(weight.q, _codes_of_number(weight)))
    if isinstance(found, Planes) and found.high is not None:
        return replace(found, high=change(found.high, BYTE // (found.bits - 4)))
    return found


def on_outputs(weight: Weight, change: Change) -> Weight:
    """The weight with other outputs: what `change`, which moves rows, makes of each tensor that has rows of outputs. W
    is 0 in rows of zeros that it adds."""
    if isinstance(weight, Dense):
        return Dense(change(weight.values))

    def on_rows(tensor: Tensor) -> Tensor:
        return tensor.on_rows(change) if isinstance(tensor, CodesInFile) else by_bits(change, tensor)

    def on_shared(shared: Shared) -> Shared:
        if isinstance(shared, RunNumbers):
            return replace(shared, numbers=on_rows(shared.numbers))
        starts = on_rows(shared.starts + 1) - 1  # -1: of rows that `change` has added
        if isinstance(weight, Table4) and (starts < 0).any():
            # Code 0 of a table may stand for any number, such as -1 in nf4, so the scales of these rows are 0.
            starts = starts.where(starts >= 0, len(shared.numbers) * shared.run)
            shared = replace(shared, numbers=_with_zeros(shared.numbers, -(-shared.count // shared.run)))
        return replace(shared, starts=starts.clamp(min=0))

    return replace(
        _on_codes(weight, lambda codes, _: on_rows(codes)), groups=_on_groups(weight.groups, on_rows, on_shared)
    )


def on_tensors(weight: Weight, change: Change) -> Weight:
    """The weight with what `change` makes of each of its tensors."""
    if isinstance(weight, Dense):
        return Dense(change(weight.values))

    def on_shared(shared: Shared) -> Shared:
        found = replace(shared, numbers=change(shared.numbers))
        return replace(found, starts=change(found.starts)) if isinstance(found, SharedNumbers) else found

    groups = _on_groups(weight.groups, change, on_shared)
    if isinstance(groups.scales, CodedScales) and groups.scales.table is not None:
        groups = replace(groups, scales=replace(groups.scales, table=change(groups.scales.table)))
    changed = replace(_on_codes(weight, lambda codes, _: change(codes)), groups=groups)
    if isinstance(changed, Table4):
        return replace(changed, table=change(changed.table))
    if isinstance(changed, Int4 | Int8) and changed.order is not None:
        return replace(changed, order=change(changed.order))
    return changed


def _on_groups(groups: Groups, change: Change, on_shared: OnShared) -> Groups:
    """The groups with what the functions make of all numbers of groups, those that are shared and others."""

    def on_scales(scales: Scales) -> Scales:
        match scales:
            case SharedNumbers() | RunNumbers():
                return on_shared(scales)
            case CodedScales(codes, table, factors, more):
                shared = (None if part is None else on_shared(part) for part in (factors, more))
                return CodedScales(change(codes), table, *shared)
            case _:
                return change(scales)

    zeros = None if groups.zeros is None else change(groups.zeros)
    offsets = None if groups.offsets is None else on_scales(groups.offsets)
    return replace(groups, scales=on_scales(groups.scales), zeros=zeros, offsets=offsets)


def inputs_of(weight: Weight, part: range) -> Weight:
    """Some inputs of a weight. Groups that the part cuts become smaller ones with the same scales. WeightsError if the
    weight cannot be cut there."""
    if part == range(size_of(weight)[1]):
        return weight
    if isinstance(weight, Dense):
        return Dense(weight.values[..., part.start : part.stop].contiguous())
    if isinstance(weight, Int4 | Int8) and weight.order is not None:
        return _of_sorted(weight, weight.order, part)
    if isinstance(weight, Planes) and (part.start % BYTE or part.stop % BYTE):
        return inputs_of(in_bytes(weight), part)
    each = _codes_of_number(weight)
    if part.start % each or part.stop % each:
        raise WeightsError(
            f"inputs {part.start} to {part.stop} of a layer in 4 bits: an odd number is half of a byte; choose another"
            " --num-shard"
        )
    found = _on_codes(weight, lambda codes, each: codes[..., part.start // each : part.stop // each].contiguous())
    if _is_one(weight.groups):
        return replace(found, groups=replace(weight.groups, size=len(part)))
    size = math.gcd(weight.groups.size, part.start)
    return replace(found, groups=_pieces(weight.groups, size, range(part.start // size, -(-part.stop // size))))


def _is_one(groups: Groups) -> bool:
    """Whether all inputs are one group."""
    return groups.scales.shape[-1] == 1


def _pieces(groups: Groups, size: int, places: range) -> Groups:
    """Some pieces of `size` inputs of the same groups."""
    times = places.stop if _is_one(groups) else groups.size // size

    def cut(numbers: Tensor) -> Tensor:
        whole = repeated(numbers, times, -1) if times > 1 else numbers
        return by_bits(lambda bits: bits[..., places.start : places.stop].contiguous(), whole)

    def moved(shared: Shared) -> Shared:
        run = shared.run * times
        if isinstance(shared, SharedNumbers):
            return SharedNumbers(shared.numbers, shared.starts * times + places.start, len(places), run)
        part = math.gcd(run, places.start)  # a number of fewer groups, where the first piece is within its run
        whole = repeated(shared.numbers, run // part, -1)[..., places.start // part : -(-places.stop // part)]
        return RunNumbers(whole.contiguous(), len(places), part)

    return replace(_on_groups(groups, cut, moved), size=size)


def _of_sorted(weight: Int4 | Int8, order: Tensor, part: range) -> Weight:
    """A part has some columns of each group. Groups of SORTED_GROUP columns hold them. Columns of zeros, which multiply
    the part's first input, fill up the last of these groups."""
    columns = ((order >= part.start) & (order < part.stop)).nonzero().flatten()
    group_of = columns // weight.groups.size
    counts = group_of.bincount(minlength=weight.groups.scales.shape[-1])
    pieces = -(-counts // SORTED_GROUP)
    within = torch.arange(len(columns), device=order.device) - (counts.cumsum(0) - counts)[group_of]
    places = (pieces.cumsum(0) - pieces)[group_of] * SORTED_GROUP + within
    groups_of_pieces = torch.arange(len(counts), device=order.device).repeat_interleave(pieces)

    def of_pieces(numbers: Tensor) -> Tensor:
        return numbers[..., groups_of_pieces]

    groups = replace(_on_groups(weight.groups, of_pieces, _no_integers), size=SORTED_GROUP)
    q = pairs(weight.q) if isinstance(weight, Int4) else weight.q
    zeros = q.new_full(groups.scales.shape, zero_of(weight)) if groups.zeros is None else groups.zeros.to(q.dtype)
    filled = zeros.repeat_interleave(SORTED_GROUP, dim=-1)
    filled[..., places] = q[..., columns]
    inputs = order.new_zeros(filled.shape[-1])
    inputs[places] = order[columns] - part.start
    return replace(weight, q=pack_pairs(filled) if isinstance(weight, Int4) else filled, groups=groups, order=inputs)


def _no_integers(shared: Shared) -> Shared:
    raise AssertionError("the scales of integers with an order are not shared")


def padded_inputs(weight: Weight, multiple: int) -> Weight:
    """The weight with inputs whose numbers are not used until they are a multiple."""
    inputs = size_of(weight)[1]
    if not (missing := -inputs % multiple):
        return weight
    if isinstance(weight, Dense):
        return Dense(F.pad(weight.values, (0, missing)))
    groups, size = weight.groups, weight.groups.size
    if _is_one(groups):
        groups = replace(groups, size=inputs + missing)
    else:
        more = -(-(inputs + missing) // size) - groups.scales.shape[-1]
        groups = _on_groups(groups, lambda t: _with_zeros(t, more), lambda s: _with_more(s, more))
    widened = replace(_on_codes(weight, lambda codes, each: _with_zeros(codes, missing // each)), groups=groups)
    if isinstance(widened, Int4 | Int8) and widened.order is not None:
        behind = torch.arange(inputs, inputs + missing, dtype=torch.int32, device=widened.order.device)
        widened = replace(widened, order=torch.cat([widened.order, behind]))
    return widened


def _with_zeros(numbers: Tensor, count: int) -> Tensor:
    return by_bits(lambda bits: F.pad(bits, (0, count)), numbers)


def _with_more(shared: Shared, count: int) -> Shared:
    """The same with further groups, whose numbers are not used."""
    groups = shared.count + count
    missing = -(-groups // shared.run) - shared.numbers.shape[-1] if isinstance(shared, RunNumbers) else 0
    return replace(shared, count=groups, numbers=_with_zeros(shared.numbers, missing))


def joined(weights: Sequence[Weight]) -> list[Weight]:
    """The outputs of weights with the same inputs, in order. Neighbours that can be one weight become one."""
    together: list[list[Weight]] = []
    for weight in weights:
        if together and _can_join([*together[-1], weight]):
            together[-1].append(weight)
        else:
            together.append([weight])
    return [_as_one(found) if len(found) > 1 else found[0] for found in together]


def _can_join(weights: Sequence[Weight]) -> bool:
    size = _common_size([weight.groups for weight in weights if not isinstance(weight, Dense)])
    return not 0 < size < SMALLEST_GROUP and _are_alike(weights[0], weights[-1])


def _are_alike(first: Weight, second: Weight) -> bool:
    if isinstance(first, Dense) or isinstance(second, Dense):
        return isinstance(first, Dense) and isinstance(second, Dense) and first.values.dtype == second.values.dtype
    return _form(first) == _form(second) and all(map(_same, _of_all(first), _of_all(second)))


def are_equal(first: Weight, second: Weight) -> bool:
    """Whether two weights of one shape are the same in the same form."""
    return _are_alike(first, second) and all(map(torch.equal, _tensors_of(first), _tensors_of(second)))


def _tensors_of(weight: Weight) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    on_tensors(weight, note)
    return found


def _form(weight: Codes) -> tuple[object, ...]:
    """What joined weights have in common, beside tensors. Shared numbers are not cut into smaller groups."""
    groups, bits = weight.groups, weight.bits if isinstance(weight, Planes) else None
    size = None if isinstance(groups.scales, Tensor) and isinstance(groups.offsets, Tensor | None) else groups.size
    return type(weight), bits, size, _form_of(groups.scales), _form_of(groups.offsets)


def _form_of(scales: Scales | Shared | None) -> tuple[object, ...]:
    match scales:
        case CodedScales(codes, _, factors, offsets):
            return CodedScales, codes.dtype, _form_of(factors), _form_of(offsets)
        case SharedNumbers() | RunNumbers():
            return type(scales), scales.run
        case _:
            return (type(scales),)


def _of_all(weight: Codes) -> list[Tensor | None]:
    """The tensors that all outputs share."""
    scales = weight.groups.scales
    table = weight.table if isinstance(weight, Table4) else None
    return [order_of(weight), table, scales.table if isinstance(scales, CodedScales) else None]


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _common_size(groups: Sequence[Groups]) -> int:
    """The largest size whose multiples all these groups are; 0 if each has all inputs, which groups of any size do."""
    return math.gcd(*(0 if _is_one(group) else group.size for group in groups))


def _as_one(weights: Sequence[Weight]) -> Weight:
    if isinstance(weights[0], Dense):
        return Dense(torch.cat([weight.values for weight in weights if isinstance(weight, Dense)], dim=-2))
    first, parts = weights[0], [weight for weight in weights if not isinstance(weight, Dense)]
    inputs = size_of(first)[1]
    size = _common_size([part.groups for part in parts]) or inputs
    groups = [_pieces(part.groups, size, range(-(-inputs // size))) for part in parts]
    if any(group.zeros is not None for group in groups):
        zero = torch.tensor(zero_of(first), dtype=torch.int8, device=first.q.device)
        groups = [replace(g, zeros=zero.expand(g.scales.shape)) if g.zeros is None else g for g in groups]
    found = Groups(
        size,
        _cat_scales([group.scales for group in groups]),
        _cat_any(_cat, [group.zeros for group in groups]),
        _cat_any(_cat_scales, [group.offsets for group in groups]),
    )
    one = replace(first, q=_cat_codes([part.q for part in parts]), groups=found)
    if not isinstance(one, Planes):
        return one
    return replace(one, high=_cat_any(_cat_codes, [part.high for part in parts if isinstance(part, Planes)]))


def _cat_codes(tensors: Sequence[Tensor]) -> Tensor:
    together = stacked(tensors)
    return _cat(tensors) if together is None else together


def _cat_scales(scales: Sequence[Scales]) -> Scales:
    if coded := [part for part in scales if isinstance(part, CodedScales)]:
        factors = _cat_any(_cat_shared, [part.factors for part in coded])
        offsets = _cat_any(_cat_shared, [part.offsets for part in coded])
        return CodedScales(_cat([part.codes for part in coded]), coded[0].table, factors, offsets)
    shared = [part for part in scales if isinstance(part, Shared)]
    return _cat_shared(shared) if shared else _cat([part for part in scales if isinstance(part, Tensor)])


def _cat_shared(parts: Sequence[Shared]) -> Shared:
    numbers, (first, *_) = [part.numbers for part in parts], parts
    if isinstance(first, RunNumbers):
        return replace(first, numbers=_cat(numbers))
    starts, before = list[Tensor](), 0
    for part in parts:
        assert isinstance(part, SharedNumbers)
        starts.append(part.starts + before * part.run)
        before += len(part.numbers)
    return replace(first, numbers=_cat(numbers, 0), starts=_cat(starts))


def _cat(tensors: Sequence[Tensor], dim: int = -2) -> Tensor:
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.float() for tensor in tensors]
    return by_bits(lambda *parts: torch.cat(parts, dim=dim), *tensors)


def _cat_any(cat: Callable[[Sequence[Any]], Any], parts: Iterable[object]) -> Any:
    """`cat` of the parts that are not None; None if there is none."""
    found = [part for part in parts if part is not None]
    return cat(found) if found else None
