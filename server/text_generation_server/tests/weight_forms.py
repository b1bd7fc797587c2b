"""Random weights in every form, and what they are, computed number by number."""

import torch
from torch import Tensor

from text_generation_common.quantized.values import Dense, Fp8, Groups, Int4, Int8, Table4, Weight


def _groups(outputs: int, inputs: int, size: int, kind: str, generator: torch.Generator) -> Groups:
    shape = (outputs, -(-inputs // size))
    scales = (torch.rand(shape, generator=generator) * 0.1 + 0.01).half()
    if kind == "zeros":
        return Groups(size, scales, zeros=torch.randint(0, 16, shape, generator=generator).to(torch.int8))
    if kind == "offsets":
        return Groups(size, scales, offsets=torch.rand(shape, generator=generator))
    return Groups(size, scales)


def random_weight(form: str, outputs: int, inputs: int, size: int, seed: int = 0) -> Weight:
    """`form`: one of FORMS. Weights of equal `seed` and number of inputs have the same table and order."""
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
    q = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    if name == "table4":
        return Table4(q, groups, table)
    return Int4(q, groups, shuffled if kind == "order" else None)


PACKED = (
    "int8", "int8 zeros", "int8 offsets", "int4", "int4 zeros", "int4 offsets", "int4 order", "fp8", "table4",
)  # fmt: skip
FORMS = ("dense", *PACKED)


def numbers_of(weight: Weight) -> Tensor:
    """W in float32, [N, K], number by number."""
    if isinstance(weight, Dense):
        return weight.values.float()
    groups, half = weight.groups, isinstance(weight, Int4 | Table4)
    outputs, inputs = weight.q.shape[0], weight.q.shape[1] * (2 if half else 1)
    order = weight.order if isinstance(weight, Int4 | Int8) else None
    found = torch.empty(outputs, inputs)
    for n in range(outputs):
        for k in range(inputs):
            q = weight.q[n, k // 2 if half else k]
            code = (int(q) >> (4 if k % 2 else 0)) & 15 if half else 0
            number = torch.tensor(float(code)) if half else q.float()
            if isinstance(weight, Table4):
                number = weight.table[code]
            group = k // groups.size
            scale = groups.scales[n, group].float()
            if groups.offsets is not None:
                number = scale * number - groups.offsets[n, group].float()
            else:
                zero = 8.0 if isinstance(weight, Int4) else 0.0
                number = scale * (number - (zero if groups.zeros is None else groups.zeros[n, group].float()))
            found[n, k if order is None else int(order[k])] = number
    return found
