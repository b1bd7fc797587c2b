"""Every family compared with transformers on the same weights, in checkpoints that transformers writes.

All parameters are away from their defaults, so that a norm, a bias or a multiplier that is left out, or taken for
another, changes the logits.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import VARIANTS, make_family
from safetensors.torch import load_file
from shard_tools import SAMPLED, Client, generate, make_platform, random_ids, scattered_slots, warm_runner

from text_generation_server.errors import ModelError
from text_generation_server.models import get_model
from text_generation_server.models.config import read_config
from text_generation_server.models.families import FAMILIES
from text_generation_server.models.parts import Parts
from text_generation_server.models.split import split_model
from text_generation_server.models.tensors import shapes
from text_generation_server.weights.files import SafetensorsFiles


def teacher_forced(model: torch.nn.Module, prompt: torch.Tensor, output: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [new, V] for each step of our text."""
    ids = torch.cat([prompt, torch.tensor(output)])
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    path = tmp_path_factory.mktemp("family")
    yield path, make_family(path, request.param)


def test_greedy_text_and_logprobs_equal_transformers(family: tuple[Path, Any]) -> None:
    path, model = family
    # longrope: transformers takes the factors of each text's length, we those of the longest text.
    longest = 512 if not any(rope.scaling.kind == "longrope" for rope in read_config(path).ropes) else 128
    runner = warm_runner(path, max_total_tokens=longest)
    for length, new in ((1, 12), (17, 12), (64, 64), (150, 12)):
        if length + new > longest:
            continue
        client = generate(runner, random_ids(length), new)
        expected = teacher_forced(model, random_ids(length), client.tokens[7])
        ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
        assert (expected.max(dim=1).values - ours).max() <= 1e-4
        torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


def test_attention_is_compiled_for_gpus_with_the_options_of_every_family(family: tuple[Path, Any]) -> None:
    compiling = pytest.importorskip("text_generation_server.kernels.triton.compiling", reason="triton is not installed")
    path, _ = family
    files, config = SafetensorsFiles(path), read_config(path)
    model = get_model(files, config, make_platform(), torch.float32, 512, lambda: None)
    for block in model._blocks:  # type: ignore[attr-defined]
        options = block._attention._options
        used = [name for name in ("softcap", "slopes_H", "sinks_H", "window") if getattr(options, name) is not None]
        assert tuple(used) in compiling.SERVED_OPTIONS


def test_slopes_of_a_rank_are_its_part_of_the_models(tmp_path: Path) -> None:
    make_family(tmp_path, "bloom, six heads")
    config, expected = read_config(tmp_path), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    kernels = make_platform().kernels
    for size in (1, 2, 3):
        found = []
        for rank in range(size):
            split = split_model(config, rank, size, kernels.vocabulary_part(config.vocab_size, size))
            parts = Parts(config, split, kernels, None, torch.device("cpu"), 512)  # type: ignore[arg-type]
            slopes = parts.attention_options(config.rules[0]).slopes_H
            assert slopes is not None
            found += slopes.tolist()
        assert found == expected


def test_long_factors_are_those_of_transformers_in_long_texts(tmp_path: Path) -> None:
    model = make_family(tmp_path, "phi3, longrope")
    client = generate(warm_runner(tmp_path, max_total_tokens=512), random_ids(150), 12)
    expected = teacher_forced(model, random_ids(150), client.tokens[7])
    ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
    assert (expected.max(dim=1).values - ours).max() <= 1e-4


@pytest.fixture(scope="module")
def one_of_each(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of the first variant of a family."""

    @cache
    def make(model_type: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        make_family(path, next(name for name, (family, _) in VARIANTS.items() if family == model_type))
        return path

    return make


@pytest.mark.parametrize("model_type", sorted({model_type for model_type, _ in VARIANTS.values()} - {"llama"}))
def test_other_requests_do_not_change_a_request_by_a_bit(one_of_each: Callable[[str], Path], model_type: str) -> None:
    lengths = [1, 16, 17, 65, 100]
    runner = warm_runner(one_of_each(model_type), max_total_tokens=128)
    alone = [generate(runner, random_ids(n, seed=n), 6, SAMPLED) for n in lengths]
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=1))
    client.step([], [client.first_chunk(i, random_ids(n, n), parameters=SAMPLED) for i, n in enumerate(lengths[:3])])
    late = [client.first_chunk(3 + i, random_ids(n, n), parameters=SAMPLED) for i, n in enumerate(lengths[3:])]
    client.step(list(range(3)), late)
    while waiting := [i for i in range(len(lengths)) if len(client.tokens[i]) < 6]:
        client.step(waiting)
    for i, single in enumerate(alone):
        assert client.tokens[i] == single.tokens[7] and client.logprobs[i] == single.logprobs[7]


def test_tensors_have_the_names_and_shapes_that_transformers_writes(family: tuple[Path, Any]) -> None:
    path, _ = family
    written = {name: tuple(tensor.shape) for name, tensor in load_file(path / "model.safetensors").items()}
    config = read_config(path)
    assert shapes(replace(config, names=config.names.as_in(written.__contains__))) == written


class NotingFiles(SafetensorsFiles):
    """Notes the names of the tensors that are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read = set[str]()

    def get(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return super().get(name)

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        self.read.add(name)
        return super().get_slice(name, dim, start, stop)


def test_every_tensor_is_read(family: tuple[Path, Any]) -> None:
    files = NotingFiles(family[0])
    get_model(files, read_config(family[0]), make_platform(), torch.float32, 64, lambda: None)
    assert files.read == set(files.names)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_is_compared_with_transformers(model_type: str) -> None:
    elsewhere = {"llama"}  # test_llama.py
    assert model_type in elsewhere | {model for model, _ in VARIANTS.values()}


@pytest.mark.parametrize(
    ("variant", "changes", "told"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "layernorm is true, and must be false"),
        ("falcon, as 40B", {"parallel_attn": False}, "parallel_attn is false, and must be true"),
        ("falcon, as 7B", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, and must be 1"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv is 6, and must be 0"),
        ("mpt", {"no_bias": False}, "no_bias is false, and must be true"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false, and must be true"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32, and must be hidden_size (64)"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is a list, and must be a list of 3 of the words"),
        ("qwen2", {"qk_layernorm": True}, "qk_layernorm is true, which is not supported for qwen2"),
        ("phi3", {"partial_rotary_factor": 0.2, "rope_parameters": None}, "partial_rotary_factor is 0.2, and must be"),
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers is a list, and must be a list of 4 numbers"),
        ("granite", {"residual_multiplier": "a"}, 'residual_multiplier is the string "a", and must be a number'),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0, and must be"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported for olmoe"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0, and must be a number"),
        ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, and must be a whole number from 1 to 6"),
        (
            "qwen2_moe",
            {"mlp_only_layers": [3]},
            "mlp_only_layers is a list, and must be a list of whole numbers from 0",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, variant: str, changes: dict[str, Any], told: str
) -> None:
    make_family(tmp_path, variant)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as refused:
        warm_runner(tmp_path)
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1
