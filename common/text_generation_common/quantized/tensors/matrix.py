"""The matrix that a value stands for. Tests compare it with what the libraries compute that write the formats."""

from torch import Tensor, int8

from text_generation_common.quantized.tensors.codes import pairs, spread
from text_generation_common.quantized.values import Dense, Groups, Int4, Int8, Planes, Table4, Weight


def zero_of(value: Weight) -> int:
    """The zero point of a value without zero points and offsets."""
    if isinstance(value, Planes):
        return 1 << (value.bits - 1)
    return 8 if isinstance(value, Int4) else 0


def integers_of(value: Planes) -> Tensor:
    """uint8 [..., K]."""
    if value.high is None:
        return spread(value.q, value.bits, 1)
    return pairs(value.q) | (spread(value.high, value.bits - 4, 1) << 4)


def in_bytes(value: Planes) -> Int8:
    """The same W, for products and parts that take no planes."""
    middle = 0 if value.groups.offsets is not None else zero_of(value)
    return Int8(integers_of(value).to(int8) - middle, value.groups)


def order_of(value: Weight) -> Tensor | None:
    return value.order if isinstance(value, Int4 | Int8) else None


def exact_weight(value: Weight) -> Tensor:
    """W in float32 [..., N, K], its columns in the order of the layer's inputs. If several columns multiply the same
    input, all of them except one are 0, so they are added."""
    columns, order = exact_columns(value), order_of(value)
    if order is None:
        return columns
    found = columns.new_zeros(*columns.shape[:-1], int(order.max()) + 1)
    return found.index_add_(-1, order, columns)


def exact_columns(value: Weight) -> Tensor:
    """W in float32, its columns in the order of the codes."""
    match value:
        case Dense():
            return value.values.float()
        case Table4():
            numbers = value.table[pairs(value.q).int()]
        case Int4():
            numbers = pairs(value.q).float()
        case Planes():
            numbers = integers_of(value).float()
        case _:
            numbers = value.q.float()
    return _scaled(numbers, value.groups, zero_of(value))


def _scaled(q: Tensor, groups: Groups, zero: int) -> Tensor:
    def by_column(numbers: Tensor) -> Tensor:
        return numbers.repeat_interleave(groups.size, dim=-1)[..., : q.shape[-1]]

    scales = by_column(groups.scales.float())
    if groups.offsets is not None:
        return scales * q - by_column(groups.offsets.float())
    return scales * (q - (zero if groups.zeros is None else by_column(groups.zeros.float())))
