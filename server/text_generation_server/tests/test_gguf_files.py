"""GGUF files of every architecture, as llama.cpp's converter makes them, compared with transformers on the original;
and files of blocks, compared with their numbers."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import model_tasks as tasks
import pytest
import torch
from collective_tasks import Ranks
from family_tools import ROUNDING, TOLERANCE, VOCABULARY, Made, Text, texts_beside, write_texts
from gguf_fixtures import (
    FIXTURES,
    GOLDENS,
    Drawn,
    as_numbers,
    draw_tensors,
    make_gguf,
    make_original,
    write_drawn,
)  # fmt: skip
from shard_tools import ALONE, assert_decode_steps_are_recorded, make_runner, random_ids, usable_kernels
from torch import Tensor

from text_generation_common.cpu_features import NEEDS
from text_generation_common.flags.kinds import ActivationType
from text_generation_common.gguf.config import ARCHITECTURES
from text_generation_common.models.config import read_config
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.gguf_names import rows_before
from text_generation_common.quantized.tensors.blocks import READERS
from text_generation_server.kernels.interface import Kernels
from text_generation_server.weights.gguf_files import open_files

WRITTEN = json.loads(GOLDENS.read_text())
# Each of the converter's changes once. `-m slow` takes the others.
QUICK = ("bloom", "falcon, as 40B", "gemma3", "gpt2", "gpt_oss", "llama3", "phi3, longrope", "qwen2_moe")
# Models with logits up to 65: transformers' own in float32 are as far from those in float64 as ours.
LARGE = {"gpt_oss", "olmo3"}
WITHOUT_CONVERTER = {"gptj", "opt"}
NEW = 8
PROMPTS = (1, 17, 100)


@pytest.mark.parametrize(
    "fixture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FIXTURES]
)
def test_a_file_of_llama_cpps_converter_computes_what_the_original_does(tmp_path: Path, fixture: str) -> None:
    original = make_original(tmp_path / "original", fixture)
    make_gguf(tmp_path / "model.gguf", tmp_path / "original", WRITTEN[fixture])
    (tmp_path / "model.gguf").chmod(0o400)
    made = Made(tmp_path / "model.gguf", original)
    worst = 0.0
    for text, expected in texts_beside(original, made.runner, PROMPTS, NEW):
        chosen = expected.gather(1, torch.tensor(text.tokens).unsqueeze(1)).squeeze(1)
        assert (expected.max(dim=1).values - chosen).max() <= TOLERANCE
        worst = max(worst, (text.rows - expected).abs().max().item())
    assert worst <= (TOLERANCE if fixture in LARGE else ROUNDING)
    assert {path.name for path in tmp_path.iterdir()} == {"original", "model.gguf"}


def test_every_family_that_llama_cpp_converts_has_a_fixture() -> None:
    architectures = {golden["keys"]["general.architecture"][1] for golden in WRITTEN.values()}
    assert WRITTEN.keys() == FIXTURES.keys()
    assert architectures == ARCHITECTURES.keys()
    served = {row.model_type for row in ARCHITECTURES.values()} | {"mixtral", "olmo3"}
    assert served == FAMILIES.keys() - WITHOUT_CONVERTER


def texts_of(path: Path, kernels: Kernels | None = None) -> list[Text]:
    runner = make_runner(path, kernels=kernels)
    runner.warmup(128, None, 16, 1024)
    texts = write_texts(runner, [random_ids(length) for length in PROMPTS], NEW)
    runner.close()
    return texts


# Fixtures whose weights are made of blocks, the first one on every target. `-m slow` takes the others on each, too.
OF_BLOCKS = ("llama3", "phi3", "qwen3_moe", "gpt_oss")
ON_TARGETS = [
    *((OF_BLOCKS[0], target) for target in NEEDS),
    *((fixture, None) for fixture in OF_BLOCKS[1:]),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in product(OF_BLOCKS[1:], NEEDS)),
]


@dataclass(frozen=True)
class Pair:
    packed: Path
    numbers: Path  # the same weights in float32
    exact: list[Text]  # texts of these numbers, by the best kernels of this machine


Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    @cache
    def pair(fixture: str) -> Pair:
        folder, golden = tmp_path_factory.mktemp("blocks"), WRITTEN[fixture]
        drawn = draw_tensors(golden, READERS)
        assert READERS.keys() <= {kind for kind, _ in drawn.values()}
        packed = write_drawn(folder / "packed.gguf", golden["keys"], drawn)
        numbers = write_drawn(folder / "exact.gguf", golden["keys"], as_numbers(drawn))
        return Pair(packed, numbers, texts_of(numbers))

    return pair


@pytest.mark.parametrize(("fixture", "target"), ON_TARGETS)
def test_blocks_of_all_types_are_computed_as_their_numbers(pairs: Pairs, fixture: str, target: str | None) -> None:
    """`target`: None for the best of this processor."""
    kernels, pair = usable_kernels(target), pairs(fixture)
    for ours, expected in zip(texts_of(pair.packed, kernels), pair.exact, strict=True):
        assert ours.tokens == expected.tokens
        assert (ours.rows - expected.rows).abs().max() <= 1e-4


@pytest.mark.parametrize("fixture", ["llama3", pytest.param("phi3", marks=pytest.mark.slow)])
def test_blocks_of_all_types_are_computed_as_transformers_computes_their_numbers(
    pairs: Pairs, tmp_path: Path, fixture: str
) -> None:
    pair, model = pairs(fixture), make_original(tmp_path, fixture)
    model.load_state_dict(as_before(pair.numbers))
    for text, expected in texts_beside(model, Made(pair.packed, model).runner, PROMPTS, NEW):
        assert text.tokens == expected.argmax(dim=1).tolist()
        assert (text.rows - expected).abs().max() <= 1e-4


def as_before(path: Path) -> dict[str, Tensor]:
    """The numbers of a GGUF file, with the names and the order of rows that they have in transformers' model."""
    config, files = read_config(path), open_files(path)
    assert config.converted is not None
    before, names = config.converted.names, config.names
    called = {before.embedding: names.embedding, before.head: names.head, before.norm: names.norm}
    for number in range(config.num_layers):
        old, new = before.layer(number), names.layer(number)
        called |= {getattr(old, role.name): getattr(new, role.name) for role in fields(old)}
    found = {f"{old}.weight": files.get(f"{new}.weight") for old, new in called.items() if old}
    for old, new in called.items():
        if (order := rows_before(config).get(new)) is not None:
            found[f"{old}.weight"] = found[f"{old}.weight"][torch.tensor(order).argsort()]
    return found


@pytest.mark.parametrize("fixture", ["llama3", "qwen3_moe"])
def test_two_ranks_divide_blocks_of_all_types(pairs: Pairs, ranks: Ranks, fixture: str) -> None:
    """Also within blocks of 256 inputs."""
    path = pairs(fixture).packed
    whole = tasks.greedy_texts(ALONE, path, VOCABULARY)
    first, _ = ranks.run(2, tasks.greedy_texts, path, VOCABULARY)
    for (tokens, rows), (whole_tokens, whole_rows) in zip(first, whole, strict=True):
        assert tokens == whole_tokens
        assert (rows - whole_rows).abs().max() <= 1e-4


@pytest.mark.parametrize("activations", ActivationType)
def test_decode_steps_with_blocks_of_all_types_are_recorded(pairs: Pairs, activations: ActivationType) -> None:
    assert_decode_steps_are_recorded(pairs("llama3").packed, activations)


@pytest.mark.parametrize("activations", ActivationType)
def test_decode_steps_with_experts_of_blocks_are_recorded(tmp_path: Path, activations: ActivationType) -> None:
    """Gates and ups have one type in each layer, as in llama.cpp's mixtures of types."""
    drawn = draw_tensors(WRITTEN["qwen3_moe"], ["Q4_K", "Q5_K", "Q2_K", "Q6_K", "Q3_K"])
    drawn |= {name: drawn[name.replace("up", "gate")] for name in drawn if "ffn_up_exps" in name}
    path = write_drawn(tmp_path / "model.gguf", WRITTEN["qwen3_moe"]["keys"], drawn)
    assert_decode_steps_are_recorded(path, activations)


def merged(drawn: Drawn) -> Drawn:
    """Gates and ups of all experts in one tensor."""
    found = dict(drawn)
    for name in [name for name in drawn if "ffn_gate_exps" in name]:
        (kind, gates), (_, ups) = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("gate", "gate_up")] = kind, torch.cat([gates, ups], dim=1)
    return found


def apart(drawn: Drawn) -> Drawn:
    """A tensor for each expert, as in 2023."""
    found = dict(drawn)
    for name in [name for name in drawn if "_exps" in name]:
        kind, experts = found.pop(name)
        found |= {name.replace("_exps", f".{i}"): (kind, expert) for i, expert in enumerate(experts)}
    return found


def with_further_layer(drawn: Drawn) -> Drawn:
    """A layer at the end that only predicts further tokens."""
    return {**drawn, **{name.replace("blk.0.", "blk.3."): drawn[name] for name in drawn if name.startswith("blk.0.")}}


FURTHER = {"qwen3moe.block_count": (4, 4), "qwen3moe.nextn_predict_layers": (4, 1)}


LAYOUTS = [("qwen3_moe", merged, {}), ("mixtral", apart, {}), ("qwen3_moe", with_further_layer, FURTHER)]


@pytest.mark.parametrize("kind", ["Q4_K", pytest.param("F32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fixture", "change", "keys"), LAYOUTS)
def test_other_layouts_of_the_same_weights_compute_the_same(
    tmp_path: Path, fixture: str, change: Callable[[Drawn], Drawn], keys: dict[str, Any], kind: str
) -> None:
    drawn, of_file = draw_tensors(WRITTEN[fixture], [kind]), WRITTEN[fixture]["keys"]
    plain = texts_of(write_drawn(tmp_path / "plain.gguf", of_file, drawn))
    other = texts_of(write_drawn(tmp_path / "other.gguf", of_file | keys, change(drawn)))
    assert [text.tokens for text in other] == [text.tokens for text in plain]
    assert all(torch.equal(ours.rows, theirs.rows) for ours, theirs in zip(other, plain, strict=True))
