"""Random weights in every form, and what they are, computed number by number."""

import torch
from torch import Tensor

from text_generation_common.quantized.tensors.splits import inputs_of, size_of
from text_generation_common.quantized.values import (
    CodedScales,
    Dense,
    Fp8,
    Groups,
    Int4,
    Int8,
    Planes,
    RunNumbers,
    Table4,
    Weight,
)


def _groups(outputs: int, inputs: int, size: int, kind: str, generator: torch.Generator) -> Groups:
    shape = (outputs, -(-inputs // size))
    scales = (torch.rand(shape, generator=generator) * 0.1 + 0.01).half()
    if kind == "zeros":
        return Groups(size, scales, zeros=torch.randint(0, 16, shape, generator=generator).to(torch.int8))
    if kind == "offsets":
        return Groups(size, scales, offsets=torch.rand(shape, generator=generator))
    if kind in ("levels", "minima"):
        codes = [torch.randint(0, 64, shape, generator=generator) for _ in range(2)]
        runs = RunNumbers(scales[:, ::2] / 32, shape[1], 2)
        minima = CodedScales(codes[1].to(torch.uint8), None, runs) if kind == "minima" else None
        return Groups(size, CodedScales((codes[0] - 20).to(torch.int8), None, runs), offsets=minima)
    return Groups(size, scales)


def random_weight(form: str, outputs: int, inputs: int, size: int, seed: int = 0) -> Weight:
    """`form`: one of FORMS. Weights of equal `seed` and number of inputs have the same table and order."""
    if form.startswith("planes") and inputs % 8:  # as parts of ranks, which begin or end within a byte
        return inputs_of(random_weight(form, outputs, inputs + -inputs % 8, size, seed), range(inputs))
    generator = torch.Generator().manual_seed(seed)
    table, shuffled = torch.randn(16, generator=generator), torch.randperm(inputs, generator=generator).int()
    name, _, kind = form.partition(" ")
    groups = _groups(outputs, inputs, size, kind, generator)
    if name == "dense":
        return Dense(torch.randn(outputs, inputs, generator=generator).bfloat16())
    if name == "fp8":
        return Fp8(torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn), groups)
    if name == "int8":
        q = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
        return Int8(q, groups)
    if name.startswith("planes"):
        planes = [torch.randint(0, 256, (outputs, inputs // each), generator=generator) for each in (2, 4, 8)]
        halves, quarters, eighths = (plane.to(torch.uint8) for plane in planes)
        bits = int(name[-1])
        return Planes(bits, quarters if bits == 2 else halves, {2: None, 5: eighths, 6: quarters}[bits], groups)
    q = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    if name == "table4":
        return Table4(q, groups, table)
    return Int4(q, groups, shuffled if kind == "order" else None)


PACKED = (
    "int8", "int8 zeros", "int8 offsets", "int4", "int4 zeros", "int4 offsets", "int4 order", "fp8", "table4",
    "int4 minima", "planes2 minima", "planes5", "planes6 levels",
)  # fmt: skip
FORMS = ("dense", *PACKED)


def _code(weight: Weight, n: int, k: int) -> float:
    """The number of an output's code k, before table, zero point and scale."""
    if isinstance(weight, Planes):
        low = weight.q[n, k // 4] >> k % 4 * 2 & 3 if weight.high is None else weight.q[n, k // 2] >> k % 2 * 4 & 15
        if weight.high is None:
            return float(low)
        bits = weight.bits - 4
        return float(low + 16 * (weight.high[n, k * bits // 8] >> k * bits % 8 & 2**bits - 1))
    assert not isinstance(weight, Dense)
    return float(weight.q[n, k // 2] >> k % 2 * 4 & 15 if isinstance(weight, Int4 | Table4) else weight.q[n, k])


def numbers_of(weight: Weight) -> Tensor:
    """W in float32, [N, K], number by number."""
    if isinstance(weight, Dense):
        return weight.values.float()
    groups, (outputs, inputs) = weight.groups, size_of(weight)
    scales, offsets = groups.scales.float(), None if groups.offsets is None else groups.offsets.float()
    order = weight.order if isinstance(weight, Int4 | Int8) else None
    zero = 8.0 if isinstance(weight, Int4) else 2.0 ** (weight.bits - 1) if isinstance(weight, Planes) else 0.0
    found = torch.empty(outputs, inputs)
    for n in range(outputs):
        for k in range(inputs):
            code = _code(weight, n, k)
            number = weight.table[int(code)] if isinstance(weight, Table4) else torch.tensor(code)
            group = k // groups.size
            if offsets is not None:
                number = scales[n, group] * number - offsets[n, group]
            else:
                number = scales[n, group] * (
                    number - (zero if groups.zeros is None else groups.zeros[n, group].float())
                )
            found[n, k if order is None else int(order[k])] = number
    return found
