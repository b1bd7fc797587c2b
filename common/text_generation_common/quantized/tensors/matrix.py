"""The matrix that a value stands for. Tests compare it with what the libraries compute that write the formats."""

from torch import Tensor

from text_generation_common.quantized.tensors.codes import pairs
from text_generation_common.quantized.values import Dense, Fp8, Groups, Int4, Int8, Table4, Weight


def zero_of(value: Weight) -> int:
    """The zero point of a value without zero points and offsets."""
    return 8 if isinstance(value, Int4) else 0


def matrix(value: Weight) -> Tensor:
    """W in float32 [..., N, K], its columns in the order of the layer's inputs."""
    match value:
        case Dense():
            return value.values.float()
        case Fp8():
            return value.q.float() * _by_column(value.groups.scales, value.groups, value.q.shape[-1])
        case Table4():
            numbers = value.table[pairs(value.q).int()]
            return numbers * _by_column(value.groups.scales, value.groups, numbers.shape[-1])
        case Int8():
            return _in_order(_scaled(value.q.float(), value.groups, zero_of(value)), value.order)
        case Int4():
            return _in_order(_scaled(pairs(value.q).float(), value.groups, zero_of(value)), value.order)


def _scaled(q: Tensor, groups: Groups, zero: int) -> Tensor:
    scales = _by_column(groups.scales, groups, q.shape[-1])
    if groups.offsets is not None:
        return scales * q - _by_column(groups.offsets, groups, q.shape[-1])
    return scales * (q - (zero if groups.zeros is None else _by_column(groups.zeros, groups, q.shape[-1])))


def _by_column(numbers: Tensor, groups: Groups, inputs: int) -> Tensor:
    return numbers.float().repeat_interleave(groups.size, dim=-1)[..., :inputs]


def _in_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Moves each column of a weight matrix to the index in `order`, that of the input that the column multiplies. If
    several columns have the same index, all of them except one are 0, so they are added."""
    if order is None:
        return columns
    found = columns.new_zeros(*columns.shape[:-1], int(order.max()) + 1)
    return found.index_add_(-1, order, columns)
