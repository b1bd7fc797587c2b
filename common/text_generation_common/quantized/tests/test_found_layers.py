"""Which layers of a checkpoint are quantized shows in settings and tensors together. Nothing is read to find it out."""

import pytest
import torch
from golden_layers import GOLDEN, Case
from test_formulas import K, N, gptq

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.layout import PASSED_OVER, check_layer, find_scheme, parts_of
from text_generation_common.quantized.scheme import Description, Packing, Scheme
from text_generation_common.quantized.values import Int4


@pytest.mark.parametrize(
    "name", ["4 bits 32 symmetric=False", "fp8 blocks", "nf4 nested=False 12x128", "mxfp4 experts"]
)
def test_a_dense_weight_is_dense_whatever_the_settings_say(name):
    case = GOLDEN[name]
    dense = Case(case.settings, case.shape, {"l.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}, case.matrix)
    assert dense.scheme() is None and case.scheme() is not None


def test_a_quantized_head_is_read():
    case = gptq(4, 64)
    head = {name.replace("l.", "lm_head."): tensor for name, tensor in case.tensors.items()}
    value = Case({**case.settings, "lm_head": True}, case.shape, head, case.matrix).read("lm_head")
    assert isinstance(value, Int4)


def test_a_layer_without_tensors_has_the_scheme_of_the_settings_and_lacks_them():
    scheme = Scheme(Packing.awq, 4, 32)
    assert find_scheme(Description("awq", scheme), "l", {}.get) == scheme
    with pytest.raises(WeightsError, match=r"no tensor l\.qweight, which awq has"):
        check_layer(scheme, "l", (N, K), {}.get)


@pytest.mark.parametrize("packing", [Packing.fp8, Packing.int8, Packing.nvfp4_modelopt, Packing.packed])
def test_scales_of_activations_and_of_the_cache_are_not_tensors_of_the_weight(packing):
    endings = {ending for part in parts_of(Scheme(packing, 4, 16), (32, 64)) for ending in part.endings}
    assert not endings & set(PASSED_OVER)


def test_headers_alone_are_asked_for():
    case = gptq(3, 64)
    names = check_layer(case.scheme(), "l", case.shape, case.find)
    assert names == {ending: f"l{ending}" for ending in (".qweight", ".qzeros", ".scales", ".g_idx")}
