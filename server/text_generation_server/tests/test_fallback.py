"""Models that transformers computes over our cache, compared with transformers alone on the same weights."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_tools import Client, generate, make_runner, random_ids, scattered_slots, warm_runner

from text_generation_common.sampling import Sampling
from text_generation_server.errors import ModelError
from text_generation_server.layers.weights import int8
from text_generation_server.models.architecture import ModelConfig
from text_generation_server.models.config import read_any_config
from text_generation_server.models.fallback.config import FallbackConfig
from text_generation_server.models.fallback.probe import seen
from text_generation_server.runner import ModelRunner

SHAPE: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What differs from SHAPE. Our families are here too: transformers computes them if it is told to.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "gpt_neox": {"rotary_pct": 0.25},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "olmo2": {},
    "seed_oss": {"head_dim": 16},
    "nemotron": {},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "head_dim": 16,
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
}  # fmt: skip
NEW = 6


def make_model(path: Path, model_type: str, **changes: Any) -> torch.nn.Module:
    """Writes a tiny checkpoint under `path`, with no parameter at its default, and returns transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **MODELS.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    corrections = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
    for name, parameter in [*model.named_parameters(), *corrections]:
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return model


def expected_logprobs(model: torch.nn.Module, prompt: torch.Tensor, output: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [new, V] for each step of our text."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, torch.tensor(output)]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelRunner, torch.nn.Module]]:
    path = tmp_path_factory.mktemp("model")
    model = make_model(path, request.param)
    yield warm_runner(path, max_total_tokens=256, with_families=False), model


def test_greedy_text_and_logprobs_equal_transformers(served: tuple[ModelRunner, torch.nn.Module]) -> None:
    runner, model = served
    for length in (1, 70):
        client = generate(runner, random_ids(length), NEW)
        expected = expected_logprobs(model, random_ids(length), client.tokens[7])
        ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
        assert (expected.max(dim=1).values - ours).max() <= 1e-4
        torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


def test_other_requests_chunks_and_a_resume_do_not_change_a_text(served: tuple[ModelRunner, torch.nn.Module]) -> None:
    runner, _ = served
    prompts = [random_ids(n, seed=n) for n in (1, 17, 70)]
    alone = [generate(runner, prompt, NEW) for prompt in prompts]
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=1))
    long = client.first_chunk(2, prompts[2], end=33)
    client.step([], [client.first_chunk(0, prompts[0]), long])
    client.step([0], [client.first_chunk(1, prompts[1]), type(long)(2, 33, 70, True)])
    for _ in range(3):
        client.step([0, 1, 2])
    history = torch.cat([prompts[1], torch.tensor(alone[1].tokens[7][:3])])
    client.step([0, 1, 2], [client.first_chunk(3, history, prompt_length=len(prompts[1]))])
    while waiting := [i for i, known in ((0, 0), (1, 0), (2, 0), (3, 3)) if len(client.tokens[i]) < NEW - known]:
        client.step(waiting)
    for i, single, known in ((0, alone[0], 0), (1, alone[1], 0), (2, alone[2], 0), (3, alone[1], 3)):
        assert client.tokens[i] == single.tokens[7][known:]
        expected = torch.tensor(single.logprobs[7][known:])
        torch.testing.assert_close(torch.tensor(client.logprobs[i]), expected, atol=1e-4, rtol=1e-4)


def test_eight_bit_weights_give_the_text_of_our_own_model(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    everything = Sampling(top_n_tokens=SHAPE["vocab_size"])
    found = []
    for with_families in (True, False):
        runner = warm_runner(tmp_path, dtype=torch.bfloat16, weight_format=int8, with_families=with_families)
        client = Client(runner, scattered_slots(runner))
        output = client.step([], [client.first_chunk(7, random_ids(17), parameters=everything)])
        found.append(torch.zeros(SHAPE["vocab_size"]).scatter_(0, output.top_ids[0].long(), output.top_logprobs[0]))
    assert (found[0] - found[1]).abs().mean() < 0.05 * found[0].std()


def test_models_of_our_families_are_ours_and_others_are_not(tmp_path: Path) -> None:
    for model_type, kind in (("llama", ModelConfig), ("seed_oss", FallbackConfig)):
        path = tmp_path / model_type
        make_model(path, model_type)
        config = read_any_config(path)
        assert type(config) is kind and config.model_type == model_type
        assert (config.vocab_size, config.max_positions, config.eos_token_ids) == (320, 512, (2,))
        assert config.dtype == torch.float32


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as refused:
        make_runner(path, with_families=False, **{"max_total_tokens": 256, **options})
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "no_such_type"}, 'model type "no_such_type" is not supported yet, only: '),
        ({"model_type": "gptj"}, "its attention does not go through the interface of transformers"),
        ({"model_type": "bloom"}, "its attention does not go through the interface of transformers"),
        ({"model_type": "mamba"}, "its layers keep a state for each text"),
        ({"model_type": "qwen3_next"}, "its layers keep a state for each text"),
        ({"model_type": "phimoe"}, "its results would differ from those of transformers"),
        ({"model_type": "t5"}, "transformers has no causal language model of this type"),
        ({"model_type": "gemma3"}, "it is more than a text model"),
        ({"model_type": "llama4_text"}, "its layers are of the kind chunked_attention"),
        ({"model_type": "olmo2", "auto_map": {"AutoConfig": "a.B"}}, "auto_map is not supported for model type"),
        (
            {"model_type": "olmo2", "quantization_config": {"quant_method": "awq"}},
            "quantization_config is not supported",
        ),
        ({"model_type": "olmo2", "vocab_size": 0}, 'vocab_size is "0", and must be a whole number from 1'),
        ({"model_type": "olmo2", "hidden_size": "wide"}, "transformers cannot read it: "),
    ],
)
def test_what_transformers_cannot_compute_here_is_refused_by_its_config(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert told in refusal(tmp_path)


def test_without_transformers_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(tmp_path).endswith("pip install 'tgi-py[transformers]'")


def test_rope_scaling_by_flag_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "olmo2"}')
    with pytest.raises(ModelError, match=r'--rope-factor are not supported for model type "olmo2"'):
        read_any_config(tmp_path, "linear", 2.0)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": 512}, "its attention has the argument softcap"),
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


def test_a_window_is_seen_by_attention(tmp_path: Path) -> None:
    model = make_model(tmp_path, "mistral", sliding_window=20)
    client = generate(warm_runner(tmp_path, with_families=False, max_total_tokens=100), random_ids(70), NEW)
    expected = expected_logprobs(model, random_ids(70), client.tokens[7])
    ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(client.logprobs[7]), ours, atol=1e-4, rtol=1e-4)


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
