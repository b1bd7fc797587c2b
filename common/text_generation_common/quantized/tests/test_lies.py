"""Tensors that contradict their settings, their shapes or each other are refused in one line."""

import json

import pytest
import torch
from golden_layers import GOLDEN, Case
from test_formulas import K, N, gptq

from text_generation_common.errors import WeightsError


def changed(case, **tensors):
    """The case with other tensors: None removes one."""
    kept = {**case.tensors, **{f"l.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}}
    return Case(case.settings, case.shape, {k: v for k, v in kept.items() if v is not None}, case.matrix)


def of_settings(case, **settings):
    return Case({**case.settings, **settings}, case.shape, case.tensors, case.matrix)


def with_number(tensor, number):
    changed = tensor.clone()
    changed.view(-1)[-1] = number
    return changed


def with_state(case, **changes):
    name = next(name for name in case.tensors if "quant_state" in name)
    state = {**json.loads(bytes(case.tensors[name].tolist())), **changes}
    tensor = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return Case(case.settings, case.shape, {**case.tensors, name: tensor}, case.matrix)


GPTQ = gptq(4, 32, act_order=True)
INDEX, SCALES = GPTQ.tensors["l.g_idx"], GPTQ.tensors["l.scales"]
PACKED = GOLDEN["4 bits 32 symmetric=False"]
NF4, NESTED = GOLDEN["nf4 nested=False 12x128"], GOLDEN["nf4 nested=True 12x128"]
MXFP4, FP8 = GOLDEN["mxfp4 experts"], GOLDEN["fp8 blocks"]
ODD = torch.zeros(1, dtype=torch.uint8)

LIES = {
    "a group that is not there": (changed(GPTQ, g_idx=with_number(INDEX, K // 32)), "names groups that are not among"),
    "a negative group": (changed(GPTQ, g_idx=with_number(INDEX, -1)), "names groups that are not among the 8 groups"),
    "a group of 33 inputs": (
        changed(GPTQ, g_idx=with_number(INDEX, (INDEX[-1] + 1) % 8)),
        "more or fewer inputs than 32",
    ),
    "no inputs of a group": (changed(GPTQ, g_idx=torch.zeros_like(INDEX)), "more or fewer inputs than 32"),
    "groups of another size": (of_settings(GPTQ, group_size=64), r"l.qzeros has the shape \[8, 5\].*\[4, 5\]"),
    "other bits": (of_settings(GPTQ, bits=8), "l.qweight has the shape"),
    "no groups": (of_settings(GPTQ, group_size=0), "group_size is 0, which is not supported for gptq weights"),
    "a billion bits": (of_settings(GPTQ, bits=10**9), "bits is 1000000000, which is not supported"),
    "bits that are true": (of_settings(GPTQ, bits=True), "bits is true"),
    "scales of another shape": (changed(GPTQ, scales=SCALES.t().contiguous()), "l.scales has the shape"),
    "scales that are integers": (changed(GPTQ, scales=SCALES.int()), "l.scales is stored as I32"),
    "a scale that is not a number": (changed(GPTQ, scales=with_number(SCALES, float("nan"))), "are not finite"),
    "an infinite scale": (changed(GPTQ, scales=with_number(SCALES, float("inf"))), "are not finite"),
    "no zero points": (changed(GPTQ, qzeros=None), "no tensor l.qzeros, which gptq has"),
    "nothing": (changed(GPTQ, qweight=None), "no tensor l.qweight"),
    "a dense weight, too": (changed(GPTQ, weight=torch.zeros(N, K)), "both l.weight and l.qweight"),
    "a layer that settings leave out": (
        of_settings(GPTQ, dynamic={"-:l": {}}),
        "and the gptq settings say that l is not",
    ),
    "another shape in a tensor": (changed(PACKED, weight_shape=torch.tensor([12, 96])), r"weight_shape is \[12, 96\]"),
    "no zero points of asymmetric integers": (changed(PACKED, weight_zero_point=None), "no tensor l.weight_zero_point"),
    "few zero points": (
        changed(PACKED, weight_zero_point=torch.zeros(2, 3, dtype=torch.int32)),
        "weight_zero_point has the",
    ),
    "a short absmax": (changed(NF4, weight__absmax=NF4.tensors["l.weight.absmax"][:-1]), "absmax has 23 numbers"),
    "a long absmax": (changed(NF4, weight__absmax=torch.ones(1000)), "l.weight.absmax has the shape"),
    "an absmax of codes": (
        changed(NF4, weight__absmax=torch.zeros(24, dtype=torch.uint8)),
        "nested_absmax, .* is missing",
    ),
    "blocks of no numbers": (with_state(NF4, blocksize=0), "no blocksize that is a power of 2"),
    "blocks of many numbers": (with_state(NF4, blocksize=2**40), "no blocksize that is a power of 2"),
    "a shape in the state": (with_state(NF4, shape=[128, 12]), r"does not give the shape \[12, 128\]"),
    "no offset": (with_state(NESTED, nested_offset=None), "nested_offset is missing"),
    "an infinite offset": (with_state(NESTED, nested_offset=float("inf")), "nested_offset is missing"),
    "small nested blocks": (with_state(NESTED, nested_blocksize=32.5), "no nested_blocksize"),
    "a power that is not a number": (
        Case(
            MXFP4.settings,
            MXFP4.shape,
            {**MXFP4.tensors, "l_scales": torch.full((2, 8, 3), 255, dtype=torch.uint8)},
            None,
        ),
        "are not finite",
    ),
    "two names of scales": (changed(FP8, weight_scale_inv=FP8.tensors["l.weight_scale"]), "both l.weight_scale and"),
    "fewer blocks": (
        changed(FP8, weight_scale=FP8.tensors["l.weight_scale"][:2]),
        r"l.weight_scale has the shape \[2, 3\]",
    ),
    "integers as fp8": (changed(FP8, weight=FP8.tensors["l.weight"].view(torch.int8)), "l.weight is stored as I8"),
    "another shape of the model": (Case(GPTQ.settings, (N, 2 * K), GPTQ.tensors, None), "l.qweight has the shape"),
    "an odd number of inputs": (Case(GPTQ.settings, (N, K - 1), GPTQ.tensors, None), "multiples of 1 and 2"),
    "experts of another format": (
        Case(GPTQ.settings, (2, N, K), GPTQ.tensors, None),
        "holds no weight of 3 dimensions",
    ),
}
for kind, told in (("nf4", "is not JSON"), ("fp4", "of which a layer has one")):
    tensors = {**NF4.tensors, f"l.weight.quant_state.bitsandbytes__{kind}": ODD}
    LIES[f"a state of {kind}"] = (Case(NF4.settings, NF4.shape, tensors, None), told)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_one_line(lie):
    case, told = LIES[lie]
    with pytest.raises(WeightsError, match=told) as caught:
        case.read()
    text = str(caught.value)
    assert ("\n" not in text and len(text) < 400 and ":" in text) or ";" in text
    assert text.isascii()


def test_what_is_changed_above_is_read_before():
    for case in (GPTQ, PACKED, NF4, NESTED, MXFP4, FP8):
        case.read()
