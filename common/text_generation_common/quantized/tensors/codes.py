"""Unpacks integers of a few bits from words of 32 bits, and packs pairs of 4 bits as values keep them."""

from collections.abc import Callable

import torch
from torch import Tensor, contiguous_format, int32, uint8
from torch.nn.functional import pad

BYTE = 8  # bits
NUMBERS_AT_ONCE = 2**20
LOWER_HALVES = 0x0F0F0F0F
CODES_AT_ONCE = 2**22  # numbers of 4 bits, whose words are turned without a byte for each


def bytes_of(words: Tensor) -> Tensor:
    """uint8 [..., 4 W] of int32 [..., W], lowest bits first: a copy."""
    return words.clone(memory_format=contiguous_format).view(uint8)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [..., count] of int32 [..., W]: a stream of numbers of `bits` bits each, lowest bits first, which may cross
    words."""
    streams = bytes_of(words)
    numbers = -(-count // BYTE)  # blocks of `bits` bytes hold 8 numbers
    streams = pad(streams, (0, max(0, numbers * bits - streams.shape[-1])))[..., : numbers * bits]
    blocks = streams.reshape(*words.shape[:-1], numbers, bits)
    unpacked = streams.new_empty(*blocks.shape[:-1], BYTE)
    for i in range(BYTE):
        byte, shift = divmod(i * bits, BYTE)
        number = blocks[..., byte] >> shift
        if shift + bits > BYTE:
            number |= blocks[..., byte + 1] << (BYTE - shift)
        unpacked[..., i] = number & ((1 << bits) - 1)
    return unpacked.flatten(-2)[..., :count]


# In a word, column c of eight has the 4 bits at this place, lowest first.
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack_awq(words: Tensor) -> Tensor:
    """uint8 [..., 8 W] of int32 [..., W]."""
    numbers = unpack(words, 4, words.shape[-1] * 8).reshape(*words.shape, 8)
    return numbers[..., AWQ_PLACES].flatten(-2)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """uint8 [..., K * bits / 8] of uint8 [..., K] below 2^bits, the first number of a byte in its lowest bits. `bits`:
    1, 2 or 4."""
    each = BYTE // bits
    packed = numbers[..., 0::each].clone()
    for i in range(1, each):
        packed |= numbers[..., i::each] << (bits * i)
    return packed


def spread(packed: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [..., 8 / bits * B] of uint8 [..., B], where `run` bytes have the lowest bits of `run` numbers, then the
    next ones of the `run` numbers that follow."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    shifted = [(runs >> shift) & ((1 << bits) - 1) for shift in range(0, BYTE, bits)]
    return torch.stack(shifted, dim=-2).flatten(-3)


def turn(words: Tensor) -> None:
    """Changes int32 [8, ...]. Eight words that belong together become others: word i gets at place j the 4 bits that
    word j had at place i. Half of the bits of two words change places in each round."""
    for shift, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F)):
        first, second = words.view(16 // shift, 2, shift // 4, -1).unbind(1)
        moved = (first >> shift).bitwise_xor_(second).bitwise_and_(mask)
        second.bitwise_xor_(moved)
        first.bitwise_xor_(moved.bitwise_left_shift_(shift))


def awq_pairs(words: Tensor) -> Tensor:
    """`pack_pairs` of the transposed columns of int32 [K, W]: uint8 [8 W, K / 2], without a byte for each number."""
    inputs, width = words.shape
    if inputs % BYTE:
        words = pad(words, (0, 0, 0, -inputs % BYTE))
    eights = words.reshape(-1, BYTE, width).transpose(0, 1).clone(memory_format=contiguous_format)
    turn(eights)
    found = words.new_empty(width, BYTE, eights.shape[1])
    for column, place in enumerate(AWQ_PLACES):
        found[:, column] = eights[place].t()
    return found.view(uint8).flatten(0, 1)[:, : inputs // 2]


def sorted_pairs(words: Tensor, order: Tensor) -> Tensor:
    """`pack_pairs` of the numbers of 4 bits in int32 [N, K / 8], in another order: uint8 [N, K / 2]. N is a multiple of
    8. A row of words that have one input of 8 outputs each is moved as a whole."""
    steps = words.shape[1]
    eights = words.view(-1, BYTE, steps).permute(1, 2, 0).clone(memory_format=contiguous_format)
    turn(eights)
    places = (order % BYTE * steps + order // BYTE).view(steps, BYTE).t().flatten()
    eights = eights.flatten(0, 1).index_select(0, places).view(eights.shape)
    turn(eights)
    return eights.permute(2, 0, 1).contiguous().view(uint8).flatten(0, 1)


def pack_pairs(numbers: Tensor) -> Tensor:
    """uint8 [..., K / 2] of uint8 [..., K] from 0 to 15, the first of two in the lower half."""
    return pack(numbers, 4)


def pairs(packed: Tensor) -> Tensor:
    """uint8 [..., K] from 0 to 15 of uint8 [..., K / 2]: the inverse of `pack_pairs`."""
    return spread(packed, 4, 1)


def by_outputs(
    outputs: int, inputs: int, convert: Callable[[slice], Tensor], at_once: int = NUMBERS_AT_ONCE
) -> Tensor:  # fmt: skip
    """What `convert` makes of slices of outputs, in one tensor. A slice has few numbers, because numbers take several
    times the memory of their codes while they are unpacked."""
    step = max(1, at_once // inputs // BYTE) * BYTE
    parts = (convert(slice(start, start + step)) for start in range(0, outputs, step))
    first = next(parts)
    found, end = first.new_empty(outputs, first.shape[1]), len(first)
    found[:end] = first
    for part in parts:
        found[end : end + len(part)] = part
        end += len(part)
    return found


def halves_swapped(packed: Tensor) -> Tensor:
    """uint8, by words, because torch shifts bytes one by one."""
    count = packed.numel()
    words = pad(packed.reshape(-1), (0, -count % 4)).view(int32)
    return ((words >> 4 & LOWER_HALVES) | (words & LOWER_HALVES) << 4).view(uint8)[:count].view(packed.shape)


def by_bits(change: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`change` of tensors, of which those with numbers of 8 bits give their bits: torch moves few types of them."""
    dtype = tensors[0].dtype
    return change(*tensors) if dtype.itemsize > 1 else change(*(tensor.view(uint8) for tensor in tensors)).view(dtype)


def repeated(tensor: Tensor, times: int, dim: int) -> Tensor:
    """Each number, or each row, `times` times."""
    return by_bits(lambda numbers: numbers.repeat_interleave(times, dim=dim), tensor)
