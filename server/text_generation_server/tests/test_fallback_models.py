"""Models that transformers computes over our cache, compared with transformers alone on the same weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_checkpoints import MODELS, SHAPE, WINDOW, expected_logprobs, make_model
from shard_tools import Client, generate, make_runner, random_ids, scattered_slots, warm_runner

from text_generation_common.sampling import Sampling
from text_generation_server.layers.weights import int8
from text_generation_server.models.fallback.model import FallbackModel
from text_generation_server.models.fallback.probe import LayerRule
from text_generation_server.runner import ModelRunner

# One for each kind of attention, norm, MLP and head. `pytest -m models` runs the others.
ALWAYS = "deepseek_v3 exaone4 gemma2 glm4_moe gpt_neox gpt_oss llama nemotron opt qwen2_moe".split()
LENGTHS = (1, 17, 70)
NEW = 6
TOLERANCE = 1e-4


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.models) for name in MODELS],
    ids=str,
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelRunner, torch.nn.Module]]:
    path = tmp_path_factory.mktemp("model")
    model = make_model(path, request.param)
    yield warm_runner(path, max_total_tokens=256, with_families=False), model


def difference(runner: ModelRunner, model: torch.nn.Module, length: int, new: int = NEW) -> float:
    """The largest difference of a log-probability from transformers', over a text that the runner chooses. Infinite if
    one of its tokens is not the best of transformers."""
    client = generate(runner, random_ids(length), new)
    expected = expected_logprobs(model, random_ids(length), client.tokens[7])
    ours = expected.gather(1, torch.tensor(client.tokens[7]).unsqueeze(1)).squeeze(1)
    if (expected.max(dim=1).values - ours).max() > TOLERANCE:
        return torch.inf
    return float((torch.tensor(client.logprobs[7]) - ours).abs().max())


def test_greedy_text_and_logprobs_equal_transformers(served: tuple[ModelRunner, torch.nn.Module]) -> None:
    for length in LENGTHS:
        assert difference(*served, length) <= TOLERANCE


def test_other_requests_chunks_and_a_resume_do_not_change_a_text(served: tuple[ModelRunner, torch.nn.Module]) -> None:
    runner, _ = served
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
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
        torch.testing.assert_close(torch.tensor(client.logprobs[i]), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    @cache
    def make(model_type: str) -> tuple[Path, torch.nn.Module]:
        path = tmp_path_factory.mktemp("model")
        return path, make_model(path, model_type)

    return make


def rules_of(runner: ModelRunner) -> list[LayerRule]:
    assert isinstance(runner._model, FallbackModel)
    return runner._model._rules


@pytest.mark.parametrize(
    ("model_type", "option"),
    [
        *(("gemma2", "softcap"), ("gemma2", "window"), ("gpt_oss", "sinks_H"), ("gpt_oss", "window")),
        pytest.param("vaultgemma", "softcap", marks=pytest.mark.models),
        pytest.param("vaultgemma", "window", marks=pytest.mark.models),
        *(pytest.param(name, "sinks_H", marks=pytest.mark.models) for name in ("granite_swa", "granitemoe_swa")),
        *(
            pytest.param(name, "window", marks=pytest.mark.models)
            for name in "mistral starcoder2 gemma3_text cohere2 ministral olmo3 exaone4 granite_swa".split()
        ),
    ],
)
def test_without_an_option_of_its_attention_a_model_would_not_equal_transformers(
    checkpoint: Callable[[str], tuple[Path, torch.nn.Module]], model_type: str, option: str
) -> None:
    path, model = checkpoint(model_type)
    runner = warm_runner(path, max_total_tokens=256, with_families=False)
    assert difference(runner, model, 70) <= TOLERANCE
    rules = rules_of(runner)
    assert any(getattr(rule.options, option) is not None for rule in rules)
    rules[:] = [replace(rule, options=replace(rule.options, **{option: None})) for rule in rules]
    assert difference(runner, model, 70) >= 100 * TOLERANCE


def test_the_layers_of_a_model_have_windows_of_their_own(
    checkpoint: Callable[[str], tuple[Path, torch.nn.Module]],
) -> None:
    path, _ = checkpoint("gemma2")
    for longest, window in ((WINDOW - 1, None), (WINDOW, None), (WINDOW + 1, WINDOW), (256, WINDOW)):
        runner = warm_runner(path, max_total_tokens=longest, with_families=False)
        assert [rule.options.window for rule in rules_of(runner)] == [window, None]


def test_a_text_may_be_one_token_longer_than_a_window(
    checkpoint: Callable[[str], tuple[Path, torch.nn.Module]],
) -> None:
    path, model = checkpoint("gpt_oss")
    for longest in (WINDOW, WINDOW + 1, WINDOW + 2):
        runner = warm_runner(path, max_total_tokens=longest, with_families=False)
        assert difference(runner, model, longest - NEW, NEW) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma2", "gpt_oss"])
def test_in_bfloat16_a_model_is_as_near_to_float32_as_in_transformers(
    checkpoint: Callable[[str], tuple[Path, torch.nn.Module]], model_type: str
) -> None:
    path, model = checkpoint(model_type)
    runner = warm_runner(path, max_total_tokens=256, with_families=False, dtype=torch.bfloat16)
    prompt = random_ids(70)
    exact = expected_logprobs(model, prompt, [0])[0]
    theirs = expected_logprobs(type(model).from_pretrained(path, dtype=torch.bfloat16), prompt, [0])[0].float()
    errors = [(logprobs - exact).abs().mean() for logprobs in (all_logprobs(runner, prompt), theirs)]
    assert errors[0] <= 2 * errors[1]


def count_norms(model: Any, name: str) -> int:
    return sum(name in type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gemma2", "gpt_oss", "llama"])
def test_norms_are_ours(
    checkpoint: Callable[[str], tuple[Path, torch.nn.Module]], model_type: str, dtype: torch.dtype
) -> None:
    path, model = checkpoint(model_type)
    served = make_runner(path, with_families=False, dtype=dtype)._model
    assert isinstance(served, FallbackModel)
    assert count_norms(served._base, "KernelNorm") == count_norms(model, "RMSNorm") > 0


@pytest.mark.parametrize("change", ["* 1.02", "+ 1e-3", "eps"])
def test_a_norm_that_computes_something_else_is_not_replaced(
    checkpoint: Callable[[str], tuple[Path, torch.nn.Module]], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm.forward
    changed = {
        "* 1.02": lambda self, x: norm(self, x) * 1.02,
        "+ 1e-3": lambda self, x: norm(self, x) + 1e-3,
        "eps": lambda self, x: norm(self, (x.float().square() + 1e-6).sqrt().to(x.dtype) * x.sign()),
    }
    monkeypatch.setattr(LlamaRMSNorm, "forward", changed[change])
    for dtype in (torch.float32, torch.bfloat16):
        served = make_runner(checkpoint("llama")[0], with_families=False, dtype=dtype)._model
        assert isinstance(served, FallbackModel)
        assert count_norms(served._base, "KernelNorm") == 0


def test_eight_bit_weights_give_the_text_of_our_own_model(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    found = [
        all_logprobs(
            warm_runner(tmp_path, dtype=torch.bfloat16, weight_format=int8, with_families=with_families), random_ids(17)
        )
        for with_families in (True, False)
    ]
    assert (found[0] - found[1]).abs().mean() < 0.05 * found[0].std()


def all_logprobs(runner: ModelRunner, prompt: torch.Tensor) -> torch.Tensor:
    """The log-probabilities [V] of the token after a prompt."""
    client = Client(runner, scattered_slots(runner))
    everything = Sampling(top_n_tokens=SHAPE["vocab_size"])
    output = client.step([], [client.first_chunk(7, prompt, parameters=everything)])
    return torch.zeros(SHAPE["vocab_size"]).scatter_(0, output.top_ids.long(), output.top_logprobs)
