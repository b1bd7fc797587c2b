"""Each option of the sampler, alone and against a plain computation."""

import torch

from text_generation_server.batch import PromptChunk, Rows
from text_generation_server.kernels import select_backend
from text_generation_server.sampling.parameters import Parameters
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.sampling.watermark import green_list

VOCABULARY = 50
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


def sample_rows(choices: list[Parameters], ids: list[int] | None = None, prompt: int = 2) -> object:
    rows = Rows(len(choices), 16, torch.device("cpu"))
    history = torch.tensor(ids or [3, 4, 5, 5], dtype=torch.int32)
    index = [rows.join(PromptChunk(i, 0, 4, True, history, history, prompt, c)) for i, c in enumerate(choices)]
    sampler = Sampler(select_backend(torch.device("cpu")).kernels, 0.5, 2.0)
    return sampler(LOGITS.repeat(len(choices), 1), rows, index)


def distribution(parameters: Parameters) -> torch.Tensor:
    """Log-probabilities the sampler draws from: it returns them all if asked for all."""
    everything = Parameters(**{**{f: getattr(parameters, f) for f in parameters.__slots__}, "top_n_tokens": VOCABULARY})
    sampled = sample_rows([everything])
    result = torch.full((VOCABULARY,), float("-inf"))
    result[sampled.top_ids.long()] = sampled.top_logprobs  # type: ignore[attr-defined]
    return result


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_neutral_parameters_leave_the_distribution_alone() -> None:
    assert_same(distribution(Parameters()), LOGITS.log_softmax(0))


def test_temperature_divides() -> None:
    assert_same(distribution(Parameters(greedy=False, temperature=0.5)), (LOGITS / 0.5).log_softmax(0))


def test_the_smallest_numbers_a_request_may_carry_divide_nothing_into_infinity() -> None:
    for extreme in (
        Parameters(greedy=False, temperature=1e-38),
        Parameters(greedy=False, temperature=1e-38, top_p=0.5, typical_p=0.5),
        Parameters(repetition_penalty=1e-38),
    ):
        sampled = sample_rows([extreme])
        assert sampled.logprobs_R.isfinite().all() and not sampled.not_finite  # type: ignore[attr-defined]
    assert sample_rows([Parameters(greedy=False, temperature=1e-38)]).ids_R.item() == LOGITS.argmax()  # type: ignore[attr-defined]


def test_top_k_keeps_k() -> None:
    kept = distribution(Parameters(greedy=False, top_k=3)).isfinite()
    assert set(kept.nonzero().flatten().tolist()) == set(LOGITS.topk(3).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    kept = distribution(Parameters(greedy=False, top_p=0.6)).isfinite()
    probabilities = LOGITS.softmax(0)
    assert probabilities[kept].sum() >= 0.6
    assert probabilities[kept].sum() - probabilities[kept].min() < 0.6


def test_typical_p_keeps_the_least_surprising() -> None:
    kept = distribution(Parameters(greedy=False, typical_p=0.5)).isfinite()
    logprobs = LOGITS.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum()
    distance = (-logprobs - entropy).abs()
    assert distance[kept].max() <= distance[~kept].min()
    assert logprobs.exp()[kept].sum() >= 0.5


def test_repetition_counts_prompt_and_output_once() -> None:
    expected = LOGITS.clone()
    for token in (3, 4, 5):
        expected[token] = expected[token] * 1.5 if expected[token] < 0 else expected[token] / 1.5
    assert_same(distribution(Parameters(repetition_penalty=1.5)), expected.log_softmax(0))


def test_frequency_counts_every_use_in_the_output_only() -> None:
    expected = LOGITS.clone()
    expected[5] -= 2 * 0.7
    assert_same(distribution(Parameters(frequency_penalty=0.7)), expected.log_softmax(0))


def test_watermark_favours_half_of_the_vocabulary_by_delta() -> None:
    green = green_list(5, VOCABULARY, 0.5)
    assert len(green) == len(set(green.tolist())) == 25
    expected = LOGITS.clone()
    expected[green] += 2.0
    assert_same(distribution(Parameters(watermark=True)), expected.log_softmax(0))


def test_rows_with_all_kinds_of_options_do_not_touch_each_other() -> None:
    choices = [
        Parameters(),
        Parameters(greedy=False, seed=1),
        Parameters(greedy=False, seed=1, top_k=5, top_n_tokens=2),
        Parameters(greedy=False, seed=1, top_p=0.3, repetition_penalty=2.0),
        Parameters(greedy=False, seed=1, typical_p=0.3, watermark=True),
        Parameters(frequency_penalty=1.0, top_n_tokens=4),
    ]
    together = sample_rows(choices)
    for i, choice in enumerate(choices):
        alone = sample_rows([choice])
        assert together.ids_R[i] == alone.ids_R[0] and together.logprobs_R[i] == alone.logprobs_R[0]  # type: ignore[attr-defined]
    assert together.top_counts == [0, 0, 2, 0, 0, 4]  # type: ignore[attr-defined]


def test_top_tokens_are_fewer_where_fewer_are_possible() -> None:
    sampled = sample_rows([Parameters(greedy=False, top_k=2, top_n_tokens=5)])
    assert sampled.top_counts == [2]  # type: ignore[attr-defined]
