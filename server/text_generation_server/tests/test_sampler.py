"""Each option of the sampler, alone and against a plain computation."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from sampled_rows import Recording
from torch import Tensor

from text_generation_common.sampling import Sampling
from text_generation_server.device.transfers import HostMoment
from text_generation_server.errors import StepError
from text_generation_server.kernels import reference, select_backend
from text_generation_server.kernels.interface import Kernels
from text_generation_server.sampling.sampler import Sampled, SampledOnHost, Sampler, green_list, read_out
from text_generation_server.step.parameters import check_token_lists, cuts, penalizes, temperature
from text_generation_server.step.rows import PromptChunk, Rows

VOCABULARY = 50
CPU = torch.device("cpu")
KERNELS = select_backend(CPU).kernels
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


def join(rows: Rows, request_id: int, choice: Sampling, ids: list[int] | None = None, prompt: int = 2) -> int:
    history = torch.tensor(ids or [3, 4, 5, 5], dtype=torch.int32)
    return rows.join(PromptChunk(request_id, 0, 4, True, history, history, prompt, choice))


def sample_rows(choices: list[Sampling]) -> SampledOnHost:
    rows = Rows(len(choices), 16, CPU)
    index = tuple(join(rows, i, choice) for i, choice in enumerate(choices))
    sampler = Sampler(KERNELS, 0.5, 2.0)
    newest = sampler.before(rows, index, HostMoment)
    return read_out(sampler(LOGITS.repeat(len(choices), 1), rows, index, newest))


def distribution(parameters: Sampling) -> Tensor:
    """Log-probabilities of the sampler's distribution. The sampler returns them for all tokens if asked for all as top
    tokens."""
    sampled = sample_rows([replace(parameters, top_n_tokens=VOCABULARY)])
    result = torch.full((VOCABULARY,), float("-inf"))
    result[sampled.top_ids.long()] = sampled.top_logprobs
    return result


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_neutral_parameters_leave_the_distribution_alone() -> None:
    assert_same(distribution(Sampling()), LOGITS.log_softmax(0))


def test_temperature_divides() -> None:
    assert_same(distribution(Sampling(do_sample=True, temperature=0.5)), (LOGITS / 0.5).log_softmax(0))


def test_the_smallest_numbers_a_request_may_carry_divide_nothing_into_infinity() -> None:
    for extreme in (
        Sampling(do_sample=True, temperature=1e-38),
        Sampling(do_sample=True, temperature=1e-38, top_p=0.5, typical_p=0.5),
        Sampling(repetition_penalty=1e-38),
    ):
        sampled = sample_rows([extreme])
        assert sampled.logprobs.isfinite().all() and not sampled.not_finite
    assert sample_rows([Sampling(do_sample=True, temperature=1e-38)]).token_ids.item() == LOGITS.argmax()


def test_top_k_keeps_k() -> None:
    kept = distribution(Sampling(do_sample=True, top_k=3)).isfinite()
    assert set(kept.nonzero().flatten().tolist()) == set(LOGITS.topk(3).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    kept = distribution(Sampling(do_sample=True, top_p=0.6)).isfinite()
    probabilities = LOGITS.softmax(0)
    assert probabilities[kept].sum() >= 0.6
    assert probabilities[kept].sum() - probabilities[kept].min() < 0.6


def test_typical_p_keeps_the_least_surprising() -> None:
    kept = distribution(Sampling(do_sample=True, typical_p=0.5)).isfinite()
    logprobs = LOGITS.log_softmax(0)
    entropy = -(logprobs.exp() * logprobs).sum()
    distance = (-logprobs - entropy).abs()
    assert distance[kept].max() <= distance[~kept].min()
    assert logprobs.exp()[kept].sum() >= 0.5


def test_repetition_counts_prompt_and_output_once() -> None:
    expected = LOGITS.clone()
    for token in (3, 4, 5):
        expected[token] = expected[token] * 1.5 if expected[token] < 0 else expected[token] / 1.5
    assert_same(distribution(Sampling(repetition_penalty=1.5)), expected.log_softmax(0))


def test_frequency_counts_every_use_in_the_output_only() -> None:
    expected = LOGITS.clone()
    expected[5] -= 2 * 0.7
    assert_same(distribution(Sampling(frequency_penalty=0.7)), expected.log_softmax(0))


def test_presence_counts_each_token_of_the_output_once() -> None:
    expected = LOGITS.clone()
    expected[5] -= 0.7
    assert_same(distribution(Sampling(presence_penalty=0.7)), expected.log_softmax(0))


def without(*tokens: int) -> Tensor:
    return LOGITS.index_fill(0, torch.tensor(tokens), float("-inf")).log_softmax(0)


def test_only_allowed_tokens_can_be_chosen() -> None:
    allowed = (7, 3, 49, 7)
    others = set(range(VOCABULARY)) - set(allowed)
    assert_same(distribution(Sampling(allowed_token_ids=allowed)), without(*others))


def test_a_bad_word_is_not_completed_wherever_it_begins() -> None:
    # The history is 3, 4 in the prompt, and 5, 5 in the output.
    words = ((9,), (5, 10), (4, 5, 5, 11), (3, 4, 5, 5, 12), (4, 5, 13), (8, 3, 4, 5, 5, 14))
    assert_same(distribution(Sampling(bad_words_ids=words)), without(9, 10, 11, 12))


def test_no_end_token_is_chosen_until_the_output_is_long_enough_whatever_is_resumed() -> None:
    for least, excluded in ((3, (9, 10)), (2, ()), (0, ())):
        asked = Sampling(min_new_tokens=least, end_token_ids=(9, 10))
        expected = without(*excluded) if excluded else LOGITS.log_softmax(0)
        assert_same(distribution(asked), expected)
    assert_same(distribution(Sampling(min_new_tokens=2**32 - 1, end_token_ids=(9,))), without(9))


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    kept = distribution(Sampling(do_sample=True, min_p=0.2)).isfinite()
    assert torch.equal(kept, LOGITS.softmax(0) >= 0.2 * LOGITS.softmax(0).max())


def test_a_bias_is_added_to_the_tokens_it_names() -> None:
    expected = LOGITS.clone()
    expected[[3, 9]] += torch.tensor([1.5, -2.0])
    assert_same(distribution(Sampling(logit_bias=((3, 1.5), (9, -2.0)))), expected.log_softmax(0))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (((50, 1.0),), "not one of the 50"),
        (((-1, 1.0),), "not one of the 50"),
        (((3, 1.0), (50, 1.0)), "not one of the 50"),
        (((-1, 1.0), (3, 1.0)), "not one of the 50"),
        (((3, 1.0), (3, 2.0)), "twice"),
        (((3, float("inf")),), "finite"),
        (((3, float("nan")),), "finite"),
        (tuple((token, 1.0) for token in range(1025)), "at most 1024"),
    ],
)
def test_a_bias_that_cannot_be_added_is_refused(bias: tuple[tuple[int, float], ...], message: str) -> None:
    check_token_lists(Sampling(logit_bias=((0, 1.0), (49, -100.0))), VOCABULARY)
    check_token_lists(Sampling(logit_bias=tuple((token, 1.0) for token in range(1024))), 1024)
    with pytest.raises(StepError, match=message):
        check_token_lists(Sampling(logit_bias=bias), VOCABULARY)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"allowed_token_ids": (3, 50)}, "allowed tokens that is not one of the 50"),
        ({"allowed_token_ids": (3,) * 1025}, "1025 tokens for allowed tokens: at most 1024"),
        ({"bad_words_ids": ((3,), (4, -1))}, "bad words that is not one of the 50"),
        ({"bad_words_ids": ((3,), ())}, "has no tokens"),
        ({"bad_words_ids": ((3, 4),) * 513}, "1026 tokens for bad words: at most 1024"),
        ({"end_token_ids": (50,)}, "end tokens that is not one of the 50"),
        ({"end_token_ids": (3,) * 2049}, "at most 2048"),
    ],
)
def test_lists_that_the_kernels_cannot_take_are_refused(lists: dict[str, Any], message: str) -> None:
    with pytest.raises(StepError, match=message):
        check_token_lists(Sampling(**lists), VOCABULARY)


def test_the_longest_lists_are_taken() -> None:
    ids = tuple(range(1024))
    check_token_lists(Sampling(allowed_token_ids=ids, bad_words_ids=(ids,), end_token_ids=(*ids, *ids)), 1024)


def test_watermark_favours_half_of_the_vocabulary_by_delta() -> None:
    green = green_list(5, VOCABULARY, 0.5)
    assert len(green) == len(set(green.tolist())) == 25
    expected = LOGITS.clone()
    expected[green] += 2.0
    assert_same(distribution(Sampling(watermark=True)), expected.log_softmax(0))


def test_rows_with_all_kinds_of_options_do_not_touch_each_other() -> None:
    choices = [
        Sampling(),
        Sampling(do_sample=True, seed=1),
        Sampling(do_sample=True, seed=1, top_k=5, top_n_tokens=2),
        Sampling(do_sample=True, seed=1, top_p=0.3, repetition_penalty=2.0),
        Sampling(do_sample=True, seed=1, typical_p=0.3, watermark=True),
        Sampling(frequency_penalty=1.0, top_n_tokens=4),
        Sampling(presence_penalty=1.0, bad_words_ids=((5, 9), (3,)), logit_bias=((4, 3.0),)),
        Sampling(do_sample=True, seed=1, allowed_token_ids=(3, 9, 11), min_new_tokens=3, end_token_ids=(9,)),
    ]
    together = sample_rows(choices)
    for i, choice in enumerate(choices):
        alone = sample_rows([choice])
        assert together.token_ids[i] == alone.token_ids[0] and together.logprobs[i] == alone.logprobs[0]
    assert together.top_counts == [0, 0, 2, 0, 0, 4, 0, 0]


def test_top_tokens_are_fewer_where_fewer_are_possible() -> None:
    sampled = sample_rows([Sampling(do_sample=True, top_k=2, top_n_tokens=5)])
    assert sampled.top_counts == [2]


@pytest.mark.parametrize("sorts", [True, False], ids=["kernels that sort", "kernels that do not"])
def test_rows_that_are_sorted_go_in_blocks_with_a_sign_of_life_and_keep_their_places(sorts: bool) -> None:
    choices = [Sampling(do_sample=True, seed=i, top_k=5 * (i % 3)) for i in range(60)]
    rows, signs = Rows(60, 16, CPU), []
    index = tuple(join(rows, i, choice) for i, choice in enumerate(choices))[::-1]  # places are not rows' numbers
    kernels = Recording(cast(Kernels, reference), sorts)
    sampler = Sampler(kernels, 0.5, 2.0, lambda: signs.append(1))  # type: ignore[arg-type]
    sampled = sampler(LOGITS.repeat(60, 1), rows, index)
    # 40 rows are sorted in three blocks of at most 16 rows; the other rows are one block.
    assert (len(signs), len(kernels.given)) == ((4, 4) if sorts else (0, 1))
    for i, choice in enumerate(reversed(choices)):
        alone = sample_rows([choice])
        assert sampled.ids_R[i] == alone.token_ids[0]
        torch.testing.assert_close(sampled.logprobs_R[i], alone.logprobs[0])


def test_weights_are_the_likelihoods_to_six_digits() -> None:
    halvings = torch.cat([torch.linspace(0, 16, 5001), torch.tensor([37.99, 38.01, 40, 1e9, float("inf")])])
    weights = reference.token_weights(halvings)
    torch.testing.assert_close(weights[:5001].double(), 2.0 ** (38 - halvings[:5001].double()), rtol=5e-7, atol=1)
    assert weights[0] == 2**38 and weights[5001:].tolist() == [1, 0, 0, 0, 0]


CUTS = [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0.999}, {"min_p": 1.0}, {"min_p": 1e-9}, {"typical_p": 1e-9}]
PENALTIES = [
    {"repetition_penalty": 1.01},
    {"repetition_penalty": 0.5},
    {"frequency_penalty": -0.1},
    {"presence_penalty": 0.1},
]


def test_only_what_a_request_asks_for_is_launched() -> None:
    neutral = Sampling()
    assert not cuts(neutral) and not penalizes(neutral) and temperature(neutral) == 1.0
    assert all(cuts(Sampling(**cut)) and not penalizes(Sampling(**cut)) for cut in CUTS)  # type: ignore[arg-type]
    assert all(penalizes(Sampling(**penalty)) for penalty in PENALTIES)  # type: ignore[arg-type]
    assert temperature(Sampling(temperature=0.5)) == 1.0
    assert temperature(Sampling(do_sample=True, temperature=0.5)) == 0.5
    kernels = Recording(KERNELS)
    for asked in (neutral, Sampling(do_sample=True), Sampling(typical_p=0.9), Sampling(frequency_penalty=1.0)):
        rows = Rows(1, 16, CPU)
        Sampler(kernels, 0.5, 2.0)(LOGITS.repeat(1, 1), rows, (join(rows, 1, asked),))  # type: ignore[arg-type]
    flags = [(g.any_draws, g.any_cuts, g.any_typical, g.any_penalties) for g in kernels.given]
    assert flags == [(False,) * 4, (True, False, False, False), (False, True, True, False), (False, False, False, True)]
    assert all((given.bias, given.allowed, given.bans) == (None, None, None) for given in kernels.given)
    assert not any(given.any_changes for given in kernels.given[:3]) and kernels.given[3].any_changes
    masks = ({"allowed_token_ids": (1,)}, {"bad_words_ids": ((1,),)}, {"min_new_tokens": 1, "end_token_ids": (1,)})
    for mask in masks:
        rows = Rows(2, 16, CPU)
        index = (join(rows, 1, neutral), join(rows, 2, Sampling(**mask)))  # type: ignore[arg-type]
        Sampler(kernels, 0.5, 2.0)(LOGITS.repeat(2, 1), rows, index)  # type: ignore[arg-type]
        given = kernels.given[-1]
        assert not given.any_penalties and given.bias is None and given.any_changes
        assert (given.allowed is None, given.bans is None) == (
            "allowed_token_ids" not in mask,
            "allowed_token_ids" in mask,
        )
        rows_asking = given.allowed.rows_A if given.allowed is not None else given.bans and given.bans.rows_E
        assert rows_asking.tolist() == [1]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_hardest_cut_leaves_the_best_token(cut: dict[str, float]) -> None:
    kept = distribution(Sampling(do_sample=True, **cut)).isfinite()  # type: ignore[arg-type]
    assert kept.nonzero().flatten().tolist() == [int(LOGITS.argmax())]


def test_a_top_k_beyond_all_vocabularies_keeps_everything() -> None:
    assert distribution(Sampling(do_sample=True, top_k=2**32 - 1)).isfinite().all()


def test_a_row_that_is_not_finite_is_found_in_every_part() -> None:
    choices = [Sampling(do_sample=True, top_k=5 * (i % 2)) for i in range(6)]
    logits = LOGITS.repeat(6, 1)
    logits[2, 7], logits[3, 7] = float("nan"), float("inf")
    rows = Rows(6, 16, CPU)
    index = tuple(join(rows, i, choice) for i, choice in enumerate(choices))
    assert read_out(Sampler(KERNELS, 0.5, 2.0)(logits, rows, index)).not_finite == [2, 3]


def test_of_the_best_tokens_no_more_are_fetched_than_a_row_asks_for_and_there_are() -> None:
    for counts, most in (((0, 2, 0, 3), 3), ((VOCABULARY + 9, 0), VOCABULARY)):
        rows = Rows(len(counts), 16, CPU)
        index = tuple(join(rows, i, Sampling(top_n_tokens=count)) for i, count in enumerate(counts))
        sampled = Sampler(KERNELS, 0.5, 2.0)(LOGITS.repeat(len(counts), 1), rows, index)
        assert sampled.top_counts == counts and sampled.top_ids_AK.shape == (sum(map(bool, counts)), most)
        assert sampled.top_ids_AK[0].tolist() == LOGITS.topk(most).indices.tolist()
        on_host = read_out(sampled)
        assert on_host.top_counts == [min(count, VOCABULARY) for count in counts]
        assert len(on_host.top_ids) == len(on_host.top_logprobs) == sum(on_host.top_counts)


def test_biases_of_different_lengths_stay_with_their_rows() -> None:
    kernels, rows = Recording(KERNELS), Rows(3, 16, CPU)
    biases = ((), ((3, 1.5), (9, -2.0)), ((4, 0.5),))
    index = tuple(join(rows, i, Sampling(logit_bias=bias)) for i, bias in enumerate(biases))
    Sampler(kernels, 0.5, 2.0)(LOGITS.repeat(3, 1), rows, index)  # type: ignore[arg-type]
    bias = kernels.given[0].bias
    assert bias is not None and bias.tokens_RB.tolist() == [[-1, -1], [3, 9], [4, -1]]
    assert bias.values_RB[1].tolist() == [1.5, -2.0] and bias.values_RB[2, 0] == 0.5


def test_a_watermark_follows_the_newest_token_of_its_own_row() -> None:
    rows = Rows(2, 16, CPU)
    index = (join(rows, 1, Sampling()), join(rows, 2, Sampling(watermark=True), [3, 4, 5, 8]))
    logits = LOGITS.repeat(2, 1)
    sampler = Sampler(KERNELS, 0.2, 3.0)
    newest = sampler.before(rows, index, HostMoment)
    rows.history[index[1], 3] = 0  # the token is read before the step's forward pass
    sampler(logits, rows, index, newest)
    expected = LOGITS.clone()
    expected[green_list(8, VOCABULARY, 0.2)] += 3.0
    assert torch.equal(logits[0], LOGITS) and torch.equal(logits[1], expected)
    assert len(green_list(8, VOCABULARY, 0.2)) == 10
    # With TGI's key, the list is the one for which TGI's detectors look.
    seeded = torch.Generator().manual_seed(15485863 * 8)
    assert torch.equal(green_list(8, VOCABULARY, 0.2), torch.randperm(VOCABULARY, generator=seeded)[:10])


def test_a_batch_s_parameters_are_laid_out_once_until_a_row_or_its_parameters_change() -> None:
    kernels, rows = Recording(KERNELS), Rows(3, 16, CPU)
    sampler = Sampler(kernels, 0.5, 2.0)  # type: ignore[arg-type]
    first = (join(rows, 1, Sampling()), join(rows, 2, Sampling(do_sample=True, seed=7)))
    for _ in range(2):
        sampler(LOGITS.repeat(2, 1), rows, first)
    assert kernels.given[0] is kernels.given[1]
    sampler(LOGITS.repeat(1, 1), rows, first[:1])
    rows.leave(2)
    again = join(rows, 3, Sampling(do_sample=True, seed=8))
    assert again == first[1]
    sampler(LOGITS.repeat(2, 1), rows, first)
    assert kernels.given[-1].seeds_R.tolist() == [0, 8]
    other = Rows(3, 16, CPU)
    other_index = (join(other, 1, Sampling()), join(other, 2, Sampling()), join(other, 3, Sampling()))
    sampler(LOGITS.repeat(3, 1), other, other_index)
    assert kernels.given[-1].history is other.history


def test_a_row_with_a_new_request_gets_its_parameters_though_the_step_names_the_same_rows() -> None:
    kernels, rows = Recording(KERNELS), Rows(1, 16, CPU)
    sampler = Sampler(kernels, 0.5, 2.0)  # type: ignore[arg-type]
    for request_id in (1, 2):
        index = (join(rows, request_id, Sampling(do_sample=True, seed=request_id)),)
        sampler(LOGITS.repeat(1, 1), rows, index)
        rows.leave(request_id)
    assert [given.seeds_R.tolist() for given in kernels.given] == [[1], [2]]


@pytest.mark.parametrize("seed", [0, 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_all_64_bits_of_a_seed_reach_the_kernels(seed: int) -> None:
    kernels, rows = Recording(KERNELS), Rows(1, 16, CPU)
    index = (join(rows, 1, Sampling(do_sample=True, seed=seed)),)
    Sampler(kernels, 0.5, 2.0)(LOGITS.repeat(1, 1), rows, index)  # type: ignore[arg-type]
    assert [number % 2**64 for number in kernels.given[0].seeds_R.tolist()] == [seed]


def test_penalties_look_no_further_than_the_longest_row_asks() -> None:
    kernels, rows = Recording(KERNELS), Rows(2, 16, CPU)
    index = (join(rows, 1, Sampling(frequency_penalty=1.0)), join(rows, 2, Sampling()))
    Sampler(kernels, 0.5, 2.0)(LOGITS.repeat(2, 1), rows, index)  # type: ignore[arg-type]
    assert kernels.given[0].history.shape == (3, 4)


@pytest.mark.parametrize("top_n_tokens", [0, 2])
def test_all_results_of_a_step_come_to_the_host_in_one_copy(top_n_tokens: int) -> None:
    """The Triton kernels write their results into one buffer, which is copied as it is."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from text_generation_server.kernels import triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = Rows(3, 16, device)
    index = tuple(join(rows, i, Sampling(top_n_tokens=top_n_tokens)) for i in range(3))
    sampled = Sampler(triton, 0.5, 2.0)(LOGITS.repeat(3, 1).to(device), rows, index)  # type: ignore[arg-type]
    copies: list[Tensor] = []
    on_host = read_out(sampled.moved(lambda tensor: copies.append(tensor) or tensor.cpu().clone()))
    (copied,) = copies
    assert (copied.data_ptr() == sampled.ids_R.data_ptr()) == (top_n_tokens == 0)
    best = LOGITS.log_softmax(0).topk(max(1, top_n_tokens))
    assert on_host.token_ids.tolist() == [int(best.indices[0])] * 3 and not on_host.not_finite
    assert_same(on_host.logprobs, best.values[:1].repeat(3))
    assert on_host.top_ids.tolist() == best.indices[:top_n_tokens].tolist() * 3
    assert_same(on_host.top_logprobs, best.values[:top_n_tokens].repeat(3))


def test_sampled_tokens_are_read_out_row_after_row() -> None:
    top_logprobs = torch.tensor([[-0.1, -2.0, float("-inf")], [-0.5, -1.0, -3.0]])
    sampled = Sampled(
        torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([-0.1, 0.0, -0.5]), torch.tensor([True, False, True]),
        (3, 0, 1), torch.tensor([[7, 1, 2], [9, 3, 4]], dtype=torch.int32), top_logprobs,
    )  # fmt: skip
    moved: list[Tensor] = []
    on_host = read_out(sampled.moved(lambda tensor: moved.append(tensor) or tensor))
    assert len(moved) == 5
    assert (on_host.top_counts, on_host.not_finite) == ([2, 0, 1], [1])
    assert on_host.top_ids.tolist() == [7, 1, 9] and on_host.top_ids.dtype == torch.int32
    assert on_host.top_logprobs.tolist() == torch.tensor([-0.1, -2.0, -0.5]).tolist()
