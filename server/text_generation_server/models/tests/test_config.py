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

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}

# The config.json of well-known models as on the hub, without the fields that are the same in all of them.
_BASE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "bos_token_id": 1,
         "use_cache": True, "initializer_range": 0.02, "tie_word_embeddings": False}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _BASE | {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "vocab_size": 32000,
    },
    "Llama-3.1-8B-Instruct": _BASE | {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "vocab_size": 128256,
    },
    "TinyLlama-1.1B-Chat": _BASE | {
        "attention_bias": False, "eos_token_id": 2, "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.35.0", "vocab_size": 32000,
    },
    "SmolLM2-135M-Instruct": _BASE | {
        "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 2, "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    },
    "vicuna-7b-v1.5-16k": _BASE | {
        "_name_or_path": "vicuna-7b-v1.5-16k", "eos_token_id": 2, "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "max_sequence_length": 16384, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 0, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 4.0, "type": "linear"}, "torch_dtype": "float16",
        "transformers_version": "4.31.0", "vocab_size": 32000,
    },
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
        ({"hidden_size": None}, "hidden_size is null, and needs a value"),
        ({"hidden_size": [64]}, "hidden_size is a list, and must be a whole number from 1 to"),
        ({"hidden_size": float("inf")}, "hidden_size is Infinity, and must be"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, and must be"),
        ({"hidden_size": 62}, "hidden_size is 62, and must be a multiple of num_attention_heads (4)"),
        ({"hidden_size": 12}, "the head size is 3, and must be an even number from 4"),
        ({"hidden_size": 8}, "the head size is 2, and must be an even number from 4"),
        ({"head_dim": 2}, "head_dim is 2, and must be a whole number from 4"),
        ({"head_dim": 15}, "the head size is 15, and must be an even number from 4"),
        ({"hidden_size": True}, "hidden_size is true, and must be"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and must be"),
        ({"num_key_value_heads": -4}, "num_key_value_heads is -4, and must be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, and must be a divisor of num_attention_heads (4)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and must be"),
        ({"max_position_embeddings": "abc"}, 'max_position_embeddings is the string "abc", and must be'),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1, and must be"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings is 1000000000000000000, and must be"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, and must be a number from 1e-12 to 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, and must be"),
        ({"rope_theta": "1"}, 'rope_theta is the string "1", and must be'),
        ({"rope_theta": 10**5000 // 10**1000}, "rope_theta is 1000"),
        ({"rope_parameters": [1]}, "rope_parameters is a list, and must be an object"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters: rope_type is 3, and must be a string"),
        ({"rope_scaling": {"type": "mrope", "factor": 4.0}}, 'rope type "mrope" is not supported yet, only default'),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is null, and must be a list of 8 numbers above 0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7}}, "short_factor is a list, and must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1}}, "beta_fast is 1, and must be more than"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": "a"}}, "attention_factor is the string"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no field factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling: factor is 0.0, and must be"),
        (
            {"rope_scaling": {"factor": 4.0}},
            "rope_scaling: factor is 4.0, which is not supported with rope type default",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, which is not supported with rope type default",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention is an object, which is not supported with rope type default",
        ),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1}}, "must be more than low_freq_factor (1)"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "has no field original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": LLAMA3_ROPE},
            "rope_parameters and rope_scaling differ",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e5}, "max_position_embeddings": 4096}, "the most is"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, and must be true or false"),
        ({"hidden_act": "mish"}, 'hidden_act is the string "mish", and must be one of silu, swish'),
        ({"dtype": "float8_e4m3fn"}, 'dtype is the string "float8_e4m3fn", and must be one of'),
        ({"eos_token_id": "2"}, 'eos_token_id is the string "2", and must be a token id'),
        ({"eos_token_id": [2, -1]}, "eos_token_id is a list, and must be"),
        ({"eos_token_id": 2.0}, "eos_token_id is 2.0, and must be"),
        ({"model_type": "mamba", "sliding_window": 4096}, 'model type "mamba" is not supported: '),
        ({"model_type": None}, "model_type is null, and needs a value"),
        ({"model_type": ["llama"]}, "model_type is a list, and must be a string"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            'architectures is "LlamaForSequenceClassification", a model for another task than generating text',
        ),
        ({"model_type": "two\nlines"}, 'model type "two\\nlines" is not supported: '),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantized as aqlm, which is not supported: quantize"),
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


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
