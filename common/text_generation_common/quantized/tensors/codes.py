"""Unpacks integers of a few bits from words of 32 bits, and packs pairs of 4 bits as values keep them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, complex128, contiguous_format, int16, int32, int64, uint8
from torch.nn.functional import pad

BYTE = 8  # bits
NUMBERS_AT_ONCE = 2**20
MAX_THREADS = 4  # each has a slice in memory
POOL_THREADS = ContextVar[int | None]("POOL_THREADS", default=None)  # None: as many as torch has
LOWER_HALVES = 0x0F0F0F0F
CODES_AT_ONCE = 2**20  # numbers of 4 bits, whose words are turned without a byte for each


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


def spread(packed: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [..., 8 / bits * B] of uint8 [..., B], where `run` bytes have the lowest bits of `run` numbers, then the
    next ones of the `run` numbers that follow."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    shifted = [(runs >> shift) & ((1 << bits) - 1) for shift in range(0, BYTE, bits)]
    return torch.stack(shifted, dim=-2).flatten(-3)


# Types of as many bytes as there are numbers of 1, 2 or 4 bits in a byte, and factors that bring the lowest numbers
# of all their bytes together in the highest one.
WORDS = {1: (int64, 0x0102040810204080), 2: (int32, 0x01041040), 4: (int16, 0x0110)}
# The largest types that torch moves, by their bytes.
LARGE = {4: int32, 8: int64, 16: complex128}


def repacked(packed: Tensor, bits: int, run: int) -> Tensor:
    """uint8 [..., B] of uint8 [..., B]: the numbers that `spread` makes of the bytes, so that neighbours lie in a byte,
    the first one in its lowest bits. There is no byte for each number meanwhile, and bytes are moved in pieces as large
    as possible: a piece takes torch as long as a byte."""
    each, (word, factor) = BYTE // bits, WORDS[bits]
    piece, words = run // each, packed.view(word).flatten()
    large, lowest = LARGE[min(piece, max(LARGE))], int.from_bytes([(1 << bits) - 1] * each, "little")
    found, numbers = packed.new_empty(packed.numel() // run, each, piece).view(large), torch.empty_like(words)
    for number in range(each):
        torch.bitwise_right_shift(words, bits * number, out=numbers)
        numbers.bitwise_and_(lowest).mul_(factor).bitwise_right_shift_(BYTE * (each - 1))
        found[:, number] = numbers.to(uint8).view(-1, piece).view(large)
    return found.view(uint8).view(packed.shape)


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
    words = numbers.clone(memory_format=contiguous_format).view(int16)
    return (words | words >> 4).to(uint8)


def pairs(packed: Tensor) -> Tensor:
    """uint8 [..., K] from 0 to 15 of uint8 [..., K / 2]: the inverse of `pack_pairs`."""
    return spread(packed, 4, 1)


def by_outputs(
    outputs: int, inputs: int, convert: Callable[[slice], Tensor], at_once: int = NUMBERS_AT_ONCE
) -> Tensor:  # fmt: skip
    """What `convert` makes of slices of outputs, in one tensor. A slice has few numbers, because numbers take several
    times the memory of their codes while they are unpacked, and because caches hold them then."""
    step = max(1, at_once // inputs // BYTE) * BYTE
    first = convert(slice(0, step))
    found = first.new_empty(outputs, first.shape[1])
    found[:step] = first

    def place(start: int) -> None:
        found[start : start + step] = convert(slice(start, start + step))

    number = POOL_THREADS.get() or torch.get_num_threads()
    if (rest := range(step, outputs, step)) and number > 1:
        _in_threads(place, rest, number)
    else:
        for start in rest:
            place(start)
    return found


def _in_threads(place: Callable[[int], None], starts: range, number: int) -> None:
    """Each thread computes alone. If they shared torch's operations, they would wait for each other after each one: for
    milliseconds, where another process has one of the cores."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(min(number, MAX_THREADS), "codes", torch.set_num_threads, (1,)) as pool:
            for _ in pool.map(place, starts):
                pass
    finally:
        torch.set_num_threads(before)  # the last number that is set is also that of new threads


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute with one thread: what is read beside codes is small, and threads would wait for each other.
    Codes that are converted still have as many threads as torch had."""
    number = torch.get_num_threads()
    token = POOL_THREADS.set(number)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)
        POOL_THREADS.reset(token)


def halves_swapped(packed: Tensor) -> Tensor:
    """uint8, by words, because torch shifts bytes one by one."""
    count = packed.numel()
    words = pad(packed.reshape(-1), (0, -count % 4)).view(int32)
    lower = (words & LOWER_HALVES).bitwise_left_shift_(4)
    return (words >> 4).bitwise_and_(LOWER_HALVES).bitwise_or_(lower).view(uint8)[:count].view(packed.shape)


def by_bits(change: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`change` of tensors, of which those with numbers of 8 bits give their bits: torch moves few types of them."""
    dtype = tensors[0].dtype
    return change(*tensors) if dtype.itemsize > 1 else change(*(tensor.view(uint8) for tensor in tensors)).view(dtype)


def repeated(tensor: Tensor, times: int, dim: int) -> Tensor:
    """Each number, or each row, `times` times."""
    return by_bits(lambda numbers: numbers.repeat_interleave(times, dim=dim), tensor)
