"""Products of `--activations int8`: weights of every format, rows of x, and what csrc/README.md says of y, in steps.
All numbers are made of integers, so that every machine makes the same ones."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from text_generation_common.gguf.types import BY_NAME
from text_generation_common.quantized.tensors.blocks import read_blocks
from text_generation_common.quantized.tensors.codes import pairs
from text_generation_common.quantized.tensors.matrix import integers_of, order_of, zero_of
from text_generation_common.quantized.values import CodedScales, Codes, Groups, Int4, Int8, Planes, RunNumbers, Table4

# Bytes of a block at which a float16 begins.
HALVES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
ROWS = (1, 2, 3, 5, 17, 64, 600)
SIZES = ((32, 256), (80, 512), (33, 1024), (70, 768))  # outputs and inputs
BLOCK, LEVELS = 32, 256

Make = Callable[[int, int, torch.Generator], Codes]


def _numbers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return ((_numbers(1024, shape, generator) + 64).float() / 2**16).half()


def _of_gguf(kind: str) -> Make:
    def make(outputs: int, inputs: int, generator: torch.Generator) -> Codes:
        of = BY_NAME[kind]
        data = _numbers(256, (outputs, inputs // of.block, of.bytes), generator).to(torch.uint8)
        for at in HALVES[kind]:  # an exponent that is finite
            data[..., at + 1] = (data[..., at + 1] & 0x83) | 0x1C
        if kind == "MXFP4":
            data[..., 0] = (data[..., 0] & 7) + 120
        weight = read_blocks(kind, data.flatten(1), kind)
        assert isinstance(weight, Codes)
        return weight

    return make


def _int8(outputs: int, inputs: int, generator: torch.Generator) -> Codes:
    q = (_numbers(255, (outputs, inputs), generator) - 127).to(torch.int8)
    return Int8(q, Groups(inputs, _scales((outputs, 1), generator)))


def _int8_with_zeros(outputs: int, inputs: int, generator: torch.Generator) -> Codes:
    q = (_numbers(256, (outputs, inputs), generator) - 128).to(torch.int8)
    shape = (outputs, -(-inputs // 64))
    zeros = (_numbers(256, shape, generator) - 128).to(torch.int8)
    return Int8(q, Groups(64, _scales(shape, generator), zeros))


def _int4(size: int, has_zeros: bool = False, is_sorted: bool = False) -> Make:
    def make(outputs: int, inputs: int, generator: torch.Generator) -> Codes:
        q = _numbers(256, (outputs, inputs // 2), generator).to(torch.uint8)
        shape = (outputs, -(-inputs // size))
        zeros = _numbers(17, shape, generator).to(torch.int8) if has_zeros else None
        order = torch.randperm(inputs, generator=generator).int() if is_sorted else None
        return Int4(q, Groups(size, _scales(shape, generator), zeros), order)

    return make


FORMATS: Mapping[str, Make] = {
    "int8": _int8, "int8 zeros g64": _int8_with_zeros, "int4 g32": _int4(32), "int4 zeros g128": _int4(128, True),
    "int4 order g128": _int4(128, is_sorted=True), **{kind: _of_gguf(kind) for kind in HALVES},
}  # fmt: skip


def products(
    formats: Sequence[str] = tuple(FORMATS), sizes: Sequence[tuple[int, int]] = SIZES
) -> Iterator[tuple[str, Codes, Tensor]]:
    """A name, the weight and the most rows of x of each case. x is bfloat16 or float32, in turns."""
    for number, name in enumerate(FORMATS):
        for outputs, inputs in sizes if name in formats else ():
            generator = torch.Generator().manual_seed(number)
            weight = FORMATS[name](outputs, inputs, generator)
            x = (_numbers(2**20, (max(ROWS), inputs), generator) - 2**19).float() / 2**18
            x[:, ::37] *= 16  # a few inputs are larger than the others, as in models
            x[-1, :BLOCK] = 0
            yield f"{name} {outputs}x{inputs}", weight, x if number % 2 else x.bfloat16()


def digest(y: Tensor) -> str:
    return hashlib.sha256(y.contiguous().numpy().tobytes()).hexdigest()[:12]


def product_by_hand(weight: Codes, x: Tensor) -> Tensor:
    """x Wᵀ in float32, with one operation after another."""
    order = order_of(weight)
    x = x.float() if order is None else x.float()[:, order]
    numbers, factor = _integers(weight)
    groups, inputs = weight.groups, x.shape[1]
    scales, offsets = groups.scales.float(), None if groups.offsets is None else groups.offsets.float()
    if isinstance(weight, Int8) and groups.zeros is None and scales.shape[1] == 1:
        q, d = _quantized(x)
        return (q @ numbers.t()).float() * d * scales.t()
    y = torch.zeros(len(x), len(numbers))
    if isinstance(groups.scales, CodedScales):
        for number, start in enumerate(range(0, inputs, LEVELS)):
            of_groups = range(start // groups.size, (start + LEVELS) // groups.size)
            q, d = _quantized(x[:, start : start + LEVELS])
            y = _with_levels(y, q, d, numbers[:, start : start + LEVELS], groups, number, of_groups)
        return y * factor if factor != 1 else y
    for start in range(0, inputs, BLOCK):
        q, d = _quantized(x[:, start : start + BLOCK])
        group, part, sums = start // groups.size, numbers[:, start : start + BLOCK], q.sum(1, keepdim=True)
        if groups.zeros is not None:
            part = part - groups.zeros[:, group : group + 1].double()
        y = y + (q @ part.t()).float() * (scales[:, group] * d)
        if offsets is not None:
            y = y - offsets[:, group] * (d * sums.float())
    return y * factor if factor != 1 else y


def _with_levels(
    y: Tensor, q: Tensor, d: Tensor, numbers: Tensor, groups: Groups, number: int, of_groups: range
) -> Tensor:
    def factors(levels: object) -> Tensor:
        assert isinstance(levels, CodedScales) and isinstance(levels.factors, RunNumbers)
        return levels.factors.numbers[:, number].float()

    def integers(levels: object) -> Tensor:
        assert isinstance(levels, CodedScales)
        return levels.codes[:, of_groups.start : of_groups.stop].double()

    spread = integers(groups.scales).repeat_interleave(groups.size, 1)
    y = y + (q @ (numbers * spread).t()).float() * (factors(groups.scales) * d)
    if groups.offsets is None:
        return y
    sums = q.unflatten(1, (-1, groups.size)).sum(2)
    return y - (sums @ integers(groups.offsets).t()).float() * (factors(groups.offsets) * d)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of rows of x, in float64, whose sums are exact, and the scale of each row."""
    largest = x.abs().amax(1, keepdim=True)
    most, is_zero = torch.full_like(largest, 127), largest <= 2.0**-100
    inverse, scales = (most / largest).masked_fill(is_zero, 0), (largest / most).masked_fill(is_zero, 0)
    return (x * inverse).round().double(), scales


def _integers(weight: Codes) -> tuple[Tensor, float]:
    """The integers that scales multiply, in float64, without zero points of groups; and what they are too large by."""
    bare = weight.groups.zeros is None and weight.groups.offsets is None
    match weight:
        case Table4(q, _, table):
            twice = 0.5 if bool((table % 1).any()) else 1.0
            return (table / twice)[pairs(q).int()].double(), twice
        case Int4(q):
            return pairs(q).double() - (zero_of(weight) if bare else 0), 1.0
        case Planes():
            return integers_of(weight).double() - (zero_of(weight) if bare else 0), 1.0
        case _:
            return weight.q.double(), 1.0
