"""Reading config.json and generation_config.json: the right values, or one line that names what is wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import text_generation_server
from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.families import FAMILIES
from text_generation_common.models.values import Fields
from text_generation_common.tests.examples import examples

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
# The config.json of well-known models as on the hub.
HUB = TABLES["hub"]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def asked() -> set[str]:
    """The fields that are read for a Llama."""
    fields = Fields(LLAMA, "config.json")
    FAMILIES["llama"](fields)
    return fields.asked | {"compression_config", "quantization_config"}


def read(folder: Path, generation: object = None, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def error_of(folder: Path, generation: object = None, **changes: Any) -> str:
    with pytest.raises(ModelError) as refused:
        read(folder, generation, **changes)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize("name", HUB)
def test_well_known_models_are_read_without_a_warning(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB[name]))
    config = read_config(tmp_path)
    assert config.unknown_fields == ()
    assert config.head_size * config.num_heads == config.hidden_size == HUB[name]["hidden_size"]
    assert config.ropes[0].theta == HUB[name].get("rope_theta", 10000)


def test_the_demo_model_is_read_without_a_warning() -> None:
    config = read_config(Path(text_generation_server.__file__).parent / "demo_model")
    assert config.unknown_fields == () and config.dtype is Dtype.bfloat16 and config.eos_token_ids == (2,)


def test_null_is_absent(tmp_path: Path) -> None:
    optional = asked() - LLAMA.keys() | {"num_key_value_heads"}
    assert read(tmp_path, **dict.fromkeys(optional)) == read(tmp_path, num_key_value_heads=4)
    assert read(tmp_path, rope_parameters={"rope_theta": None, "factor": None}).ropes[0].theta == 10000


@pytest.mark.parametrize("names", [None, [], "Llama", [3], ["LlamaModel"], ["ForMaskedLM", "LlamaForCausalLM"]])
def test_only_architectures_of_other_tasks_are_refused(tmp_path: Path, names: object) -> None:
    assert read(tmp_path, architectures=names).model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *TABLES["wrong"],
        ({"hidden_size": float("inf")}, "hidden_size is Infinity, and must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, and must be"),
        ({"rope_theta": 10**5000 // 10**1000}, "rope_theta is 1000"),
    ],
    ids=str,
)
def test_a_wrong_value_is_reported_with_its_field(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    assert told in error_of(tmp_path, **changes)


def test_end_tokens_come_from_both_files_as_one_id_or_many(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [5, 2]}, eos_token_id=2).eos_token_ids == (2, 5)
    assert read(tmp_path, {"eos_token_id": None}, eos_token_id=[3]).eos_token_ids == (3,)
    assert read(tmp_path, {}).eos_token_ids == ()
    for wrong in ({"a": 1}, "2", [None], [[2]], 10**400, -1, True):
        assert "generation_config.json: eos_token_id is " in error_of(tmp_path, {"eos_token_id": wrong})
    assert "does not hold a JSON object" in error_of(tmp_path, [])


def test_the_flags_stretch_the_context_and_their_factor_is_checked(tmp_path: Path) -> None:
    read(tmp_path, max_position_embeddings=100)
    assert read_config(tmp_path, "linear", 4.0).max_positions == 400
    assert read_config(tmp_path, None, 2.0).ropes[0].scaling.kind == "linear"
    for factor in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(ModelError, match="--rope-factor"):
            read_config(tmp_path, "dynamic", factor)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_bytes(b"{"), "is not valid JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\xff"), "is not valid JSON"),
        (lambda path: path.write_bytes(b"[" * 1_000_000), "is not valid JSON"),
        (lambda path: path.write_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
        (lambda path: path.write_bytes(b" " * 2**24), "larger than 8 MiB"),
    ],
    ids=["fifo", "cut", "no text", "deep", "long number", "large"],
)
def test_a_file_that_cannot_be_read_is_reported_in_one_line(tmp_path: Path, name: str, make: Any, told: str) -> None:
    read(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ModelError, match=told) as refused:
        read_config(tmp_path)
    assert name in str(refused.value) and len(str(refused.value).splitlines()) == 1


_TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(["linear", "dynamic", "llama3", "bfloat16", "silu"])
_NUMBERS = st.integers() | st.integers(min_value=-(10**400), max_value=10**400) | st.floats() | st.integers(0, 9)
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "original_max_position_embeddings",
                 "quant_method", "format", "bits", "quantization"]
            )
            | _TEXT,
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)  # fmt: skip
_UNREAD = {"sliding_window", "layer_types", "no_rope_layers"}
_NAMES = st.sampled_from(sorted(asked() - {"model_type"} | _UNREAD))


@settings(examples(600), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(_NAMES | _TEXT, _VALUES, max_size=4), generation=_VALUES)
def test_any_values_are_read_or_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], generation: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    try:
        config = read_config(tmp_path)
    except ModelError as refused:
        assert len(str(refused).splitlines()) == 1 and str(refused).isprintable()
        return
    assert config.num_heads % config.num_kv_heads == 0 and config.head_size % 2 == 0 and config.max_positions >= 1
    assert all(0 <= id < 2**31 for id in config.eos_token_ids)
