"""Values take little more memory than the files, and launchers count it exactly, by settings and headers alone."""

import json

import pytest
import torch
from golden_layers import GOLDEN, Case
from test_formulas import K, awq, fp8_blocks, gptq

from text_generation_common.quantized.sizes import code_bytes
from text_generation_common.quantized.tensors.splits import joined, on_tensors


def bytes_of(value):
    sizes = []

    def note(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    on_tensors(value, note)
    return sum(sizes)


def of(settings, shape, tensors):
    return Case(settings, shape, {f"l{ending}": tensor for ending, tensor in tensors.items()}, None)


def byte(*shape):
    return torch.randint(0, 100, shape, dtype=torch.uint8)


def nf4(outputs, inputs, *, nested=True):
    blocks = outputs * inputs // 64
    state = {"blocksize": 64, "shape": [outputs, inputs], "nested_blocksize": 256, "nested_offset": 0.5}
    tensors = {
        ".weight": byte(outputs * inputs // 2, 1),
        ".weight.quant_map": torch.rand(16),
        ".weight.absmax": byte(blocks) if nested else torch.rand(blocks),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    if nested:
        tensors[".weight.nested_absmax"] = torch.rand(-(-blocks // 256))
        tensors[".weight.nested_quant_map"] = torch.rand(256)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return of(settings, (outputs, inputs), tensors)


def nvfp4(outputs, inputs):
    codes, scales = byte(outputs, inputs // 2), byte(outputs, inputs // 16).view(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": torch.tensor(0.3)}
    return of({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (outputs, inputs), tensors)


def fp8(outputs, inputs):
    codes, scales = byte(outputs, inputs).view(torch.float8_e4m3fn), torch.rand(-(-outputs // 128), -(-inputs // 128))
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return of(settings, (outputs, inputs), {".weight": codes, ".weight_scale_inv": scales})


LARGE = (1024, 1152)
BITS = {nf4: 4.127, nvfp4: 4.5, fp8: 8.002}


@pytest.mark.parametrize("form", BITS)
def test_scales_lie_in_memory_as_in_the_file(form):
    case = form(*LARGE)
    value = case.read()
    taken, weights = bytes_of(value), LARGE[0] * LARGE[1]
    assert case.stored_bytes * 8 / weights == pytest.approx(BITS[form], abs=0.01)
    assert taken <= 1.03 * case.stored_bytes
    assert taken == code_bytes(case.scheme(), "l", case.shape, case.find)
    (both,) = joined([value, value])
    assert bytes_of(both) <= 2 * taken


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_take_little_more_memory_than_files(bits):
    cases = [gptq(bits, size, symmetric=s) for size in (32, 64, 128, K) for s in (False, True)]
    cases += [awq(size) for size in (32, 64, 128, K)] if bits == 4 else []
    for case in cases:
        stored = case.stored_bytes - (case.tensors["l.g_idx"].nbytes if "l.g_idx" in case.tensors else 0)
        assert bytes_of(case.read()) <= 1.03 * stored, case.settings
        on_tensors(case.read(), is_contiguous)


def is_contiguous(tensor):
    assert tensor.is_contiguous()
    return tensor


MADE = {
    "gptq": gptq(4, 64), "gptq 3 bits": gptq(3, 64), "symmetric": gptq(4, 64, symmetric=True), "one group": gptq(8, K),
    "act-order": gptq(4, 64, act_order=True), "awq": awq(32), "e8m0": fp8_blocks(torch.float8_e8m0fnu),
    "fp8 blocks in bfloat16": fp8_blocks(torch.bfloat16), "nf4 with blocks of two rows": nf4(10, 96, nested=False),
}  # fmt: skip


@pytest.mark.parametrize("name", [*GOLDEN, *MADE])
def test_the_bytes_of_a_value_are_counted_before_it_is_read(name):
    case = GOLDEN.get(name) or MADE[name]
    assert code_bytes(case.scheme(), "l", case.shape, case.find) == bytes_of(case.read())


def test_without_headers_the_usual_tensors_are_counted():
    for case in (gptq(4, 64), awq(32), *(form(*LARGE) for form in BITS)):
        counted = code_bytes(case.scheme(), "l", case.shape, {}.get)
        assert 0.98 * bytes_of(case.read()) <= counted <= bytes_of(case.read())
