"""Every family compared with transformers on the same weights, in checkpoints that transformers writes.

All parameters are away from their defaults, so that a norm, a bias or a multiplier that is left out, or taken for
another, changes the logits. `make test` takes one variant of each family, `-m models` takes all of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import VARIANTS
from family_ranges import ranges
from family_tools import (
    FIRST,
    ROUNDING,
    TOLERANCE,
    Checkpoints,
    quick_and_long,
    teacher_forced,
    texts_beside,
    write_texts,
)
from safetensors.torch import load_file
from shard_tools import SAMPLED, Client, generate, make_platform, random_ids, scattered_slots, warm_runner

from text_generation_common.errors import ModelError
from text_generation_common.models.config import read_config
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.tensors import shapes
from text_generation_server.kernels import reference
from text_generation_server.models import get_model
from text_generation_server.models.parts import Parts, split_model
from text_generation_server.step.rows import PromptChunk
from text_generation_server.weights.files import SafetensorsFiles

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

LENGTHS = (1, 17, 64, 150)
QUICK_NEW, NEW = 12, 64  # tokens of each text


@pytest.mark.parametrize(
    ("variant", "new"),
    [(variant, QUICK_NEW) for variant in FIRST]
    + [pytest.param(variant, NEW, marks=pytest.mark.models) for variant in VARIANTS],
)
def test_greedy_texts_and_logits_equal_transformers(
    checkpoints: Checkpoints, variant: str, new: int, record_property: Callable[[str, Any], None]
) -> None:
    made = checkpoints(variant)
    windows = {rule.window for rule in read_config(made.path).rules if rule.window is not None}
    lengths = [*LENGTHS, *(5 * window // 2 for window in windows if window < made.longest)]
    worst = 0.0
    for text, expected in texts_beside(made.model, made.runner, (n for n in lengths if n + new <= made.longest), new):
        chosen = expected.gather(1, torch.tensor(text.tokens).unsqueeze(1)).squeeze(1)
        # Two tokens whose logits differ by less than rounding may change places.
        assert (expected.max(dim=1).values - chosen).max() <= TOLERANCE
        worst = max(worst, (text.rows - expected).abs().max().item())
    record_property("float32", worst)
    assert worst <= (TOLERANCE if variant.startswith("gpt_oss") else ROUNDING)


@pytest.mark.models
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_gates_and_logits_are_as_large_as_in_trained_models(
    checkpoints: Checkpoints, variant: str, record_property: Callable[[str, Any], None]
) -> None:
    found = ranges(checkpoints(variant).path)
    for what, largest in found.items():
        record_property(what, largest)
    assert found["scores"] >= 40 and found["gates"] >= 7 and 25 <= found["logits"] <= 100


@pytest.mark.parametrize("variant", quick_and_long())
def test_attention_is_compiled_for_gpus_with_the_options_of_every_family(
    checkpoints: Checkpoints, variant: str
) -> None:
    compiling = pytest.importorskip("text_generation_server.kernels.triton.compiling", reason="triton is not installed")
    path = checkpoints(variant).path
    files, config = SafetensorsFiles(path), read_config(path)
    model = get_model(files, config, make_platform(), torch.float32, 512, lambda: None)
    for block in model._blocks:  # type: ignore[attr-defined]
        options = block._attention._options
        used = [name for name in ("softcap", "slopes_H", "sinks_H", "window") if getattr(options, name) is not None]
        assert tuple(used) in compiling.SERVED_OPTIONS


@pytest.mark.parametrize("variant", quick_and_long())
def test_other_requests_chunks_cached_prefixes_and_resuming_change_no_bit(
    checkpoints: Checkpoints, variant: str
) -> None:
    runner, lengths, new = checkpoints(variant).runner, [1, 16, 17, 65, 100], 6
    prompts = [random_ids(n, seed=n) for n in lengths]
    alone = [generate(runner, prompt, new, SAMPLED) for prompt in prompts]
    whole = alone[-1].tokens[7], alone[-1].logprobs[7]

    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=1))
    chunks = [client.first_chunk(i, prompt, parameters=SAMPLED) for i, prompt in enumerate(prompts)]
    client.step([], chunks[:3])
    client.step([0, 1, 2], chunks[3:])
    while waiting := [i for i in range(len(lengths)) if len(client.tokens[i]) < new]:
        client.step(waiting)
    for i, single in enumerate(alone):
        assert client.tokens[i] == single.tokens[7] and client.logprobs[i] == single.logprobs[7]

    in_chunks = client.first_chunk(10, prompts[-1], end=63, parameters=SAMPLED)
    client.step([], [in_chunks])
    client.step([], [PromptChunk(10, 63, 65, False)])
    client.step([], [PromptChunk(10, 65, 100, True)])
    # A prompt whose first 80 tokens are those of request 10: their keys and values are in the slots of that request.
    assert in_chunks.slots is not None
    reusing = client.first_chunk(11, prompts[-1], parameters=SAMPLED)
    assert reusing.slots is not None
    slots = torch.cat([in_chunks.slots[:80], reusing.slots[80:]])
    client.step([10], [replace(reusing, start=80, slots=slots)])
    # A request that another server, or an earlier epoch, has begun: its first three tokens are known.
    history = torch.cat([prompts[-1], torch.tensor(whole[0][:3])])
    client.step([10, 11], [client.first_chunk(12, history, prompt_length=100, parameters=SAMPLED)])
    known = {10: 0, 11: 0, 12: 3}
    while waiting := [i for i in known if len(client.tokens[i]) < new - known[i]]:
        client.step(waiting)
    for i, start in known.items():
        assert (client.tokens[i], client.logprobs[i]) == (whole[0][start:], whole[1][start:])


@pytest.mark.parametrize(("variant", "kinds"), [("llama, yarn", 1), ("qwen3_moe", 2), ("gemma3_text", 2)])
def test_a_warm_up_on_a_cpu_runs_one_layer_of_each_kind(checkpoints: Checkpoints, variant: str, kinds: int) -> None:
    model = checkpoints(variant).runner._model
    caches = [each.make_cache(8, 1, torch.float32) for each in (model.one_layer_of_each_kind(), model)]
    assert [*map(len, caches)] == [kinds, len(read_config(checkpoints(variant).path).rules)]


def test_slopes_of_a_rank_are_its_part_of_the_models(checkpoints: Checkpoints) -> None:
    config = read_config(checkpoints("bloom, six heads").path)
    expected = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    for size in (1, 2, 3):
        found = []
        for rank in range(size):
            split = split_model(config, rank, size, reference.vocabulary_part(config.vocab_size, size))
            parts = Parts(config, split, make_platform().kernels, None, torch.device("cpu"), 512)  # type: ignore[arg-type]
            slopes = parts.attention_options(config.rules[0]).slopes_H
            assert slopes is not None
            found += slopes.tolist()
        assert found == expected


def test_long_factors_are_those_of_transformers_in_long_texts(checkpoints: Checkpoints) -> None:
    made = checkpoints("phi3, longrope")
    (text,) = write_texts(warm_runner(made.path, max_total_tokens=512), [random_ids(150)], 12)
    assert (text.rows - teacher_forced(made.model, text.prompt, text.tokens)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("variant", quick_and_long())
def test_tensors_have_the_names_and_shapes_that_transformers_writes(checkpoints: Checkpoints, variant: str) -> None:
    path = checkpoints(variant).path
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


@pytest.mark.parametrize("variant", quick_and_long())
def test_every_tensor_is_read(checkpoints: Checkpoints, variant: str) -> None:
    path = checkpoints(variant).path
    files = NotingFiles(path)
    get_model(files, read_config(path), make_platform(), torch.float32, 64, lambda: None)
    assert files.read == set(files.names)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_is_compared_with_transformers(model_type: str) -> None:
    elsewhere = {"llama"}  # test_llama.py
    assert model_type in elsewhere | {model for model, _ in VARIANTS.values()}


@pytest.mark.parametrize(("variant", "changes", "told"), TABLES["unsupported"])
def test_what_is_not_supported_is_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path, variant: str, changes: dict[str, Any], told: str
) -> None:
    raw = json.loads((checkpoints(variant).path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1
