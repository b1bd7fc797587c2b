"""Blocks of GGUF files are read to what the package `gguf` computes, bit by bit, also in parts."""

import random
from contextlib import nullcontext
from pathlib import Path
from threading import current_thread

import pytest
import torch
from safetensors.torch import load_file
from test_sizes import bytes_of

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.types import BY_NAME, DENSE
from text_generation_common.quantized.tensors import blocks
from text_generation_common.quantized.tensors.blocks import READERS, read_blocks
from text_generation_common.quantized.tensors.codes import by_outputs, one_thread, repacked, spread
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of, joined, on_outputs, on_tensors, padded_inputs
from text_generation_common.quantized.tensors.stored import converted
from text_generation_common.quantized.values import Table4

GOLDEN = load_file(Path(__file__).parent / "goldens" / "gguf" / "blocks.safetensors")
LARGEST = {"Q2_K": 4.6, "Q3_K": 4.6}  # bits of a weight in memory; others take as many as files, and 3 % more
TABLE_BYTES = 64


def same(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_every_type_has_a_reader():
    assert READERS.keys() == BY_NAME.keys() - DENSE == {name for name in GOLDEN if not name.endswith(" W")}


@pytest.mark.parametrize("kind", READERS)
def test_a_value_stands_for_what_the_library_computes(kind):
    data, matrix = GOLDEN[kind], GOLDEN[f"{kind} W"]
    value = read_blocks(kind, data, "l")
    assert same(exact_weight(value), matrix)
    of_experts = read_blocks(kind, data.view(2, 2, -1), "l")
    assert same(exact_weight(of_experts), matrix.view(2, 2, -1))
    taken = bytes_of(value) - (TABLE_BYTES if isinstance(value, Table4) else 0)
    assert taken == len(data) * BY_NAME[kind].kept_bytes(512)
    assert 8 * taken <= LARGEST[kind] * matrix.numel() if kind in LARGEST else taken <= 1.03 * data.nbytes


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("part", [range(256), range(256, 512), range(40, 344), range(16, 500), range(6, 34)], ids=str)
def test_a_part_may_begin_and_end_inside_a_block(kind, part):
    matrix = GOLDEN[f"{kind} W"][:, part.start : part.stop]
    found = inputs_of(read_blocks(kind, GOLDEN[kind], "l"), part)
    assert same(exact_weight(found), matrix)
    assert same(exact_weight(padded_inputs(found, 32))[:, : len(part)], matrix)
    some = on_outputs(found, lambda numbers: numbers[1:3].clone())
    both = torch.cat([exact_weight(weight) for weight in joined([found, some])])
    assert same(both, torch.cat([matrix, matrix[1:3]]))


def test_types_join_with_themselves_only():
    values = [read_blocks(kind, GOLDEN[kind], "l") for kind in ("Q4_K", "Q4_K", "Q6_K", "Q5_K", "Q5_K", "Q3_K", "Q4_0")]
    assert len(joined(values)) == 5


@pytest.mark.parametrize("kind", READERS)
def test_a_value_whose_codes_are_converted_keeps_nothing_of_the_file_s_mapping(kind):
    data = GOLDEN[kind][:1, : BY_NAME[kind].bytes].clone()  # one block, of which a part needs no copy to be contiguous
    start, found = data.data_ptr(), []
    value = on_tensors(read_blocks(kind, data, "l"), converted)
    on_tensors(value, lambda tensor: found.append(tensor) or tensor)
    assert found and not any(start <= tensor.data_ptr() < start + data.nbytes for tensor in found)


@pytest.fixture
def three_threads():
    number = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(number)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("kind", READERS)
def test_several_threads_read_a_weight_8_outputs_at_a_time(monkeypatch, kind):
    monkeypatch.setattr(blocks, "BYTES_AT_ONCE", 1)
    for alone in (nullcontext(), one_thread()):  # torch's threads, and those of by_outputs alone
        with alone:
            value = read_blocks(kind, GOLDEN[kind].repeat(9, 1), "l")
            assert same(exact_weight(value), GOLDEN[f"{kind} W"].repeat(9, 1))


@pytest.mark.usefixtures("three_threads")
def test_codes_are_converted_by_several_threads_while_torch_computes_with_one():
    names = set()

    def convert(outputs):
        names.add((current_thread().name.partition("_")[0], torch.get_num_threads()))
        return torch.zeros(8, 1)

    with one_thread():
        by_outputs(64, 1, convert, 1)
    assert names == {("MainThread", 1), ("codes", 1)}


@pytest.mark.parametrize(("bits", "run"), [(4, 16), (4, 32), (4, 64), (2, 32), (1, 32)])
def test_numbers_that_become_neighbours_are_those_of_the_runs(bits, run):
    packed = torch.arange(256, dtype=torch.uint8).repeat(2)[torch.randperm(512, generator=torch.manual_seed(run))]
    numbers = spread(packed.view(2, -1), bits, run).view(2, -1, 8 // bits).int()
    expected = (numbers << torch.arange(0, 8, bits)).sum(-1)
    assert torch.equal(repacked(packed.view(2, -1), bits, run).int(), expected)


@pytest.mark.parametrize("kind", READERS)
def test_any_bits_are_read_or_refused_in_one_line(kind):
    rng, read = random.Random(kind), 0
    for _ in range(30):
        data = torch.tensor(list(rng.randbytes(BY_NAME[kind].bytes)), dtype=torch.uint8).view(1, -1)
        try:
            matrix = exact_weight(read_blocks(kind, data, "blk.3.ffn_up"))
            read += 1
        except WeightsError as error:
            assert "blk.3.ffn_up are broken: its scales have numbers that are not finite" in str(error)
            continue
        assert kind == "MXFP4" or matrix.isfinite().all()
    assert read > 20


# Where a block has float16.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_scales_that_are_not_finite_are_refused(kind):
    def refuses(*tail):
        data = GOLDEN[kind].clone()
        data[-1, -BY_NAME[kind].bytes :][tail[0] : tail[0] + len(tail) - 1] = torch.tensor(tail[1:], dtype=torch.uint8)
        try:
            read_blocks(kind, data, "l")
        except WeightsError:
            return True
        return False

    infinite = [at for at in range(0, BY_NAME[kind].bytes - 1, 2) if refuses(at, 0, 0x7C)]
    assert infinite == [at for at in range(0, 256, 2) if at in HALVES[kind]]
    assert all(refuses(at, 1, 0xFE) for at in HALVES[kind])  # NaN
    assert kind != "MXFP4" or refuses(0, 255)
