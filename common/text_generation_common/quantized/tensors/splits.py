"""Parts of values for ranks, and values of several layers as one. Nothing is rounded: W of a part is a part of W."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.tensors.codes import by_bits, pack_pairs, pairs, repeated
from text_generation_common.quantized.tensors.matrix import zero_of
from text_generation_common.quantized.values import Dense, Groups, Int4, Int8, Table4, Weight

SMALLEST_GROUP = 8  # inputs; smaller groups would have more bytes of scales than of codes
ORDERED_GROUP = 32  # inputs of a group in a part of a value with an order; columns of zeros fill groups up


def of_outputs(value: Weight, rows: slice | Tensor) -> Weight:
    """Some outputs of a layer. A slice gives views of the same tensors."""

    def picked(tensor: Tensor) -> Tensor:
        return by_bits(lambda numbers: numbers[..., rows, :], tensor)

    if isinstance(value, Dense):
        return Dense(picked(value.values))
    return replace(value, q=picked(value.q), groups=_changed(value.groups, value.groups.size, picked))


def of_inputs(value: Weight, start: int, stop: int) -> Weight:
    """The inputs `start` … `stop` - 1 of a layer. Both parts of a group that `start` cuts have its scales. WeightsError
    if pieces of groups would have less than SMALLEST_GROUP inputs."""
    if isinstance(value, Dense):
        return Dense(value.values[..., start:stop])
    if isinstance(value, Int4 | Int8) and value.order is not None:
        return _of_ordered(value, value.order, start, stop)
    groups = _cut(value.groups, start, stop)
    if not isinstance(value, Int4 | Table4):
        return replace(value, q=value.q[..., start:stop], groups=groups)
    if start % 2 or stop % 2:
        raise WeightsError(f"inputs {start} to {stop} of a layer in 4 bits: an odd number is half of a byte")
    return replace(value, q=value.q[..., start // 2 : stop // 2], groups=groups)


def joined(values: Sequence[Weight]) -> Weight:
    """The outputs of several layers with the same inputs, in this order. WeightsError where `can_join` is false."""
    if not can_join(values):
        raise WeightsError(
            "layers of one product are quantized in different ways (formats, tables or orders of inputs): their outputs"
            " cannot be joined"
        )
    first = values[0]
    if isinstance(first, Dense):
        return Dense(torch.cat([value.values for value in values if isinstance(value, Dense)], dim=-2))
    parts = [value for value in values if not isinstance(value, Dense)]
    groups = _alike([part.groups for part in parts], _inputs(first), zero_of(first))
    zeros, offsets = [group.zeros for group in groups], [group.offsets for group in groups]
    found = Groups(groups[0].size, _cat([group.scales for group in groups]), _cat_any(zeros), _cat_any(offsets))
    return replace(first, q=_cat([part.q for part in parts]), groups=found)


def can_join(values: Sequence[Weight]) -> bool:
    """Whether these layers, which have the same inputs, can be one value."""
    size = _common_size([value.groups for value in values if not isinstance(value, Dense)])
    has_large_groups = not 0 < size < SMALLEST_GROUP
    return has_large_groups and all(_are_alike(values[0], value) for value in values[1:])


def _are_alike(first: Weight, other: Weight) -> bool:
    if isinstance(first, Table4) and isinstance(other, Table4):
        return torch.equal(first.table, other.table)
    if isinstance(first, Int4 | Int8) and isinstance(other, Int4 | Int8):
        orders = [order for order in (first.order, other.order) if order is not None]
        has_one_order = not orders or (len(orders) == 2 and torch.equal(*orders))
        has_offsets = [value.groups.offsets is not None for value in (first, other)]
        return type(first) is type(other) and has_one_order and has_offsets[0] is has_offsets[1]
    return type(first) is type(other)


def _inputs(value: Weight) -> int:
    if isinstance(value, Dense):
        return value.values.shape[-1]
    return value.q.shape[-1] * (2 if isinstance(value, Int4 | Table4) else 1)


def _alike(groups: list[Groups], inputs: int, zero: int) -> list[Groups]:
    """The same groups in pieces of one size, all with zero points if any has them."""
    size = _common_size(groups) or inputs
    found = [_regrouped(group, size, -(-inputs // size)) for group in groups]
    if all(group.zeros is None for group in found):
        return found
    zeros = [torch.full_like(group.scales, zero, dtype=torch.int8) for group in found]
    return [
        group if group.zeros is not None else replace(group, zeros=z) for group, z in zip(found, zeros, strict=True)
    ]


def _common_size(groups: Sequence[Groups]) -> int:
    """The largest size whose multiples all these groups are; 0 if each has all inputs, which groups of any size do."""
    return math.gcd(*(0 if _is_one(group) else group.size for group in groups))


def _is_one(groups: Groups) -> bool:
    return groups.scales.shape[-1] == 1


def _cat(tensors: list[Tensor]) -> Tensor:
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.float() for tensor in tensors]
    return by_bits(lambda *parts: torch.cat(parts, dim=-2), *tensors)


def _cat_any(tensors: list[Tensor | None]) -> Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return _cat(found) if found else None


def _changed(groups: Groups, size: int, change: Callable[[Tensor], Tensor]) -> Groups:
    zeros, offsets = (None if tensor is None else change(tensor) for tensor in (groups.zeros, groups.offsets))
    return Groups(size, change(groups.scales), zeros, offsets)


def _cut(groups: Groups, start: int, stop: int) -> Groups:
    if _is_one(groups):
        return replace(groups, size=stop - start)
    size = math.gcd(groups.size, start) if start % groups.size else groups.size
    if size < min(SMALLEST_GROUP, groups.size):
        raise WeightsError(
            f"a rank's inputs begin at {start}, within a group of {groups.size} inputs, and would cut it into pieces of"
            f" {size}: choose another --num-shard"
        )
    whole = _regrouped(groups, size, -(-stop // size))
    return _changed(whole, size, lambda tensor: tensor[..., start // size :])


def _regrouped(groups: Groups, size: int, count: int) -> Groups:
    """The first `count` pieces of `size` inputs of the same groups."""
    times = count if _is_one(groups) else groups.size // size
    return _changed(groups, size, lambda tensor: (repeated(tensor, times, -1) if times > 1 else tensor)[..., :count])


def _of_ordered(value: Int4 | Int8, order: Tensor, start: int, stop: int) -> Weight:
    """A part has some columns of each group. Groups of ORDERED_GROUP columns hold them. Columns of zeros, which
    multiply the part's first input, fill up the last of these groups."""
    columns = ((order >= start) & (order < stop)).nonzero().flatten()
    group_of = columns // value.groups.size
    counts = group_of.bincount(minlength=value.groups.scales.shape[-1])
    pieces = -(-counts // ORDERED_GROUP)
    within = torch.arange(len(columns), device=order.device) - (counts.cumsum(0) - counts)[group_of]
    places = (pieces.cumsum(0) - pieces)[group_of] * ORDERED_GROUP + within
    groups_of_pieces = torch.arange(len(counts), device=order.device).repeat_interleave(pieces)
    groups = _changed(value.groups, ORDERED_GROUP, lambda tensor: tensor[..., groups_of_pieces])
    q = pairs(value.q) if isinstance(value, Int4) else value.q
    zeros = torch.full_like(groups.scales, zero_of(value), dtype=q.dtype) if groups.zeros is None else groups.zeros
    filled = zeros.to(q.dtype).repeat_interleave(ORDERED_GROUP, dim=-1)
    filled[..., places] = q[..., columns]
    inputs = order.new_zeros(filled.shape[-1])
    inputs[places] = order[columns] - start
    return replace(value, q=pack_pairs(filled) if isinstance(value, Int4) else filled, groups=groups, order=inputs)
