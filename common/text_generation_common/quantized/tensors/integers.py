"""Layers of integers with scales: GPTQ, AWQ, compressed-tensors, and bitsandbytes in 8 bits."""

import torch
from torch import Tensor

from text_generation_common.quantized.layout import WEIGHT_SHAPE
from text_generation_common.quantized.scheme import Packing, Scheme
from text_generation_common.quantized.tensors.checks import Layer, broken
from text_generation_common.quantized.tensors.codes import (
    AWQ_PLACES,
    BYTE,
    CODES_AT_ONCE,
    awq_pairs,
    by_outputs,
    bytes_of,
    pack_pairs,
    sorted_pairs,
    unpack,
    unpack_awq,
)
from text_generation_common.quantized.tensors.stored import CodesInFile, CodesOfOutputs, Columns, Runs, stored
from text_generation_common.quantized.values import Groups, Int4, Int8, Weight

MIDDLE = 8  # the zero point of an Int4 without zero points
HIGHEST_BIT = 0x80  # the difference between integers of 8 bits with and without a sign
BNB_FACTOR = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


def read_gptq(layer: Layer, scheme: Scheme) -> Weight:
    zeros = unpack(layer[".qzeros"], scheme.bits, layer.outputs).t()
    if scheme.packing is Packing.gptq:
        zeros = (zeros + 1) & ((1 << scheme.bits) - 1)
    groups = _groups(layer, scheme, layer.finite(".scales").t(), zeros)
    return _of_words(layer, scheme, layer[".qweight"].t(), groups, _order(layer, scheme, ".g_idx"))


def read_awq(layer: Layer, scheme: Scheme) -> Weight:
    groups = _groups(layer, scheme, layer.finite(".scales").t(), unpack_awq(layer[".qzeros"]).t())
    words = layer[".qweight"]

    def packed(outputs: slice) -> Tensor:
        return awq_pairs(words[:, outputs.start // 8 : outputs.stop // 8])

    def read() -> Tensor:
        return by_outputs(layer.outputs, layer.inputs, packed, CODES_AT_ONCE)

    order = Columns(tuple(4 * place for place in AWQ_PLACES), of_word=1)
    return Int4(CodesInFile([CodesOfOutputs((layer.outputs, layer.inputs // 2), words, order, read)]), groups)


def read_packed(layer: Layer, scheme: Scheme) -> Weight:
    if (said := layer[WEIGHT_SHAPE].tolist()) != [layer.outputs, layer.inputs]:
        raise broken(layer.name, f"weight_shape is {said}, and the weight is {[layer.outputs, layer.inputs]}")
    scales, points = _by_output(layer, ".weight_scale"), layer.find(".weight_zero_point")
    zeros = None if points is None else unpack(points.t(), scheme.bits, layer.outputs).t()
    groups = _groups(layer, scheme, scales, zeros)
    return _of_words(layer, scheme, layer[".weight_packed"], groups, _order(layer, scheme, ".weight_g_idx"))


def read_int8(layer: Layer, scheme: Scheme) -> Weight:
    zeros = None if layer.find(".weight_zero_point") is None else _by_output(layer, ".weight_zero_point")
    scales = _by_output(layer, ".weight_scale")
    return Int8(stored(layer[".weight"]), Groups(scheme.group_size or layer.inputs, scales, _unless_all(zeros, 0)))


def read_bnb8(layer: Layer, scheme: Scheme) -> Weight:
    order = layer.find(".weight_format")
    if order is not None and order.any():
        raise broken(layer.name, "weight_format is the order of one GPU's kernels, and only rows are read")
    return Int8(stored(layer[".weight"]), Groups(layer.inputs, (layer.finite(".SCB") * BNB_FACTOR).unsqueeze(1)))


def _by_output(layer: Layer, name: str) -> Tensor:
    """[N, G] of a tensor with one number for each group, each output, or all."""
    tensor = layer.finite(name)
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(layer.outputs, 1).contiguous()
    return tensor.reshape(layer.outputs, -1)


def _groups(layer: Layer, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Groups:
    """`zeros`: unsigned zero points [N, G]. They are left out if all are the middle of the integers' range."""
    size = scheme.group_size or layer.inputs
    if zeros is None or (zeros == 1 << (scheme.bits - 1)).all():
        return Groups(size, scales.contiguous())
    signed = _signed(zeros) if scheme.bits == 8 else zeros.to(torch.int8)
    return Groups(size, scales.contiguous(), signed.contiguous())


def _of_words(layer: Layer, scheme: Scheme, words: Tensor, groups: Groups, order: Tensor | None) -> Weight:
    """The value of unsigned integers whose words lie along the inputs, [N, W]."""
    if scheme.bits == 4 and (order is None or not (layer.outputs % BYTE or layer.inputs % BYTE)):
        return Int4(_pairs(layer, words, order), groups, order)
    is_int8, more = scheme.bits == 8, 0 if groups.zeros is not None else MIDDLE - (1 << (scheme.bits - 1))

    def converted(outputs: slice) -> Tensor:
        q = unpack(words[outputs], scheme.bits, layer.inputs)
        q = q if order is None else q[:, order]
        return _signed(q) if is_int8 else pack_pairs(q + more)

    q = by_outputs(layer.outputs, layer.inputs, converted)
    return Int8(q, groups, order) if is_int8 else Int4(q, groups, order)


def _pairs(layer: Layer, words: Tensor, order: Tensor | None) -> Tensor:
    """The same of 4 bits."""

    def turned(outputs: slice) -> Tensor:
        assert order is not None
        return sorted_pairs(words[outputs], order)

    def read() -> Tensor:
        if order is None:  # the bytes of the words are those of the value
            return bytes_of(words)[:, : layer.inputs // 2].contiguous()
        return by_outputs(layer.outputs, layer.inputs, turned, CODES_AT_ONCE)

    shape = layer.outputs, layer.inputs // 2
    if order is None and words.is_contiguous():
        return CodesInFile([CodesOfOutputs(shape, words.view(torch.uint8), Runs(), read)])
    if layer.inputs % BYTE:
        return read()
    return CodesInFile([CodesOfOutputs(shape, words.t(), Columns((0,), BYTE, order), read)])


def _signed(numbers: Tensor) -> Tensor:
    """The numbers minus 128, as int8."""
    return (numbers.contiguous() ^ HIGHEST_BIT).view(torch.int8)


def _unless_all(tensor: Tensor | None, number: int) -> Tensor | None:
    return None if tensor is None or (tensor == number).all() else tensor


def _order(layer: Layer, scheme: Scheme, name: str) -> Tensor | None:
    """The inputs in the order of their groups, or None if they lie in this order already. The tensor decides, because
    settings say `desc_act` of files without another order, too."""
    groups = layer.find(name)
    if groups is None or scheme.group_size is None:
        return None
    size, count = scheme.group_size, scheme.groups(layer.inputs)
    regular = torch.arange(layer.inputs, device=groups.device) // size
    if torch.equal(groups.long(), regular):
        return None
    if ((groups < 0) | (groups >= count)).any():
        raise broken(layer.name, f"{name[1:]} names groups that are not among the {count} groups of its inputs")
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), regular):
        raise broken(layer.name, f"{name[1:]} has groups with more or fewer inputs than {size}")
    return order.to(torch.int32)
