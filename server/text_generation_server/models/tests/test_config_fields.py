"""A field of config.json that may change what a model computes is never ignored silently."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers_fields import known_to_transformers

from text_generation_common.errors import ModelError
from text_generation_common.models.config import read_config
from text_generation_common.models.fields import HARMLESS, transformers_fields

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def unknown(folder: Path, **changes: Any) -> tuple[str, ...]:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return read_config(folder).unknown_fields


def test_the_list_holds_every_field_that_the_installed_transformers_knows() -> None:
    new = known_to_transformers() - transformers_fields()
    assert new == set(), "run server/text_generation_server/tests/transformers_fields.py"


@pytest.mark.parametrize(("field", "value"), [*chain(*TABLES["refused"].values())])
def test_a_field_that_may_change_the_result_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"config.json: {field} is .*, which is not supported for llama") as refused:
        unknown(tmp_path, **{field: value})
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("field", "value"), [*chain(*TABLES["accepted"].values())])
def test_a_value_that_changes_nothing_is_accepted_without_a_warning(tmp_path: Path, field: str, value: object) -> None:
    assert unknown(tmp_path, **{field: value}) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma2", "sliding_window": 4096, "sliding_window_size": 4096},  # Gemma-2-9B
        {  # Command-R7B
            "model_type": "cohere2", "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window_pattern": 4,
            "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
        {  # StarCoder2-3B
            "model_type": "starcoder2", "activation_function": "gelu_pytorch_tanh", "attention_softmax_in_fp32": True,
            "embedding_dropout": 0.1, "layer_norm_epsilon": 1e-5, "mlp_type": "default", "norm_type": "layer_norm",
            "residual_dropout": 0.1, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
        },
    ],
    ids=lambda fields: fields["model_type"],
)  # fmt: skip
def test_fields_that_files_have_and_transformers_does_not_read(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert unknown(tmp_path, **fields) == ()


def test_a_window_that_is_switched_off_does_not_count(tmp_path: Path) -> None:
    off = {"sliding_window": 128, "max_window_layers": 2, "use_sliding_window": False}
    assert unknown(tmp_path, **off) == ()
    for changes in ({"use_sliding_window": True}, {"use_sliding_window": None}):
        with pytest.raises(ModelError, match="sliding_window"):
            unknown(tmp_path, **off | changes)


def test_an_unknown_field_gives_a_warning_with_its_name(tmp_path: Path) -> None:
    fields = {"full_attn_mod": 1, "interpolate_factor": 1, "my_rope_variant": 1, "special_attn": "yes", "LogitCap": 30}
    assert unknown(tmp_path, **fields) == tuple(fields)  # transformers reads none of them in any model
    assert unknown(tmp_path, my_note="trained on a Tuesday", another_one={"a": 1}) == ("my_note", "another_one")
    assert unknown(tmp_path, **{"two\nlines": 1}) == ('"two\\nlines"',)


def test_a_repeated_size_is_compared_with_what_the_family_says(tmp_path: Path) -> None:
    phi = {"model_type": "phi", "partial_rotary_factor": 0.5}
    falcon = {"model_type": "falcon", "n_layer": 3, "multi_query": False}
    assert unknown(tmp_path, **phi, rotary_dim=8) == unknown(tmp_path, **falcon, n_head=4) == ()
    for fields in (phi | {"rotary_dim": 16}, falcon | {"n_head": 5}):
        with pytest.raises(ModelError, match=r"rotary_dim|n_head"):
            unknown(tmp_path, **fields)


def test_a_norm_that_the_family_always_has_may_be_asked_for(tmp_path: Path) -> None:
    """As in the config.json of Qwen3-Coder-480B. transformers reads this field in models of other types alone."""
    asked = {"use_qk_norm": True, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert unknown(tmp_path, model_type="qwen3", **asked) == ()
    assert unknown(tmp_path, model_type="qwen3_moe", **asked, **experts) == ()
    for model_type in ("llama", "qwen2"):
        with pytest.raises(ModelError, match="use_qk_norm"):
            unknown(tmp_path, model_type=model_type, **asked)


def test_no_field_of_a_scale_is_on_the_list_of_harmless_fields() -> None:
    words = ("rope", "scale", "multiplier", "norm", "window", "cap", "quant", "bias")
    assert not [name for name in HARMLESS if any(word in name for word in words)]
