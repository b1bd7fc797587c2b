"""Turns the blocks of GGUF files into values. A block has the codes, scales and minima of 32 or 256 neighbouring inputs
of an output. Nothing is rounded: W is, bit by bit, what the package `gguf` computes in float32.

K-quants have scales of two levels: float16 for a block, integers for its groups. So they stay. Integers of 6 bits take
8 bits in memory, those of Q3_K 4 bits.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from text_generation_common.gguf.types import BY_NAME
from text_generation_common.quantized.tensors.checks import broken
from text_generation_common.quantized.tensors.codes import BYTE, LOWER_HALVES, by_outputs, pack_pairs, repacked, spread
from text_generation_common.quantized.tensors.floats import MAGNITUDES, NO_NUMBER
from text_generation_common.quantized.tensors.splits import on_outputs
from text_generation_common.quantized.tensors.stored import CodesInFile, CodesOfOutputs, Runs
from text_generation_common.quantized.values import (
    CodedScales,
    Dense,
    Groups,
    Int4,
    Int8,
    Planes,
    RunNumbers,
    Table4,
    Weight,
)

BYTES_AT_ONCE = 2**19  # which are repacked within the processor's caches
EXPONENT_OF_F16 = 0x7C00  # all of its bits, which only infinities and NaN have
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (*MAGNITUDES, 0.0, *(-number for number in MAGNITUDES[1:]))  # without a negative zero
NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Blocks:
    """The blocks of a weight. Offsets are bytes from a block's start."""

    def __init__(self, layer: str, data: Tensor) -> None:
        self._layer = layer
        self._data = data  # [N, blocks, bytes]

    def bytes(self, start: int, count: int) -> Tensor:
        """[N, blocks, count]: a copy, because the data may be a file's mapping, which no scales keep."""
        return self._data[..., start : start + count].clone(memory_format=torch.contiguous_format)

    def words(self, start: int, word: torch.dtype) -> Tensor:
        """[N, blocks]: words that begin at a multiple of their size, in blocks of such multiples; a copy."""
        return self._data.view(word)[..., start // word.itemsize].clone(memory_format=torch.contiguous_format)

    def beginnings(self) -> "Blocks":
        """The first 16 bytes of each block, of blocks of a multiple, together."""
        return Blocks(self._layer, self._data.view(torch.complex128)[..., :1].clone().view(torch.uint8))

    def codes(self, start: int, count: int, bits: int, run: int) -> Tensor:
        """[N, codes] in the order of inputs, of bytes whose codes are ordered as `spread` says."""
        runs, numbers = range(start, start + count, run), range(0, BYTE, bits)
        starts = [BYTE * at + number for at in runs for number in numbers]

        def read() -> Tensor:
            return self.in_parts(lambda part: repacked(part.bytes(start, count), bits, run))

        return self._stored(count, starts, run * bits // BYTE, bits, read)

    def numbers(self, start: int, count: int) -> Tensor:
        """[N, numbers]: bytes of each block, as they are."""
        return self._stored(count, [BYTE * start], count, 0, lambda: self.bytes(start, count).flatten(1))

    def _stored(self, count: int, starts: Sequence[int], run: int, spread: int, read: Callable[[], Tensor]) -> Tensor:
        """`starts`: bits from a block's start to each run, `run` and `spread` as in `Runs`."""
        outputs, blocks, size = self._data.shape
        of_all = tuple(BYTE * size * block + start for block in range(blocks) for start in starts)
        memory = self._data.view(outputs, blocks * size)
        return CodesInFile([CodesOfOutputs((outputs, blocks * count), memory, Runs(of_all, run, spread), read)])

    def in_parts(self, make: Callable[["Blocks"], Tensor]) -> Tensor:
        """[N, codes] of what `make` makes of a few outputs at a time."""
        outputs, blocks, size = self._data.shape

        def made(part: slice) -> Tensor:
            return make(Blocks(self._layer, self._data[part])).flatten(1)

        return by_outputs(outputs, blocks * size, made, BYTES_AT_ONCE)

    def halves(self, start: int) -> Tensor:
        """float16 [N, blocks]. WeightsError if a number is not finite."""
        bits = self.words(start, torch.int16)
        if (bits & EXPONENT_OF_F16).amax() == EXPONENT_OF_F16:
            raise broken(self._layer, "its scales have numbers that are not finite")
        return bits.view(torch.float16)

    def powers(self, start: int) -> Tensor:
        """float8_e8m0fnu [N, blocks]."""
        found = self.bytes(start, 1).squeeze(-1)
        if found.amax() == NO_NUMBER:
            raise broken(self._layer, "its scales have numbers that are not finite")
        return found.view(torch.float8_e8m0fnu)

    def levels(self, codes: Tensor, start: int) -> CodedScales:
        """Integers of groups [N, blocks, groups], times the float16 of their block."""
        groups = codes.shape[-1]
        return CodedScales(codes.flatten(1), None, RunNumbers(self.halves(start), codes.shape[1] * groups, groups))


def _q4_0(blocks: Blocks) -> Weight:
    return Int4(blocks.codes(2, 16, 4, 16), Groups(32, blocks.halves(0)))


def _q4_1(blocks: Blocks) -> Weight:
    return Int4(blocks.codes(4, 16, 4, 16), Groups(32, blocks.halves(0), offsets=-blocks.halves(2)))


def _q5_0(blocks: Blocks) -> Weight:
    high = blocks.numbers(2, 4)
    return Planes(5, blocks.codes(6, 16, 4, 16), high, Groups(32, blocks.halves(0)))


def _q5_1(blocks: Blocks) -> Weight:
    high, groups = blocks.numbers(4, 4), Groups(32, blocks.halves(0), offsets=-blocks.halves(2))
    return Planes(5, blocks.codes(8, 16, 4, 16), high, groups)


def _q8_0(blocks: Blocks) -> Weight:
    return Int8(blocks.numbers(2, 32).view(torch.int8), Groups(32, blocks.halves(0)))


def _q2_k(blocks: Blocks) -> Weight:
    both = blocks.bytes(0, 16)
    groups = Groups(16, blocks.levels(both & 15, 80), offsets=blocks.levels(both >> 4, 82))
    return Planes(2, blocks.codes(16, 64, 2, 32), None, groups)


def _q3_k(blocks: Blocks) -> Weight:
    lower, upper = spread(blocks.bytes(96, 8), 4, 8), spread(blocks.bytes(104, 4), 2, 4)
    scales = blocks.levels(_less_32(lower | upper << 4), 108)

    def codes(part: Blocks) -> Tensor:
        """The integers -4 … 3, plus the 8 of Int4."""
        return pack_pairs(spread(part.bytes(32, 64), 2, 32) + (spread(part.bytes(0, 32), 1, 32) << 2) + 4)

    return Int4(blocks.in_parts(codes), Groups(16, scales))


def _q4_k(blocks: Blocks) -> Weight:
    return Int4(blocks.codes(16, 128, 4, 32), _k_groups(blocks))


def _q5_k(blocks: Blocks) -> Weight:
    return Planes(5, blocks.codes(48, 128, 4, 32), blocks.codes(16, 32, 1, 32), _k_groups(blocks))


def _k_groups(blocks: Blocks) -> Groups:
    """Eight scales and eight minima of 6 bits. The upper two bits of the last four lie above the first four."""
    blocks = blocks.beginnings()
    scales, minima, both = (blocks.words(start, torch.int32) for start in (4, 8, 12))

    def eight(first: Tensor, last: Tensor) -> Tensor:
        words = [first & 0x3F3F3F3F, (last & LOWER_HALVES) | (first >> 2 & 0x30303030)]
        return torch.stack(words, dim=-1).view(torch.uint8)

    levels = blocks.levels(eight(scales, both), 0)
    return Groups(32, levels, offsets=blocks.levels(eight(minima, both >> 4), 2))


def _q6_k(blocks: Blocks) -> Weight:
    scales = blocks.levels(blocks.bytes(192, 16).view(torch.int8), 208)
    return Planes(6, blocks.codes(0, 128, 4, 64), blocks.codes(128, 64, 2, 32), Groups(16, scales))


def _iq4_nl(blocks: Blocks) -> Weight:
    return _table(blocks.codes(2, 16, 4, 16), Groups(32, blocks.halves(0)), IQ4)


def _iq4_xs(blocks: Blocks) -> Weight:
    scales = _less_32(spread(blocks.bytes(4, 4), 4, 1) | spread(blocks.bytes(2, 2), 2, 1) << 4)
    return _table(blocks.codes(8, 128, 4, 16), Groups(32, blocks.levels(scales, 0)), IQ4)


def _mxfp4(blocks: Blocks) -> Weight:
    return _table(blocks.codes(1, 16, 4, 16), Groups(32, blocks.powers(0)), E2M1)


def _table(q: Tensor, groups: Groups, numbers: tuple[float, ...]) -> Table4:
    return Table4(q, groups, torch.tensor(numbers, dtype=torch.float32, device=q.device))


def _less_32(codes: Tensor) -> Tensor:
    return codes.to(torch.int8) - 32


READERS: Mapping[str, Callable[[Blocks], Weight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def read_blocks(kind: str, data: Tensor, layer: str) -> Weight:
    """The weight [N, K], or [E, N, K] of experts, of a tensor of a type such as Q4_K. `data`: uint8 [N, bytes of an
    output], or the numbers of a type that has no blocks. WeightsError, which names the layer, if scales are not finite.
    """
    if kind in NUMBERS:
        return Dense(data.view(NUMBERS[kind]))
    outputs = data.shape[:-1]
    weight = READERS[kind](Blocks(layer, data.reshape(outputs.numel(), -1, BY_NAME[kind].bytes)))
    return on_outputs(weight, lambda numbers: numbers.view(*outputs, -1)) if len(outputs) > 1 else weight
