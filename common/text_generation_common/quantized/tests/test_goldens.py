"""Layers that the formats' own libraries have packed are read to the libraries' matrices, bit by bit."""

import pytest
import torch
from golden_layers import GOLDEN, Case

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.scheme import Packing
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.reading import read_expert

# bitsandbytes computes without the matrix of such layers. Its function for the matrix multiplies codes by scales before
# it divides by 127, and a value has one scale.
ROUNDED = ("bitsandbytes int8",)


@pytest.mark.parametrize("name", [name for name in sorted(GOLDEN) if name not in ROUNDED])
def test_a_layer_is_read_to_the_matrix_of_its_library(name):
    case = GOLDEN[name]
    exact = exact_weight(case.read())
    if name == "modelopt nvfp4":  # the library makes 0 of -0
        exact += 0
    assert torch.equal(exact.view(torch.int32), case.matrix.view(torch.int32)), name


def of_experts(case, count, shape=None):
    """The case's layer as each of several experts. compressed-tensors packs each slice alone, and writes the whole
    shape."""
    tensors = {name: torch.stack([tensor] * count) for name, tensor in case.tensors.items()}
    if "l.weight_shape" in tensors:
        tensors["l.weight_shape"] = torch.tensor(shape or [count, *case.shape])
    return Case(case.settings, (count, *case.shape), tensors, case.matrix)


def read_last(case):
    def get_slice(name, number):
        return case.tensors[name][number]

    last = case.shape[0] - 1
    return read_expert(case.scheme(), "l", case.shape, case.find, get_slice=get_slice, expert=last)


@pytest.mark.parametrize("name", ["4 bits 32 symmetric=False", "fp8 blocks"])
def test_an_expert_of_a_tensor_for_all_is_read_to_the_matrix(name):
    assert torch.equal(exact_weight(read_last(of_experts(GOLDEN[name], 3))), GOLDEN[name].matrix)


def test_experts_of_one_tensor_have_one_shape_and_a_format_that_has_such():
    case = GOLDEN["4 bits 32 symmetric=False"]
    with pytest.raises(WeightsError, match="weights of expert 2 of l are broken: weight_shape is"):
        read_last(of_experts(case, 3, [3, case.shape[0], case.shape[1] + 1]))
    short = of_experts(case, 3)
    short.tensors["l.weight_scale"] = short.tensors["l.weight_scale"][:2]
    with pytest.raises(WeightsError, match=r"l.weight_scale has the shape \[2, "):
        read_last(short)
    with pytest.raises(WeightsError, match="holds no weight of 3 dimensions"):
        read_last(of_experts(GOLDEN["nf4 nested=False 12x128"], 3))


def test_bitsandbytes_in_8_bits_differs_by_one_rounding():
    case = GOLDEN["bitsandbytes int8"]
    assert ((exact_weight(case.read()) - case.matrix).abs() <= 2**-23 * case.matrix.abs()).all()


def test_the_golden_files_have_all_formats():
    packings = {case.scheme().packing.name for case in GOLDEN.values()}
    assert packings == {packing.name for packing in Packing}
