"""Which models transformers computes over our cache, and which are refused, before their weights are read or after."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fallback_checkpoints import SHAPE, make_model
from safetensors.torch import load_file, save_file
from shard_tools import make_runner
from transformers_types import OF_FAMILIES, REFUSED, fields_text, refused_text

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.served import implementation_of, read_served
from text_generation_server.load import _mention
from text_generation_server.models import read_any_config
from text_generation_server.models.fallback.config import FallbackConfig
from text_generation_server.models.fallback.probe import seen

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


def test_models_of_our_families_are_ours_and_others_are_not(tmp_path: Path) -> None:
    for model_type, kind in (("llama", ModelConfig), ("seed_oss", FallbackConfig)):
        path = tmp_path / model_type
        make_model(path, model_type)
        config = read_any_config(path)
        assert type(config) is kind and config.model_type == model_type
        assert (config.vocab_size, config.max_positions, config.eos_token_ids) == (320, 512, (2,))
        assert config.dtype is Dtype.float32


@pytest.mark.parametrize(
    ("model_type", "changes", "option"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),  # Command-R+
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),  # OPT-350m
        ("llama", {"hidden_act": "relu2"}, "hidden_act"),
    ],
)
def test_a_family_with_an_option_that_our_decoder_lacks_is_computed_by_transformers(
    tmp_path: Path, model_type: str, changes: dict[str, Any], option: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {"model_type": model_type, **SHAPE, "ffn_dim": 96, "word_embed_proj_dim": 64, **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_any_config(tmp_path)
    assert isinstance(config, FallbackConfig) and config.option == option
    assert read_served(tmp_path) is None
    assert implementation_of(tmp_path) == "transformers"
    _mention(config, 128)
    assert f"{model_type} with this {option} is not computed by the server's own decoder" in caplog.text
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": AWQ}))
    quantized = read_any_config(tmp_path)
    assert isinstance(quantized, FallbackConfig) and quantized.option == option
    assert not hasattr(quantized.values, "quantization_config")
    with pytest.raises(ModelError):
        read_any_config(tmp_path, "linear", 2.0)


@pytest.mark.slow
def test_the_lists_of_types_and_fields_are_those_of_the_installed_transformers() -> None:
    told = "run server/text_generation_server/tests/transformers_types.py"
    assert (REFUSED.read_text(), OF_FAMILIES.read_text()) == (refused_text(), fields_text()), told


def test_a_file_beside_config_json_that_names_quantized_weights_is_not_overlooked(tmp_path: Path) -> None:
    make_model(tmp_path, "seed_oss")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: the weights are quantized as modelopt \(W4A8_AWQ\)"):
        read_any_config(tmp_path)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as refused:
        make_runner(path, with_families=False, **{"max_total_tokens": 256, **options})
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"model_type": "no_such_type"},
            'model type "no_such_type" is not supported: choose a model of one of these types: aya_vision, ',
        ),
        ({"model_type": "gptj"}, "transformers does not declare that its attention can be replaced"),
        ({"model_type": "bloom"}, "transformers does not declare that its attention can be replaced"),
        ({"model_type": "t5"}, "transformers has no causal language model of this type"),
        ({"model_type": "gemma3n"}, "it is more than a text model"),
        ({"model_type": "llama4_text"}, "its layers are of the kind chunked_attention"),
        ({"model_type": "my_own", "auto_map": {"AutoConfig": "a.B"}}, "(auto_map), and such code is never run"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "the weights are quantized as mxfp4, which is not supported for a model that transformers computes",
        ),
        # Without quantization it would not be served either, and that is the reason to give.
        ({"model_type": "mamba", "quantization_config": {"quant_method": "fp8"}}, "its layers keep a state"),
        ({"model_type": "olmo2", "vocab_size": 0}, 'vocab_size is "0", and must be a whole number from 1'),
        ({"model_type": "olmo2", "hidden_size": "wide"}, "transformers cannot read it: "),
    ],
)
def test_what_transformers_cannot_compute_here_is_refused_by_its_config(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert told in refusal(tmp_path)


RECURRENT = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h"
    " olmo_hybrid qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
).split()


@pytest.mark.parametrize("model_type", RECURRENT)
def test_models_with_a_state_are_refused_by_name_before_weights_are_read(tmp_path: Path, model_type: str) -> None:
    layers = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if "lfm2" in model_type else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **layers}))  # there are no weights
    line = refusal(tmp_path)
    assert f'model type "{model_type}" is not supported: its layers ' in line
    assert "keep a state for each text" in line or "are of the kind" in line


def test_without_transformers_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(tmp_path).endswith("pip install 'tgi-py[transformers]'")


def test_code_of_a_repository_is_not_run_where_transformers_has_the_type(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    automatic = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    make_model(tmp_path, "seed_oss")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": automatic}))
    runner = make_runner(tmp_path)
    assert type(runner._model._base).__module__.startswith("transformers.")


def test_rope_scaling_by_flag_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "seed_oss"}')
    with pytest.raises(ModelError, match=r'--rope-factor are not supported for model type "seed_oss"'):
        read_any_config(tmp_path, "linear", 2.0)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.0}, "its attention has a softcap that is not a number above 0"),
        ("bert", {"is_decoder": False}, "a mask that is neither causal nor a sliding window"),
        (
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
            "rope type longrope of this phi3 is not supported for texts longer",
        ),
    ],
)
def test_what_the_attention_cannot_do_is_refused_after_a_trial(
    tmp_path: Path, model_type: str, changes: dict[str, Any], told: str
) -> None:
    make_model(tmp_path, model_type, **changes)
    assert told in refusal(tmp_path)


def random_logits(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(logits=torch.randn(1, 4, SHAPE["vocab_size"]))


@pytest.mark.parametrize(
    ("part", "forward", "told"),
    [
        ("LlamaMLP", lambda _, x: x.cumsum(1), "tokens meet outside of its attention"),
        ("LlamaAttention", lambda _, hidden_states, **__: (hidden_states, None), "is not called once for each of its"),
        ("LlamaForCausalLM", random_logits, "its head cannot be computed apart"),
        ("LlamaMLP", lambda _, x: x[:, 7], "a trial before serving failed: index 7 is out of bounds"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_after_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, forward: Any, told: str
) -> None:
    from transformers.models.llama import modeling_llama

    make_model(tmp_path, "llama")
    monkeypatch.setattr(getattr(modeling_llama, part), "forward", forward)
    assert told in refusal(tmp_path)


def test_positions_that_a_model_makes_by_itself_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    turn = LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        LlamaRotaryEmbedding, "forward", lambda self, x, position_ids: turn(self, x, torch.arange(x.shape[1])[None])
    )
    make_model(tmp_path, "llama")
    assert "or it has positions of its own" in refusal(tmp_path)


def test_weights_that_do_not_belong_to_the_config_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "olmo2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = "model.layers.1.post_feedforward_layernorm.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != norm}, file, {"format": "pt"})
    assert f"the weights files lack tensor {norm}" in refusal(tmp_path)
    save_file(tensors | {"model.layers.1.strange": torch.zeros(1)}, file, {"format": "pt"})
    assert "the weights files have a strange tensor model.layers.1.strange" in refusal(tmp_path)


def test_masks_are_told_apart_by_what_tokens_see() -> None:
    def chunked(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key // 100 == query // 100)

    assert seen(causal_mask, 256) == 256
    assert seen(lambda b, h, q, k: causal_mask(b, h, q, k) & (k > q - 100), 256) == 100
    assert seen(chunked, 100) == 100 and seen(chunked, 256) is None
    assert seen(lambda b, h, q, k: k >= 0, 256) is None


def causal_mask(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query
