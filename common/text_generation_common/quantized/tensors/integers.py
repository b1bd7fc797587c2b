"""Layers of integers with scales: GPTQ, AWQ, compressed-tensors, and bitsandbytes in 8 bits."""

import torch
from torch import Tensor

from text_generation_common.quantized.scheme import Packing, Scheme
from text_generation_common.quantized.tensors.checks import Layer, broken
from text_generation_common.quantized.tensors.codes import pack_pairs, unpack, unpack_awq, words_of
from text_generation_common.quantized.values import Groups, Int4, Int8, Weight

MIDDLE = 8  # the zero point of an Int4 without zero points
HIGHEST_BIT = 0x80  # the difference between integers of 8 bits with and without a sign
BNB_FACTOR = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


def read_gptq(layer: Layer, scheme: Scheme) -> Weight:
    bits = scheme.bits
    scales = layer.finite(".scales").t().contiguous()
    zeros = unpack(layer[".qzeros"], bits, layer.outputs).t()
    if scheme.packing is Packing.gptq:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    order = _order(layer, scheme, ".g_idx")
    q = unpack(words_of(layer[".qweight"]), bits, layer.inputs)
    return _integers(q, scales, zeros, scheme, order)


def read_awq(layer: Layer, scheme: Scheme) -> Weight:
    scales = layer.finite(".scales").t().contiguous()
    zeros = unpack_awq(layer[".qzeros"]).t()
    return _integers(unpack_awq(layer[".qweight"]).t(), scales, zeros, scheme)


def read_packed(layer: Layer, scheme: Scheme) -> Weight:
    if layer[".weight_shape"].tolist() != [layer.outputs, layer.inputs]:
        raise broken(layer.name, f"weight_shape is {layer['.weight_shape'].tolist()}, unlike its config.json says")
    scales = _by_output(layer, ".weight_scale")
    order = _order(layer, scheme, ".weight_g_idx")
    zeros = None
    if (stored := layer.find(".weight_zero_point")) is not None:
        if stored.shape[1] != scales.shape[1]:
            raise broken(layer.name, "weight_zero_point and weight_scale have different groups")
        zeros = unpack(words_of(stored), scheme.bits, layer.outputs).t()
    return _integers(unpack(layer[".weight_packed"], scheme.bits, layer.inputs), scales, zeros, scheme, order)


def read_int8(layer: Layer, scheme: Scheme) -> Weight:
    zeros = None if layer.find(".weight_zero_point") is None else _by_output(layer, ".weight_zero_point")
    scales = _by_output(layer, ".weight_scale")
    return Int8(layer[".weight"], Groups(scheme.group_size or layer.inputs, scales, _unless_all(zeros, 0)))


def read_bnb8(layer: Layer, scheme: Scheme) -> Weight:
    order = layer.find(".weight_format")
    if order is not None and order.any():
        raise broken(layer.name, "weight_format is the order of one GPU's kernels, and only rows are read")
    return Int8(layer[".weight"], Groups(layer.inputs, (layer.finite(".SCB") * BNB_FACTOR).unsqueeze(1)))


def _by_output(layer: Layer, name: str) -> Tensor:
    """[N, G] of a tensor with one number for each group, each output, or all."""
    tensor = layer.finite(name)
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(layer.outputs, 1).contiguous()
    return tensor.reshape(layer.outputs, -1)


def _integers(q: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, order: Tensor | None = None) -> Weight:
    """The value of unsigned integers q [N, K] with the zero points [N, G]; None: the middle of the integers' range."""
    size = scheme.group_size or q.shape[1]
    if order is not None:
        q = q[:, order]
    middle = 1 << (scheme.bits - 1)
    if zeros is None or (zeros == middle).all():
        q, zeros = (q + (MIDDLE - middle) if scheme.bits < 4 else q), None
    if scheme.bits == 8:
        signed = None if zeros is None else _signed(zeros)
        return Int8(_signed(q), Groups(size, scales, signed), order)
    return Int4(
        pack_pairs(q).contiguous(),
        Groups(size, scales, None if zeros is None else zeros.to(torch.int8).contiguous()),
        order,
    )


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
