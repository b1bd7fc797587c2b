"""Adapters as PEFT writes them: what is read of them, and that all else is refused in one line that names it."""

import json
import math
import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.adapters.config import read_config
from text_generation_common.adapters.content import CONFIG, AdapterContent, digest_of, read_content
from text_generation_common.adapters.files import (
    ModulePair,
    adapter_of,
    any_rooms,
    check_room,
    modules_of,
    read_adapter,
    rooms_of,
)
from text_generation_common.adapters.listed import (
    check_base,
    checked,
    digests,
    folders_of,
    identified,
    listed,
    located,
    real_folders,
)
from text_generation_common.adapters.patterns import MAX_WORK, NamePatterns
from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.values import Fields

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 99,
    "num_key_value_heads": 1, "num_hidden_layers": 2,
}  # fmt: skip
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
Shapes = Mapping[str, tuple[int, ...]]
PAIR: Shapes = {f"{MODULE}.lora_A.weight": (4, 16), f"{MODULE}.lora_B.weight": (16, 4)}


def write(folder: Path, shapes: Shapes = PAIR, kind: str = "F32", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * (4 if kind == "F32" else 1)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        modules_of(read_adapter(folder, 64), FAMILIES["llama"](Fields(LLAMA, "config.json")))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("config", "module", "rank", "scale"), TABLES["scales"])
def test_rank_and_scale_of_a_module(
    tmp_path: Path, config: dict[str, Any], module: str, rank: int, scale: float
) -> None:
    found = read_config(write(tmp_path, **config))
    assert found.rank_of(module) == rank and found.scale_of(module) == pytest.approx(scale)


@pytest.mark.parametrize("config", TABLES["plain"])
def test_fields_that_change_nothing_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    (pair,) = read_adapter(write(tmp_path, **config)).modules.values()
    assert (pair.rank, pair.inputs, pair.outputs, pair.scale) == (4, 16, 16, 2.0)


@pytest.mark.parametrize(("config", "says"), TABLES["refused"])
def test_every_other_field_is_refused_by_its_name(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    assert f"adapter_config.json: `{next(iter(config))}` is " in (text := refusal(write(tmp_path, **config)))
    assert says in text


@pytest.mark.parametrize(("shapes", "says"), TABLES["tensors"])
def test_every_tensor_belongs_to_a_pair_of_a_layer_of_the_model(
    tmp_path: Path, shapes: dict[str, list[int]], says: str
) -> None:
    named = {name.replace("MODULE", MODULE): tuple(shape) for name, shape in shapes.items()}
    assert says in refusal(write(tmp_path, named))


MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 99,
}


def mixtral() -> ModelConfig:
    return FAMILIES["mixtral"](Fields(MIXTRAL, "config.json"))


def pairs_of(modules: Mapping[str, list[int]]) -> Shapes:
    """The tensors of pairs in the first layer of a Mixtral: (sum of ranks, inputs, outputs) of each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (rank, inputs, outputs) in modules.items():
        name = f"base_model.model.model.layers.0.block_sparse_moe.{module}.lora"
        shapes |= {f"{name}_A.weight": (rank, inputs), f"{name}_B.weight": (outputs, rank)}
    return shapes


def of_mixtral(folder: Path, modules: Mapping[str, list[int]], **config: Any) -> dict[str, ModulePair]:
    files = read_adapter(write(folder, pairs_of(modules), **config), 64)
    return modules_of(files, mixtral())


@pytest.mark.parametrize(("modules", "parameters", "says"), TABLES["experts"])
def test_matrices_of_experts_fit_all_experts_of_a_layer_or_one(
    tmp_path: Path, modules: dict[str, list[int]], parameters: list[str], says: str
) -> None:
    with pytest.raises(ModelError) as refused:
        of_mixtral(tmp_path / "a", modules, target_parameters=parameters)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_experts_have_room_for_the_largest_pair_of_any_of_them(tmp_path: Path) -> None:
    """One adapter has gates and ups of all experts in one parameter, another has matrices of single experts."""
    whole = {"experts.base_layer": [16, 16, 64], "experts": [24, 32, 16]}
    named = {"target_parameters": ["experts.gate_up_proj", "down_proj"], "rank_pattern": {"experts.down_proj": 6}}
    found = of_mixtral(tmp_path / "whole", whole, **named)
    apart = of_mixtral(tmp_path / "apart", {"experts.2.w3": [4, 16, 32], "experts.0.w3": [4, 16, 32]})
    assert {name.rpartition(".")[2]: (pair.rank, pair.experts, pair.rows) for name, pair in found.items()} == {
        "gate": (4, 4, (0, 32, 1)), "up": (4, 4, (32, 64, 1)), "down": (6, 4, (0, 16, 1)),
    }  # fmt: skip
    (up,) = apart.values()
    assert [pair.rank for pair in up.each] == [4, 0, 4, 0] and up.rank == 4
    rooms = rooms_of([found, apart])
    assert sum(room.numbers for room in rooms.values()) == 4 * (4 * 48 + 4 * 48 + 6 * 48)
    assert apart.keys() < rooms.keys() and "experts" not in "".join(any_rooms(mixtral(), 4))


def test_experts_of_granite_are_known_by_their_names_in_both_versions_of_transformers(tmp_path: Path) -> None:
    config = FAMILIES["granitemoe"](Fields(MIXTRAL | {"model_type": "granitemoe"}, "config.json"))
    names = {"old": ("input_linear", "router.layer"), "new": ("experts", "router")}
    targets = {"old": ["input_linear.weight"], "new": ["experts.gate_up_proj", "router.weight"]}
    old, new = (
        modules_of(
            read_adapter(
                write(
                    tmp_path / version,
                    pairs_of({names[version][0]: [16, 16, 64], names[version][1]: [4, 16, 4]}),
                    target_parameters=targets[version],
                ),
                64,
            ),
            config,
        )
        for version in ("old", "new")
    )
    assert old.keys() == new.keys() == {
        "layers.0.block_sparse_moe.router.layer", "layers.0.block_sparse_moe.router.layer.experts.gate",
        "layers.0.block_sparse_moe.router.layer.experts.up",
    }  # fmt: skip
    assert {name: pair.experts for name, pair in old.items()} == {name: pair.experts for name, pair in new.items()}


def test_types_that_are_not_numbers_broken_files_pickles_and_links_out_are_refused(tmp_path: Path) -> None:
    assert "is I8 [4, 16], not a matrix of numbers" in refusal(write(tmp_path / "a", kind="I8"))
    weights = write(tmp_path / "b") / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", whole[:-1], b"\xff" * 8 + whole[8:], (2**40).to_bytes(8, "little") + whole[8:]):
        weights.write_bytes(content)
        assert "is broken" in refusal(tmp_path / "b")
    weights.unlink()
    assert "has no file adapter_model.safetensors" in refusal(tmp_path / "b")
    (tmp_path / "b/adapter_model.bin").touch()
    assert "is a pickle" in refusal(tmp_path / "b")
    (tmp_path / "secret").write_bytes(whole)
    weights.symlink_to(tmp_path / "secret")
    assert "is a link to a file outside of the folder" in refusal(tmp_path / "b")


def test_patterns_match_as_those_of_python_do() -> None:
    parts = ["a", "b", ".", r"\.", r"\d", "[ab]", "(a|b.)", "(|a)", "a*", ".+", "[b.]*", "^", "$", "(^a|b$)", "7"]
    draw = random.Random(1)
    for _ in range(3000):
        text = "".join(draw.choices(parts, k=draw.randint(1, 5)))
        name = "".join(draw.choices("ab.7", k=draw.randint(0, 7)))
        expected = re.match(rf"(.*\.)?({text})$", name) is not None
        assert NamePatterns([(text, expected)]).of(name, False) is expected, (text, name)


@pytest.mark.parametrize("pattern", [".*.*b", "[a-z]+[a-z]+-", "(a|a)" * 50 + "b", "a*" * 100 + "b", "(.|a)" * 50])
def test_no_pattern_is_followed_for_long(tmp_path: Path, pattern: str) -> None:
    """Time is counted in followed parts, of which each takes a fraction of a microsecond."""
    config = read_config(write(tmp_path, rank_pattern={pattern: 3}))
    module = "model.layers.0.self_attn." + "a" * 200
    config.rank_of(module)
    assert config.ranks.work <= 20_000
    config.ranks.work = MAX_WORK * 9 // 10  # as if many names had been followed
    with pytest.raises(ModelError, match="`rank_pattern`: following its patterns takes too long"):
        for number in range(100_000):
            config.rank_of(f"{module}{number}")
    assert config.ranks.work <= MAX_WORK + 20_000


def test_a_pattern_for_each_module_of_a_large_model_is_followed(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.{kind}_proj" for layer in range(126) for kind in "abcdefg"]
    config = read_config(write(tmp_path, rank_pattern={name: 1 + number % 60 for number, name in enumerate(names)}), 64)
    assert [config.rank_of(name) for name in names] == [1 + number % 60 for number in range(len(names))]


def test_a_bias_belongs_to_each_pair_if_the_configuration_says_so(tmp_path: Path) -> None:
    assert "has no bias, and adapter_config.json says otherwise" in refusal(write(tmp_path / "a", lora_bias=True))
    (pair,) = read_adapter(
        write(tmp_path / "b", {**PAIR, f"{MODULE}.lora_B.bias": (16,)}, lora_bias=True)
    ).modules.values()
    assert pair.bias == f"{MODULE}.lora_B.bias" and pair.has_biases


def test_the_digest_is_that_of_both_files_whatever_the_folder_is_called(tmp_path: Path) -> None:
    one, same = write(tmp_path / "one"), write(tmp_path / "same")
    assert digest_of(one) == digest_of(same)
    assert (
        len({digest_of(one), digest_of(write(tmp_path / "a", lora_alpha=9)), digest_of(write(tmp_path / "b", {}))}) == 3
    )


def test_a_list_names_folders_and_their_digests_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path / "one")
    assert [*map(str, listed("a/b, x=c/d ,y=e@v1,z@v2"))] == ["a/b=a/b", "x=c/d", "y=e@v1", "z=z@v2"]
    (found,) = checked(f"mine={folder}", None, 64)
    assert str(found) == f"mine={folder}@{digest_of(folder)}"
    assert digests(str(found)) == {"mine": digest_of(folder)} == digests(f"mine={folder}")
    write(folder, lora_alpha=3)
    with pytest.raises(ModelError, match="have changed since the start"):
        identified(found)


@pytest.mark.parametrize(("text", "says"), TABLES["lists"])
def test_a_wrong_list_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        for adapter in checked(text.replace("FOLDER", str(write(tmp_path / "one"))), str(tmp_path), 64):
            located(adapter, None)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_base_of_transformers_takes_no_adapters() -> None:
    check_base(is_native=True)
    with pytest.raises(ModelError, match="--lora-dirs are not supported for a model that transformers computes"):
        check_base(is_native=False)


def test_files_are_read_from_the_folders_alone_that_were_named_even_if_a_link_takes_their_place(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    folder, other = write(allowed / "a"), write(outside)
    content = read_content(folder, [allowed])
    assert content.digest == digest_of(folder, [allowed]) == digest_of(other)
    file = folder / "adapter_model.safetensors"
    for target in (outside / file.name, Path("/dev/zero"), tmp_path / "gone"):
        file.unlink()
        file.symlink_to(target)
        for read in (digest_of, read_content):
            with pytest.raises(ModelError, match=r"outside of the folders|is not a file|cannot be read") as refused:
                read(folder, [allowed])
            assert "\n" not in str(refused.value)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelError, match="is not a file"):
        read_content(folder, [allowed])
    file.unlink()
    folder.rename(allowed / "b")
    folder.symlink_to(outside)
    with pytest.raises(ModelError, match="outside of the folders of --lora-dirs"):
        read_content(folder, [allowed])


def test_an_adapter_that_was_read_is_what_its_bytes_say(tmp_path: Path) -> None:
    content = read_content(write(tmp_path / "a"))
    write(tmp_path / "a", {}, lora_alpha=1)
    assert adapter_of(content, 64).modules == read_adapter(write(tmp_path / "b"), 64).modules


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("config", "weights", "says"),
    [
        (b"{", b"", "is not valid JSON"),
        (b"[" * 100_000, b"", "is not valid JSON"),
        (b" " * 2**21, b"", "at most 1048576 are read"),
        (b'{"peft_type": "LORA", "r": 1000000000}', b"", "a rank of at most 64 is served"),
        (None, b"", "no safetensors header in its 0 bytes"),
        (None, bytes([0, 0, 0, 0, 0, 1, 0, 0]), "has a header of more than 4194304 bytes"),
        (None, with_header(b"[" * 5 * 2**20), "has a header of more than 4194304 bytes"),
        (None, with_header(b"[" * 100_000), "its safetensors header cannot be read"),
        (None, with_header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'), "header cannot be read"),
        (None, with_header(b'{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,4]}}'), "bytes where its"),
    ],
)
def test_bytes_that_are_not_an_adapter_are_refused_in_one_line(
    tmp_path: Path, config: bytes | None, weights: bytes, says: str
) -> None:
    made = write(tmp_path / "a")
    content = AdapterContent(made, "", (made / CONFIG).read_bytes() if config is None else config, weights)
    with pytest.raises(ModelError) as refused:
        adapter_of(content, 64)
    assert says in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 1000


def test_a_server_has_room_for_the_largest_adapter_of_each_layer_and_refuses_what_needs_more(tmp_path: Path) -> None:
    config = FAMILIES["llama"](Fields(LLAMA, "config.json"))

    def modules(name: str, rank: int, **fields: Any) -> dict[str, ModulePair]:
        shapes = {f"{MODULE}.lora_A.weight": (rank, 16), f"{MODULE}.lora_B.weight": (16, rank)}
        return modules_of(read_adapter(write(tmp_path / name, shapes, r=rank, **fields), 64), config)

    four, six = modules("four", 4), modules("six", 6)
    rooms = rooms_of([four, six])
    assert [(room.rank, room.numbers) for room in rooms.values()] == [(6, 6 * 32)]
    everywhere = rooms_of([six], any_rooms(config, 5))
    assert len(everywhere) == 14 and {room.rank for room in everywhere.values()} == {5, 6}
    eight = read_adapter(
        write(tmp_path / "eight", {f"{MODULE}.lora_A.weight": (8, 16), f"{MODULE}.lora_B.weight": (16, 8)}, r=8), 64
    )
    check_room(eight, four, everywhere)
    with pytest.raises(ModelError, match="has no room for rank 8, because no adapter has needed it at the start"):
        check_room(eight, modules_of(eight, config), everywhere)
    with pytest.raises(ModelError, match="has no room for this layer"):
        check_room(eight, {"lm_head": ModulePair(4, 16, 99)}, everywhere)
    with pytest.raises(ModelError, match="has no room for biases"):
        check_room(eight, {name: replace(pair, base_bias="x") for name, pair in four.items()}, everywhere)


def test_folders_from_which_adapters_come_are_real_ones(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert folders_of(real_folders(f"{tmp_path}/link, {tmp_path}")) == (tmp_path / "a", tmp_path)
    assert (real_folders(None), folders_of(None)) == (None, ())
    for wrong in (f"{tmp_path}/b", "/"):
        with pytest.raises(ModelError, match="--lora-dirs"):
            real_folders(wrong)
