"""What weights take in memory as codes. Counted from settings and headers, before any weight is read."""

import math
from collections.abc import Callable, Mapping

from text_generation_common.quantized.agreement import Use
from text_generation_common.quantized.layout import Find, Shape, parts_of
from text_generation_common.quantized.scheme import Packing, Scheme

BYTE_PACKINGS = frozenset({Packing.fp8, Packing.int8, Packing.bnb8})
NUMBER_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # by the type in files; 1 for all others
INT32 = FLOAT32 = 4
INT4_GROUP = 32  # inputs that share a scale in what --quantize int4 makes
TABLE, SCALE_TABLE = 16 * FLOAT32, 256 * FLOAT32
BNB4_BLOCKS = (64, 32, *(2**power for power in range(7, 13)))  # the usual one first


def int8_bytes(outputs: int, inputs: int) -> int:
    """What --quantize int8 makes."""
    return outputs * (inputs + FLOAT32)


def int4_bytes(outputs: int, inputs: int) -> int:
    """What --quantize int4 makes."""
    return outputs * (inputs // 2 + NUMBER_BYTES["F16"] * -(-inputs // INT4_GROUP))


ON_LOAD_BYTES: Mapping[Use, Callable[[int, int], int]] = {
    Use.int8_on_load: int8_bytes, Use.int4_on_load: int4_bytes,
}  # fmt: skip


def code_bytes(scheme: Scheme, layer: str, shape: Shape, find: Find) -> int:
    """The bytes of the value that `read_layer` gives, if the tensors are as the settings say: zero points of symmetric
    integers are all the middle, and no others are. Tensors that `find` does not know are taken to be the usual ones."""
    outputs, inputs = math.prod(shape[:-1]), shape[-1]
    has_bytes = scheme.packing in BYTE_PACKINGS or scheme.bits == 8
    return outputs * (inputs if has_bytes else inputs // 2) + _scale_bytes(scheme, layer, shape, find)


def _scale_bytes(scheme: Scheme, layer: str, shape: Shape, find: Find) -> int:
    """All that a value has beside its codes."""
    outputs, inputs = math.prod(shape[:-1]), shape[-1]
    groups = outputs * scheme.groups(inputs)
    found = {
        part.endings[0]: (math.prod(stored.shape), NUMBER_BYTES.get(stored.type, 1))
        for part in parts_of(scheme, shape)
        for ending in part.endings
        if (stored := find(layer + ending)) is not None
    }
    numbers, width = found.get(".weight_scale") or found.get(".scales") or (0, NUMBER_BYTES["F16"])
    match scheme.packing:
        case Packing.mxfp4 | Packing.mxfp4_packed:
            return TABLE + groups
        case Packing.nvfp4 | Packing.nvfp4_modelopt:
            return TABLE + groups + SCALE_TABLE
        case Packing.bnb8:
            return outputs * FLOAT32
        case Packing.fp8 if scheme.block is not None:
            return numbers * width + outputs * INT32
        case Packing.bnb4:
            blocks, width = found.get(".weight.absmax", (-(-outputs * inputs // BNB4_BLOCKS[0]), 1))
            factors, _ = found.get(".weight.nested_absmax", (0, FLOAT32))
            return TABLE + _bnb4_bytes(outputs, inputs, blocks, width, factors)
        case Packing.awq:
            has_zeros, has_order = True, False
        case Packing.gptq | Packing.gptq_v2:
            has_zeros, has_order = not scheme.symmetric, scheme.act_order and scheme.group_size is not None
        case _:
            has_zeros, has_order = ".weight_zero_point" in found, ".weight_g_idx" in found
    return groups * (width + has_zeros) + (inputs * INT32 if has_order else 0)


def _bnb4_bytes(outputs: int, inputs: int, blocks: int, width: int, factors: int) -> int:
    block = next((size for size in BNB4_BLOCKS if -(-outputs * inputs // size) == blocks), BNB4_BLOCKS[0])
    size = math.gcd(block, inputs)
    if width == FLOAT32:
        return blocks * FLOAT32 + (0 if size == block else outputs * INT32)
    return outputs * inputs // size + SCALE_TABLE + (factors + 1) * FLOAT32 + 2 * outputs * INT32  # 1: the offset
