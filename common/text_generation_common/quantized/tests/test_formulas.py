"""GPTQ and AWQ layers, packed here bit by bit from their definition, are read to the matrix that the definition gives.
Parts of values are parts of the matrix."""

import numpy as np
import pytest
import torch
from golden_layers import GOLDEN, Case

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.tensors.codes import awq_pairs, pairs
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of, joined, on_outputs, padded_inputs
from text_generation_common.quantized.values import Dense, Int4, Int8

N, K = 40, 256


def words(rows, bits):
    """Rows of numbers as words of 32 bits, the first number in the lowest bits: each row is one large integer."""
    whole = [sum(int(number) << (i * bits) for i, number in enumerate(row)) for row in rows]
    count = -(-len(rows[0]) * bits // 32)
    cut = [[(row >> (32 * i)) & 0xFFFFFFFF for i in range(count)] for row in whole]
    return torch.tensor(np.array(cut, dtype=np.uint32).astype(np.int32))


def gptq(bits, size, *, version=1, act_order=False, symmetric=False, seed=0, outputs=N):
    random = np.random.default_rng(seed)
    groups = np.arange(K) // size
    if act_order:
        groups = random.permutation(groups)
    q, count = random.integers(0, 2**bits, (K, outputs)), K // size
    z = np.full((count, outputs), 2 ** (bits - 1)) if symmetric else random.integers(0, 2**bits, (count, outputs))
    s = random.random((count, outputs)).astype(np.float16)
    tensors = {
        "l.qweight": words(q.T, bits).T.contiguous(),
        "l.qzeros": words((z - (version == 1)) % 2**bits, bits),
        "l.scales": torch.tensor(s),
        "l.g_idx": torch.tensor(groups.astype(np.int32)),
    }
    form = {1: "gptq", 2: "gptq_v2"}[version]
    settings = {"quant_method": "gptq", "bits": bits, "group_size": -1 if size == K else size}
    settings |= {"sym": symmetric, "desc_act": act_order}
    exact = s.astype(np.float32)[groups] * (q - z[groups]).astype(np.float32)
    return Case({**settings, "checkpoint_format": form}, (outputs, K), tensors, torch.tensor(exact.T.copy()))


def awq(size, seed=0):
    random = np.random.default_rng(seed)
    q, z = random.integers(0, 16, (K, N)), random.integers(0, 16, (K // size, N))
    s = random.random((K // size, N)).astype(np.float16)
    # The n-th nibble of a word has this one of eight columns.
    columns = np.arange(N).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    tensors = {"l.qweight": words(q[:, columns], 4), "l.qzeros": words(z[:, columns], 4), "l.scales": torch.tensor(s)}
    settings = {"quant_method": "awq", "w_bit": 4, "q_group_size": size, "version": "GEMM", "zero_point": True}
    groups = np.arange(K) // size
    exact = s.astype(np.float32)[groups] * (q - z[groups]).astype(np.float32)
    return Case(settings, (N, K), tensors, torch.tensor(exact.T.copy()))


def fp8_blocks(scale_type):
    random = np.random.default_rng(3)
    q = torch.tensor(random.normal(size=(130, 208))).to(torch.float8_e4m3fn)
    scales = torch.tensor(2.0 ** random.integers(-5, 5, (2, 2))).to(scale_type)
    exact = q.float() * scales.float().repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :208]
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    return Case(settings, (130, 208), {"l.weight": q, "l.weight_scale_inv": scales}, exact)


def values_of_all_forms():
    """{name: (value, matrix)}"""
    cases = {name: GOLDEN[name] for name in ("3 bits 32 symmetric=False", "8 bits 64 symmetric=False", "fp8 blocks")}
    cases |= {name: GOLDEN[name] for name in ("nvfp4", "mxfp4 packed", "nf4 nested=False 6x96", "mxfp4 experts")}
    cases |= {name: GOLDEN[name] for name in ("nf4 nested=True 6x96", "nf4 nested=True 264x64")}
    cases |= {"gptq": gptq(4, 64), "awq": awq(32), "act-order": gptq(4, 64, act_order=True)}
    cases |= {"fp8 e8m0": fp8_blocks(torch.float8_e8m0fnu), "one group": gptq(8, K)}
    cases |= {"act-order in 8 bits": gptq(8, 128, act_order=True, symmetric=True)}
    found = {name: (case.read(), case.matrix) for name, case in cases.items()}
    dense = torch.randn(N, K)
    return {**found, "dense": (Dense(dense), dense)}


VALUES = values_of_all_forms()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, 64, 128, K])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_is_read_as_it_is_defined(bits, size, version):
    for act_order in (False, True):
        for symmetric in (False, True):
            case = gptq(bits, size, version=version, act_order=act_order, symmetric=symmetric, seed=bits)
            value = case.read()
            assert torch.equal(exact_weight(value), case.matrix), (act_order, symmetric)
            assert (value.groups.zeros is None) is symmetric
            assert (value.order is not None) is (act_order and size < K)


@pytest.mark.parametrize("size", [32, 64, 128, K])
def test_awq_is_read_as_it_is_defined(size):
    case = awq(size)
    assert torch.equal(exact_weight(case.read()), case.matrix)


def test_an_order_of_inputs_is_kept_by_outputs_that_fill_no_words():
    case = gptq(4, 64, act_order=True, outputs=44)
    assert torch.equal(exact_weight(case.read()), case.matrix)


@pytest.mark.parametrize(("inputs", "outputs"), [(36, 16), (6, 8), (64, 24)])
def test_words_of_awq_become_pairs_of_inputs_also_where_these_fill_no_words(inputs, outputs):
    q = torch.randint(0, 16, (inputs, outputs))
    columns = torch.arange(outputs).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    found = awq_pairs(words(q[:, columns].tolist(), 4))
    assert torch.equal(pairs(found), q.T.to(torch.uint8))


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_blocks_of_fp8_may_be_partial_and_have_scales_of_any_type(scale_type):
    case = fp8_blocks(scale_type)
    value = case.read()
    assert torch.equal(exact_weight(value), case.matrix) and value.groups.scales.numbers.dtype == scale_type


def test_a_g_idx_in_the_order_of_inputs_makes_no_order_whatever_desc_act_says():
    case = gptq(4, 32)
    case.settings["desc_act"] = True
    assert case.read().order is None
    del case.tensors["l.g_idx"]
    assert torch.equal(exact_weight(case.read()), case.matrix)


def first_rows(numbers):
    return numbers[..., :4, :]


@pytest.mark.parametrize("name", VALUES)
def test_some_outputs_of_a_value_are_these_rows_of_the_matrix(name):
    value, exact = VALUES[name]
    rows = torch.tensor([3, 0, 5])
    assert torch.equal(exact_weight(on_outputs(value, lambda numbers: numbers[..., rows, :])), exact[..., rows, :])
    assert torch.equal(exact_weight(on_outputs(value, first_rows)), exact[..., :4, :])


@pytest.mark.parametrize("name", VALUES)
def test_outputs_that_are_added_have_weights_of_zero(name):
    value, exact = VALUES[name]

    def padded(numbers):
        return torch.nn.functional.pad(numbers, (0, 0, 0, 3))

    wide = on_outputs(on_outputs(value, first_rows), padded)
    assert torch.equal(exact_weight(wide), padded(exact[..., :4, :]))
    (both,) = joined([wide, value])
    assert torch.equal(exact_weight(both), torch.cat([padded(exact[..., :4, :]), exact], dim=-2))
    half = range(exact.shape[-1] // 2, exact.shape[-1])
    assert torch.equal(exact_weight(inputs_of(wide, half)), padded(exact[..., :4, half.start :]))


@pytest.mark.parametrize("name", VALUES)
def test_some_inputs_of_a_value_are_these_columns_of_the_matrix_also_within_groups(name):
    value, exact = VALUES[name]
    inputs = exact.shape[-1]
    for start, stop in ((0, inputs // 2), (inputs // 2, inputs), (16, inputs), (8, inputs - 8), (0, inputs)):
        assert torch.equal(exact_weight(inputs_of(value, range(start, stop))), exact[..., start:stop]), (start, stop)


@pytest.mark.parametrize("name", VALUES)
def test_joined_outputs_are_joined_rows(name):
    value, exact = VALUES[name]
    (both,) = joined([value, on_outputs(value, first_rows)])
    assert torch.equal(exact_weight(both), torch.cat([exact, exact[..., 0:4, :]], dim=-2))


def test_symmetric_and_asymmetric_layers_with_groups_of_other_sizes_can_be_joined():
    for bits in (2, 4, 8):
        cases = [gptq(bits, 32, symmetric=True), gptq(bits, 128), gptq(bits, K)]
        cases[2].tensors["l.scales"] = cases[2].tensors["l.scales"].float()
        (value,) = joined([case.read() for case in cases])
        assert torch.equal(exact_weight(value), torch.cat([case.matrix for case in cases]))
        assert isinstance(value, Int8 if bits == 8 else Int4) and value.groups.zeros.dtype == torch.int8


@pytest.mark.parametrize("other", [gptq(8, 64), gptq(4, 64, act_order=True)], ids=["8 bits", "act-order"])
def test_layers_of_different_forms_are_not_joined(other):
    values = [gptq(4, 64).read(), other.read()]
    assert joined(values) == values


@pytest.mark.parametrize("name", VALUES)
def test_more_inputs_leave_the_others_as_they_are(name):
    value, exact = VALUES[name]
    widened = exact_weight(padded_inputs(value, 160))
    assert widened.shape[-1] % 160 == 0 and widened.isfinite().all()
    assert torch.equal(widened[..., : exact.shape[-1]], exact)


def test_half_a_byte_is_not_given_to_a_rank():
    with pytest.raises(WeightsError, match="half of a byte; choose another --num-shard"):
        inputs_of(gptq(4, 64).read(), range(127))
