"""Compares our Llama with transformers on the same weights, and with itself when other requests run at the same
time."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from family_tools import teacher_forced
from shard_tools import (
    SAMPLED,
    Client,
    fresh_client,
    generate,
    make_checkpoint,
    make_runner,
    random_ids,
    scattered_slots,
    warm_runner,
)
from transformers import LlamaForCausalLM

from text_generation_common.errors import MemoryLimitError, ModelError
from text_generation_common.memory import choose_slots
from text_generation_common.sampling import Sampling
from text_generation_server.errors import StepError
from text_generation_server.runner import ModelRunner
from text_generation_server.step.rows import StepBatch

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one query head per kv head": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "biases, odd sizes": {"attention_bias": True, "mlp_bias": True, "intermediate_size": 163},
    "wide heads": {"head_dim": 32},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "long dot products": {"hidden_size": 1024, "num_hidden_layers": 1},
}


def is_near_transformers(model: LlamaForCausalLM, runner: ModelRunner, length: int, new: int) -> None:
    """Our most likely tokens are transformers' too, and have its log-probabilities."""
    client = generate(runner, random_ids(length), new)
    expected = teacher_forced(model, random_ids(length), client.tokens[7])
    ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
    assert (expected.max(dim=1).values - ours).max() <= 1e-4
    torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy_text_and_logprobs_equal_transformers(tmp_path: Path, variant: str) -> None:
    model = make_checkpoint(tmp_path, **VARIANTS[variant])
    runner = warm_runner(tmp_path)
    for length in (1, 17, 64, 150):
        is_near_transformers(model, runner, length, 12)


@pytest.mark.parametrize("max_total_tokens", [100, 128])
def test_dynamic_rope_within_the_trained_length_equals_transformers(tmp_path: Path, max_total_tokens: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make_checkpoint(tmp_path, rope_parameters=rope, max_position_embeddings=128)
    runner = warm_runner(tmp_path, max_total_tokens=max_total_tokens)
    for length in (1, 30, max_total_tokens - 8):
        is_near_transformers(model, runner, length, 8)


def test_dynamic_rope_is_resolved_once_for_the_longest_history(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make_checkpoint(tmp_path, rope_parameters=rope, max_position_embeddings=128)
    runner = warm_runner(tmp_path, max_total_tokens=200)
    client = generate(runner, random_ids(190), 10)
    # transformers raises theta for the length of each sequence: at the longest sequence both must agree.
    expected = teacher_forced(model, random_ids(190), client.tokens[7])[-1]
    assert expected.max() - expected[client.tokens[7][-1]] <= 1e-4


def test_bfloat16_is_near_transformers(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path)
    client = generate(warm_runner(tmp_path, dtype=torch.bfloat16), random_ids(60), 12)
    expected = teacher_forced(model, random_ids(60), client.tokens[7])
    ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
    assert (expected.max(dim=1).values - ours).max() <= 0.25


@pytest.fixture(scope="module", params=["plain", "long dot products"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, **VARIANTS[request.param])
    yield warm_runner(path)


@pytest.mark.parametrize("parameters", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_other_requests_do_not_change_a_request_s_tokens_by_a_bit(runner: ModelRunner, parameters: Sampling) -> None:
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 130]
    alone = [generate(runner, random_ids(n, seed=n), 8, parameters) for n in lengths]
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=1))
    client.step([], [client.first_chunk(i, random_ids(n, n), parameters=parameters) for i, n in enumerate(lengths[:5])])
    late = [client.first_chunk(5 + i, random_ids(n, n), parameters=parameters) for i, n in enumerate(lengths[5:])]
    client.step(list(range(5)), late)
    while waiting := [i for i in range(len(lengths)) if len(client.tokens[i]) < 8]:
        client.step(waiting)
    for i, single in enumerate(alone):
        assert client.tokens[i] == single.tokens[7] and client.logprobs[i] == single.logprobs[7]


@pytest.mark.parametrize("cuts", [[1, 130], [64, 128, 130], [63, 65, 129, 130]])
def test_chunks_change_nothing_by_a_bit(runner: ModelRunner, cuts: list[int]) -> None:
    ids = random_ids(130)
    whole = generate(runner, ids, 6, SAMPLED)
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=2))
    client.step([], [client.first_chunk(7, ids, end=cuts[0], parameters=SAMPLED)])
    assert 7 not in client.tokens
    for start, end in pairwise(cuts):
        chunk = client.first_chunk(7, ids, parameters=SAMPLED)
        client.step([], [type(chunk)(7, start, end, end == 130)])
    for _ in range(5):
        client.step([7])
    assert client.tokens == whole.tokens and client.logprobs == whole.logprobs


@pytest.mark.parametrize("parameters", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_resumed_request_goes_on_as_it_would_have(runner: ModelRunner, parameters: Sampling) -> None:
    ids = random_ids(70)
    whole = generate(runner, ids, 12, parameters)
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=3))
    history = torch.cat([ids, torch.tensor(whole.tokens[7][:5])])
    client.step([], [client.first_chunk(7, history, prompt_length=70, parameters=parameters)])
    for _ in range(6):
        client.step([7])
    assert client.tokens[7] == whole.tokens[7][5:] and client.logprobs[7] == whole.logprobs[7][5:]


def test_filtered_rows_are_free_for_others_and_the_rest_goes_on(runner: ModelRunner) -> None:
    alone = generate(runner, random_ids(20, 1), 6)
    client = fresh_client(runner)
    client.step([], [client.first_chunk(i, random_ids(20, i)) for i in range(16)])
    with pytest.raises(StepError, match="all rows are taken"):
        client.step([], [client.first_chunk(99, random_ids(3))])
    runner.filter(1, [1])
    client.step([1], [client.first_chunk(99, random_ids(3))])
    for _ in range(4):
        client.step([1, 99])
    assert client.tokens[1] == alone.tokens[7]


@pytest.mark.parametrize("broken", ["unknown batch", "unknown request", "slots", "nothing"])
def test_steps_that_do_not_fit_change_nothing(runner: ModelRunner, broken: str) -> None:
    whole = generate(runner, random_ids(20), 6)
    client = fresh_client(runner)
    client.step([], [client.first_chunk(7, random_ids(20))])
    batches = {"unknown batch": [StepBatch(5, [7])], "unknown request": [StepBatch(1, [7, 8])], "nothing": []}
    slots = torch.zeros(0 if broken in ("slots", "nothing") else 1, dtype=torch.int32)
    with pytest.raises(StepError):
        runner.step(batches.get(broken, [StepBatch(1, [7])]), slots, 1, [])
    for _ in range(5):
        client.step([7])
    assert client.tokens == whole.tokens


def test_warmup_honours_a_wish_that_fits_and_refuses_one_that_does_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    runner = make_runner(tmp_path)
    assert runner.warmup(512, 100, 4, None).slots == 400
    assert runner.warmup(512, 100, 4, 5000).slots == 5000
    with pytest.raises(MemoryLimitError, match="--max-batch-total-tokens"):
        runner.warmup(512, 100, 4, 2**40)
    with pytest.raises(MemoryLimitError, match="max_total_tokens"):
        choose_slots(per_slot=1000, available=50_000, useful=10_000, wanted=None, at_least=100)


LARGE_POOL = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2}
LARGE_POOL_BYTES = 40 * 512 * 2 * 2 * 8 * 128 * 4  # the heads are not too large for the C kernels


def test_filling_the_pool_to_the_last_slot_needs_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, **LARGE_POOL)
    monkeypatch.setattr("text_generation_server.runner.available_bytes", lambda *_: 3 * LARGE_POOL_BYTES)
    runner = make_runner(tmp_path)
    slots = runner.warmup(512, 512, 40, None).slots
    client = Client(runner, torch.arange(slots, dtype=torch.int32))
    client.step([], [replace(client.first_chunk(0, random_ids(512)), last=False)])
    before = resident_bytes()
    for request_id in range(1, 40):
        client.step([], [replace(client.first_chunk(request_id, random_ids(512)), last=False)])
    assert len(client.slots) == 0
    # If a part of the pool had not been in memory before, filling the slots would have increased resident memory.
    assert resident_bytes() - before < 0.1 * LARGE_POOL_BYTES


def test_a_pool_that_is_small_beside_the_free_memory_takes_memory_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, **LARGE_POOL)
    monkeypatch.setattr("text_generation_server.runner.available_bytes", lambda *_: 5 * LARGE_POOL_BYTES)
    runner, before = make_runner(tmp_path), resident_bytes()
    slots = runner.warmup(512, 512, 40, None).slots
    assert slots == 40 * 512 and resident_bytes() - before < 0.5 * LARGE_POOL_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "no_such_function"}, "hidden_act"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_an_unsupported_configuration_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    config = {k: v for k, v in (json.loads(file.read_text()) | change).items() if v is not None}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named):
        make_runner(tmp_path)
