"""Models of texts and images, whose text model alone is served, compared with transformers on the same weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_checkpoints import MODELS as FALLBACK
from family_checkpoints import ROPES, SHAPE
from safetensors.torch import load_file, save_file
from shard_tools import generate, random_ids, warm_runner

from text_generation_common.errors import ModelError
from text_generation_common.models.config import DEFAULT_SIZES, MULTIMODAL, SIZES, read_config

TEXTS: dict[str, dict[str, Any]] = {
    "aya_vision": {"model_type": "cohere2", "sliding_window": 20},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 20, "rope_parameters": ROPES},
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


# A text model that transformers computes.
MINISTRAL = {"model_type": "ministral3", **FALLBACK["ministral3"]}


def make_multimodal(path: Path, model_type: str, text_model: dict[str, Any]) -> torch.nn.Module:
    """Writes a tiny checkpoint, and returns transformers' own model of it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    vision = type(AutoConfig.for_model(model_type).vision_config).model_type
    text = {**SHAPE, "tie_word_embeddings": False, **text_model}
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config={"model_type": vision, **VISION}, image_token_index=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        std = 0.3 if parameter.dim() == 1 else 0.2
        torch.nn.init.normal_(parameter, mean=float("norm" in name and parameter.dim() == 1), std=std)
    model.save_pretrained(path)
    return model


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=pytest.mark.models if name == "aya_vision" else ()) for name in MULTIMODAL),
        "ministral3",
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    path = tmp_path_factory.mktemp("model")
    is_mistral3 = request.param == "ministral3"
    text_model = MINISTRAL if is_mistral3 else TEXTS[request.param]
    yield path, make_multimodal(path, "mistral3" if is_mistral3 else request.param, text_model)


def check(path: Path, theirs: torch.nn.Module) -> None:
    prompt, new = random_ids(50), 12
    client = generate(warm_runner(path), prompt, new)
    with torch.no_grad():
        ids = torch.cat([prompt, torch.tensor(client.tokens[7])]).unsqueeze(0)
        logits = theirs(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        # transformers leaves the factor of Cohere's logits out where its text model is within Aya Vision.
        logits *= getattr(theirs.config.text_config, "logit_scale", 1.0)
    expected = logits.log_softmax(dim=-1)
    ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
    assert (expected.max(dim=1).values - ours).max() <= 1e-4
    torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


def test_texts_are_those_of_transformers(model: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        check(*model)
    assert "the text model alone is loaded" in caplog.text


@pytest.mark.parametrize(
    ("base", "head"), [("language_model.model.", "language_model."), ("model.language_model.", "")], ids=["old", "new"]
)
def test_tensors_have_the_names_of_all_versions_of_transformers(
    model: tuple[Path, Any], tmp_path: Path, base: str, head: str
) -> None:
    path, theirs = model
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        for old in ("language_model.model.", "model.language_model."):
            name = name.replace(old, base)
        tensors[f"{head}lm_head.weight" if "lm_head" in name else name] = tensor
    assert sum(not name.startswith(base) for name in tensors) > 5
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    check(tmp_path, theirs)
    save_file(tensors | {f"{base}layers.0.self_attn.q_proj.qweight_": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="qweight_"):
        warm_runner(tmp_path)


def test_fields_beside_the_text_config_say_what_it_leaves_out(tmp_path: Path) -> None:
    """As in the config.json of Gemma 3 4B, and of Llava 1.5."""
    config = {
        "model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "image_token_index": 262144,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert read.eos_token_ids == (1, 106) and read.dtype == "bfloat16" and read.tie_word_embeddings
    assert (read.num_heads, read.num_kv_heads, read.head_size, read.vocab_size) == (8, 4, 256, 262208)
    assert [rule.window for rule in read.rules[:6]] == [1024] * 5 + [None]
    local, everywhere = read.ropes
    assert (local.theta, local.scaling.kind) == (1e4, "default")
    assert (everywhere.theta, everywhere.scaling.kind, everywhere.scaling.factor) == (1e6, "linear", 8.0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"vocab_size": 32064}}))
    read = read_config(tmp_path)
    assert (read.model_type, read.hidden_size, read.num_heads, read.vocab_size) == ("llama", 4096, 32, 32064)


@pytest.mark.parametrize("model_type", DEFAULT_SIZES)
def test_sizes_that_are_left_out_are_those_of_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    assert tuple(getattr(config, name) for name in SIZES) == DEFAULT_SIZES[model_type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text_config": {"model_type": "mamba"}}, 'model type "mamba" is not supported'),
        ({"text_config": 7}, "text_config is 7, and must be an object"),
        ({"text_config": {"model_type": "llama", "hidden_size": "a"}}, 'text_config: hidden_size is the string "a"'),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized as gptq"),
        ({"model_type": "paligemma"}, 'model type "paligemma"'),
        # LLaVA as its authors have published it. transformers reads no field of the text model there.
        ({"text_config": None, "hidden_size": 5120, "rms_norm_eps": 1e-5}, "config.json has no field text_config"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {}} | changes))
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1
