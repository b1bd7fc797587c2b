"""Parts of weights in any form: slices of outputs and inputs, and several weights as one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_common.errors import ModelError
from text_generation_common.quantized.values import Dense, Groups, Int4, Int8, Table4, Weight

Change = Callable[[Tensor], Tensor]


def size_of(weight: Weight) -> tuple[int, int]:
    """(outputs, inputs)"""
    codes = weight.values if isinstance(weight, Dense) else weight.q
    return codes.shape[-2], codes.shape[-1] * _codes_of_number(weight)


def _codes_of_number(weight: Weight) -> int:
    """Inputs of each number of the tensor that has the codes."""
    return 2 if isinstance(weight, Int4 | Table4) else 1


def on_outputs(weight: Weight, change: Change) -> Weight:
    """The weight with other outputs: what `change` makes of each tensor that has rows for outputs."""
    if isinstance(weight, Dense):
        return Dense(change(weight.values))
    return replace(weight, q=change(weight.q), groups=_on_groups(weight.groups, change))


def _on_groups(groups: Groups, change: Change) -> Groups:
    zeros, offsets = (None if part is None else change(part) for part in (groups.zeros, groups.offsets))
    return replace(groups, scales=change(groups.scales), zeros=zeros, offsets=offsets)


def on_tensors(weight: Weight, change: Change) -> Weight:
    """The weight with what `change` makes of each of its tensors."""
    changed = on_outputs(weight, change)
    if isinstance(changed, Table4):
        return replace(changed, table=change(changed.table))
    if isinstance(changed, Int4 | Int8) and changed.order is not None:
        return replace(changed, order=change(changed.order))
    return changed


def inputs_of(weight: Weight, part: range) -> Weight:
    """Some inputs of a weight [N, K]. Groups that the part cuts become smaller ones with the same scales. ModelError
    if the weight cannot be cut there."""
    if part == range(size_of(weight)[1]):
        return weight
    if isinstance(weight, Dense):
        return Dense(weight.values[:, part.start : part.stop].contiguous())
    if isinstance(weight, Int4 | Int8) and weight.order is not None:
        raise ModelError(
            "a layer's quantized weights are sorted by activations (desc_act), and their inputs cannot be divided over"
            " shards: choose --num-shard 1"
        )
    each = _codes_of_number(weight)
    if part.start % each:
        raise ModelError(f"quantized weights cannot be divided at input {part.start}: choose another --num-shard")
    size = gcd(weight.groups.size, part.start)
    places = range(part.start // size, -(-part.stop // size))
    repeated = weight.groups.size // size

    def of_part(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(repeated, dim=1)[:, places.start : places.stop].contiguous()

    q = weight.q[:, part.start // each : -(-part.stop // each)].contiguous()
    return replace(weight, q=q, groups=replace(_on_groups(weight.groups, of_part), size=size))


def padded_inputs(weight: Weight, multiple: int) -> Weight:
    """The weight with inputs whose numbers are not used until they are a multiple."""
    inputs = size_of(weight)[1]
    if not (missing := -inputs % multiple):
        return weight
    if isinstance(weight, Dense):
        return Dense(F.pad(weight.values, (0, missing)))
    each, size = _codes_of_number(weight), weight.groups.size
    groups = -(-(inputs + missing) // size) - weight.groups.scales.shape[1]
    q = _with_zeros(weight.q, missing // each)
    widened = replace(weight, q=q, groups=_on_groups(weight.groups, lambda numbers: _with_zeros(numbers, groups)))
    if isinstance(widened, Int4 | Int8) and widened.order is not None:
        more = torch.arange(inputs, inputs + missing, dtype=torch.int32, device=q.device)
        widened = replace(widened, order=torch.cat([widened.order, more]))
    return widened


def _with_zeros(numbers: Tensor, count: int) -> Tensor:
    return torch.cat([numbers, numbers.new_zeros(numbers.shape[0], count)], dim=1)


def joined(weights: Sequence[Weight]) -> list[Weight]:
    """The outputs of all weights, in order. Neighbours whose forms are the same become one weight."""
    together: list[list[Weight]] = []
    for weight in weights:
        if together and _are_alike(together[-1][-1], weight):
            together[-1].append(weight)
        else:
            together.append([weight])
    return [_as_one(group) for group in together]


def _are_alike(first: Weight, second: Weight) -> bool:
    if isinstance(first, Dense) and isinstance(second, Dense):
        return first.values.dtype == second.values.dtype
    if isinstance(first, Dense) or isinstance(second, Dense) or type(first) is not type(second):
        return False
    parts = [
        (
            w.groups.size,
            w.groups.scales.dtype,
            *(None if p is None else p.dtype for p in (w.groups.zeros, w.groups.offsets)),
        )
        for w in (first, second)
    ]
    return parts[0] == parts[1] and all(map(_same, _of_all(first), _of_all(second)))


def are_equal(first: Weight, second: Weight) -> bool:
    """Whether two weights of one shape are the same in the same form."""
    tensors: list[list[Tensor]] = [[], []]
    for weight, found in zip((first, second), tensors, strict=True):
        on_tensors(weight, _noted_in(found))
    return _are_alike(first, second) and all(map(torch.equal, *tensors))


def _of_all(weight: Weight) -> list[Tensor | None]:
    """The tensors that all outputs share."""
    if isinstance(weight, Table4):
        return [weight.table]
    return [weight.order] if isinstance(weight, Int4 | Int8) else []


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _as_one(weights: Sequence[Weight]) -> Weight:
    if len(weights) == 1:
        return weights[0]
    found: list[list[Tensor]] = []
    for weight in weights:
        found.append([])
        on_outputs(weight, _noted_in(found[-1]))
    tensors = zip(*found, strict=True)
    return on_outputs(weights[0], lambda _: torch.cat(next(tensors), dim=-2))


def _noted_in(tensors: list[Tensor]) -> Change:
    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return note
