"""Layers that the formats' own libraries have packed are read to the libraries' matrices, bit by bit."""

import pytest
import torch
from golden_layers import GOLDEN

from text_generation_common.quantized.tensors.matrix import exact_weight

# bitsandbytes computes without the matrix of such layers. Its function for the matrix multiplies codes by scales before
# it divides by 127, and a value has one scale.
ROUNDED = ("bitsandbytes int8",)


@pytest.mark.parametrize("name", [name for name in sorted(GOLDEN) if name not in ROUNDED])
def test_a_layer_is_read_to_the_matrix_of_its_library(name):
    case = GOLDEN[name]
    assert torch.equal(exact_weight(case.read()).view(torch.int32), case.matrix.view(torch.int32)), name


def test_bitsandbytes_in_8_bits_differs_by_one_rounding():
    case = GOLDEN["bitsandbytes int8"]
    assert ((exact_weight(case.read()) - case.matrix).abs() <= 2**-23 * case.matrix.abs()).all()


def test_the_golden_files_have_all_formats():
    packings = {case.scheme().packing.name for case in GOLDEN.values()}
    assert packings == set("awq bnb4 bnb8 fp8 gptq gptq_v2 int8 mxfp4 mxfp4_packed nvfp4 packed".split()) - {"awq"}
