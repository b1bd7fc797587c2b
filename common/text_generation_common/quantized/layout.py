"""Which tensors a layer has in each format, with their types and shapes. They are checked by headers alone, before a
tensor is read.

Legend: N outputs, K inputs, G groups of a row, E experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.scheme import Description, Packing, Scheme

Shape = tuple[int, ...]
FLOATS = ("F16", "BF16", "F32")
DENSE_TYPES = (*FLOATS, "F64")
WORD = 32  # bits of an integer that holds packed numbers
MAX_STATE_BYTES = 4096
SMALLEST_BNB_BLOCK = 32
# Endings of tensors that change no weight: scales of activations and of keys and values, and notes.
PASSED_OVER = tuple(
    f".{name}"
    for name in (
        *("input_scale", "activation_scale", "input_zero_point", "input_global_scale", "input_scale_ub"),
        *("output_scale", "weight_format"),
        *("k_scale", "v_scale", "q_scale", "prob_scale", "prob_output_scale", "k_zero_point", "v_zero_point"),
    )
)
WEIGHT_SHAPE = ".weight_shape"
# Formats of compressed-tensors whose tensors may have a further dimension in front, for experts.
STACKED = frozenset({Packing.packed, Packing.int8, Packing.fp8, Packing.mxfp4_packed})
CLOSE = "do the files belong together? Download the model again"


class CodesTensor(Protocol):
    """A tensor's description in its file."""

    @property
    def type(self) -> str: ...  # spelled as in safetensors, such as I32

    @property
    def shape(self) -> Shape: ...


Find = Callable[[str], CodesTensor | None]  # the description of a tensor by its name, None if there is none


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of a layer. Its name is the layer's name with one of the endings; no tensor has another of them."""

    endings: tuple[str, ...]
    types: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False
    longest: int = 0  # without shapes: a vector, and the maximum of its length


def find_scheme(description: Description, layer: str, find: Find) -> Scheme | None:
    """How a layer is stored, None if it is dense. Settings often leave out modules, such as the head, that are not
    quantized, so a dense `weight` counts. WeightsError if the settings and the files contradict each other."""
    scheme = description.scheme(layer)
    weight = find(f"{layer}.weight") or find(layer)
    packed = next((name for ending in PACKED if find(name := layer + ending)), None)
    if weight is not None and weight.type in DENSE_TYPES:
        if packed is not None:
            raise WeightsError(f"the files have both {layer}.weight and {packed}, of which one is the weight: {CLOSE}")
        return None
    if scheme is None and (packed or weight):
        raise WeightsError(
            f"{packed or layer + '.weight'} is quantized, and the {description.method} settings say that {layer} is"
            f" not: {CLOSE}"
        )
    return scheme


def holds(scheme: Scheme, shape: Shape) -> bool:
    """Whether the format may have a weight of this shape. MXFP4 is for tensors that hold all experts of a layer."""
    return scheme.packing is not Packing.mxfp4 or len(shape) == 3


def check_layer(scheme: Scheme, layer: str, shape: Shape, find: Find) -> dict[str, str]:
    """{first ending of a part: the tensor's name} of a layer whose weight has the `shape` [N, K] or [E, N, K].
    WeightsError for the first tensor that is missing, twice there, or of another type or shape."""
    found = {}
    for part in parts_of(scheme, shape):
        names = [layer + ending for ending in part.endings if find(layer + ending) is not None]
        if len(names) > 1:
            raise WeightsError(f"the files have both {names[0]} and {names[1]}, of which a layer has one: {CLOSE}")
        if names:
            _check(part, names[0], find(names[0]), scheme)
            found[part.endings[0]] = names[0]
        elif not part.optional:
            raise WeightsError(
                f"the files have no tensor {layer}{part.endings[0]}, which {scheme.packing} has: {CLOSE}"
            )
    return found


def _check(part: StoredPart, name: str, stored: CodesTensor | None, scheme: Scheme) -> None:
    assert stored is not None
    if stored.type not in part.types:
        raise WeightsError(
            f"{name} is stored as {stored.type}, which {scheme.packing} does not have there, but"
            f" {' or '.join(part.types)}: {CLOSE}"
        )
    is_vector = bool(part.longest) and len(stored.shape) == 1 and 1 <= stored.shape[0] <= part.longest
    if stored.shape not in part.shapes and not is_vector:
        wanted = " or ".join(str(list(shape)) for shape in part.shapes) or f"1 to {part.longest} numbers"
        raise WeightsError(
            f"{name} has the shape {list(stored.shape)}, and {scheme.packing} with {scheme.bits} bits and groups of"
            f" {scheme.group_size or 'all'} inputs has {wanted}: {CLOSE}"
        )


def parts_of(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    """The tensors of a layer. WeightsError if the format cannot hold a weight of this shape."""
    if len(shape) == 3 and scheme.packing in STACKED:
        return tuple(_stacked(part, shape[0]) for part in parts_of(scheme, shape[1:]))
    if len(shape) != (3 if scheme.packing is Packing.mxfp4 else 2):
        raise WeightsError(f"{scheme.packing} holds no weight of {len(shape)} dimensions: choose the unquantized model")
    *_, outputs, inputs = shape
    multiples = {Packing.awq: (8, 2)}.get(scheme.packing, (1, 1 if scheme.bits == 8 else 2))
    if outputs % multiples[0] or inputs % multiples[1]:
        raise WeightsError(
            f"{scheme.packing} has weights whose outputs and inputs are multiples of {multiples[0]} and {multiples[1]},"
            f" and this one has {outputs} and {inputs}: {CLOSE}"
        )
    return PARTS[scheme.packing](scheme, shape)


def _stacked(part: StoredPart, experts: int) -> StoredPart:
    """The tensor of several weights, each of which is packed alone."""
    if WEIGHT_SHAPE in part.endings:
        return replace(part, shapes=((3,),))
    return replace(part, shapes=tuple((experts, *shape) for shape in part.shapes))


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD)


def _gptq(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    (outputs, inputs), groups = shape, scheme.groups(shape[1])
    return (
        StoredPart((".qweight",), ("I32",), ((_words(inputs, scheme.bits), outputs),)),
        StoredPart((".qzeros",), ("I32",), ((groups, _words(outputs, scheme.bits)),)),
        StoredPart((".scales",), FLOATS, ((groups, outputs),)),
        StoredPart((".g_idx",), ("I32", "I64"), ((inputs,),), optional=True),
    )


def _awq(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    (outputs, inputs), groups = shape, scheme.groups(shape[1])
    return (
        StoredPart((".qweight",), ("I32",), ((inputs, outputs // 8),)),
        StoredPart((".qzeros",), ("I32",), ((groups, outputs // 8),)),
        StoredPart((".scales",), FLOATS, ((groups, outputs),)),
    )


def _packed(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    (outputs, inputs), groups = shape, scheme.groups(shape[1])
    zeros: tuple[Shape, ...] = ((_words(outputs, scheme.bits), groups),)
    return (
        StoredPart((".weight_packed",), ("I32",), ((outputs, _words(inputs, scheme.bits)),)),
        StoredPart((".weight_scale",), FLOATS, _scale_shapes(scheme, shape)),
        StoredPart((WEIGHT_SHAPE,), ("I64", "I32"), ((2,),)),
        StoredPart((".weight_zero_point",), ("I32",), zeros, optional=scheme.symmetric),
        StoredPart((".weight_g_idx",), ("I32", "I64"), ((inputs,),), optional=True),
    )


def _int8(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    scales = _scale_shapes(scheme, shape)
    return (
        StoredPart((".weight",), ("I8",), (shape,)),
        StoredPart((".weight_scale",), FLOATS, scales),
        StoredPart((".weight_zero_point",), ("I8",), scales, optional=scheme.symmetric),
    )


def _scale_shapes(scheme: Scheme, shape: Shape) -> tuple[Shape, ...]:
    """Shapes of the scales of groups, or of one for each output or for all."""
    outputs, inputs = shape
    if scheme.group_size is not None:
        return ((outputs, scheme.groups(inputs)),)
    return ((outputs, 1), (outputs,), (1, 1), (1,), ())


def _fp8(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    outputs, inputs = shape
    scales = _scale_shapes(scheme, shape)
    if scheme.block is not None:
        scales = ((-(-outputs // scheme.block[0]), -(-inputs // scheme.block[1])),)
    return (
        StoredPart((".weight",), ("F8_E4M3",), (shape,)),
        StoredPart((".weight_scale", ".weight_scale_inv"), (*FLOATS, "F8_E8M0"), scales),
    )


def _bnb4(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    count = shape[0] * shape[1]
    blocks = -(-count // SMALLEST_BNB_BLOCK)
    state = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    return (
        StoredPart((".weight",), ("U8",), ((-(-count // 2), 1), (1, -(-count // 2)))),
        StoredPart((".weight.absmax",), ("F32", "U8"), (), longest=blocks),
        StoredPart((".weight.quant_map",), ("F32",), ((16,),)),
        StoredPart(state, ("U8",), (), longest=MAX_STATE_BYTES),
        StoredPart((".weight.nested_absmax",), ("F32",), (), optional=True, longest=-(-blocks // SMALLEST_BNB_BLOCK)),
        StoredPart((".weight.nested_quant_map",), ("F32",), ((256,),), optional=True),
    )


def _bnb8(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    return (
        StoredPart((".weight",), ("I8",), (shape,)),
        StoredPart((".SCB",), ("F32",), ((shape[0],),)),
        StoredPart((".weight_format",), ("U8",), ((), (1,)), optional=True),
    )


def _mxfp4(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    blocks = (*shape[:-1], scheme.groups(shape[-1]))
    return (
        StoredPart(("_blocks",), ("U8",), ((*blocks, 16),)),
        StoredPart(("_scales",), ("U8",), (blocks,)),
    )


def _fp4(scheme: Scheme, shape: Shape) -> tuple[StoredPart, ...]:
    outputs, inputs = shape
    scale_type = "U8" if scheme.packing is Packing.mxfp4_packed else "F8_E4M3"
    weight = ".weight" if scheme.packing is Packing.nvfp4_modelopt else ".weight_packed"
    parts = (
        StoredPart((weight,), ("U8",), ((outputs, inputs // 2),)),
        StoredPart((".weight_scale",), (scale_type,), ((outputs, scheme.groups(inputs)),)),
    )
    whole = {Packing.nvfp4: ".weight_global_scale", Packing.nvfp4_modelopt: ".weight_scale_2"}.get(scheme.packing)
    return (*parts, StoredPart((whole,), ("F32",), ((1,), ()))) if whole else parts


PARTS: Mapping[Packing, Callable[[Scheme, Shape], tuple[StoredPart, ...]]] = {
    Packing.gptq: _gptq,
    Packing.gptq_v2: _gptq,
    Packing.awq: _awq,
    Packing.packed: _packed,
    Packing.int8: _int8,
    Packing.fp8: _fp8,
    Packing.bnb4: _bnb4,
    Packing.bnb8: _bnb8,
    Packing.mxfp4: _mxfp4,
    Packing.mxfp4_packed: _fp4,
    Packing.nvfp4: _fp4,
    Packing.nvfp4_modelopt: _fp4,
}
# Endings of tensors that only quantized layers have instead of `weight`.
PACKED = (".qweight", ".weight_packed", "_blocks")
