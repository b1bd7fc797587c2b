"""Masks of a step's tokens, from the sampler's argument to the kernels."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from sampled_rows import Recording

from text_generation_common.sampling import Sampling
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import reference, select_backend
from text_generation_server.kernels.interface import Kernels, Masks
from text_generation_server.sampling.sampler import SampledOnHost, Sampler, read_out
from text_generation_server.step.rows import PromptChunk, Rows
from text_generation_server.step.warmup import all_allowed

VOCABULARY = 50
CPU = torch.device("cpu")
KERNELS = select_backend(CPU).kernels
LOGITS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
HISTORY = torch.tensor([3, 4, 5, 5], dtype=torch.int32)


def joined(choices: list[Sampling]) -> tuple[Rows, tuple[int, ...]]:
    rows = Rows(len(choices), 16, CPU)
    chunks = (PromptChunk(i, 0, 4, True, HISTORY, HISTORY, 2, choice) for i, choice in enumerate(choices))
    return rows, tuple(rows.join(chunk) for chunk in chunks)


def masks_of(tokens: dict[int, list[int]]) -> Masks:
    """The rows in the order of the dictionary."""
    bits = [[sum(1 << i for i in own if i < 32), sum(1 << i - 32 for i in own if i >= 32)] for own in tokens.values()]
    words = torch.tensor(bits, dtype=torch.int64).int()
    return Masks(torch.tensor(list(tokens), dtype=torch.int32), words)


def sampled_with(choices: list[Sampling], masks: Masks | None, kernels: Any = KERNELS) -> SampledOnHost:
    rows, index = joined(choices)
    return read_out(Sampler(kernels, 0.5, 2.0)(LOGITS.repeat(len(choices), 1), rows, index, masks=masks))


def test_masks_join_the_choices_of_their_step_alone() -> None:
    """A step without masks makes the calls that it made before there were masks, with the plan's own choices."""
    kernels = Recording(KERNELS)
    rows, index = joined([Sampling(), Sampling(do_sample=True, seed=3)])
    sampler = Sampler(cast(Kernels, kernels), 0.5, 2.0)
    masks = masks_of({1: [4, 40]})
    for given in (None, masks, None):
        sampler(LOGITS.repeat(2, 1), rows, index, masks=given)
    first, masked, last = kernels.given
    assert first is last and first.masks is None and not first.any_changes
    assert masked.masks is masks and masked.any_changes and replace(masked, masks=None) == first


@pytest.mark.parametrize("count", [5, 60])
def test_sorted_rows_keep_their_masks_in_their_blocks(count: int) -> None:
    """Some blocks have no mask, and the masks are in another order than the rows."""
    choices = [Sampling(do_sample=True, seed=i, top_k=5 * (i % 3)) for i in range(count)]
    asked = {i: [i % VOCABULARY, (i * 7 + 3) % VOCABULARY] for i in range(0, count, 4) if not 16 <= i < 48}
    masks = masks_of(dict(reversed(asked.items())))
    kernels = Recording(cast(Kernels, reference), sorts=True)
    in_blocks = sampled_with(choices, masks, kernels)
    assert len(kernels.given) > 1
    assert sum(len(given.masks.rows_M) for given in kernels.given if given.masks is not None) == len(asked)
    if count > 5:
        assert any(given.masks is None for given in kernels.given)
    together = sampled_with(choices, masks, reference)
    free = sampled_with(choices, None, reference)
    assert torch.equal(in_blocks.token_ids, together.token_ids)
    torch.testing.assert_close(in_blocks.logprobs, together.logprobs)
    for i, token in enumerate(in_blocks.token_ids.tolist()):
        assert token in asked[i] if i in asked else token == free.token_ids[i]


def test_a_row_with_a_grammar_is_sampled_from_all_logits_on_one_rank() -> None:
    """Other ranks have no masks, and know the rows' parameters only."""
    sampler, group = Sampler(cast(Kernels, Recording(KERNELS)), 0.5, 2.0), Group(0, 2, Alone())
    for choices, in_parts in (([Sampling(), Sampling()], True), ([Sampling(), Sampling(grammar="{}")], False)):
        rows, index = joined(choices)
        assert sampler.works_on_parts(rows, index, group, 4096) == in_parts
        assert sampler.constrained(rows, index) == (() if in_parts else (1,))


def test_a_row_without_a_token_is_told_from_a_row_that_is_not_finite() -> None:
    rows, index = joined([Sampling(), Sampling(allowed_token_ids=(3, 4)), Sampling(), Sampling()])
    logits = LOGITS.repeat(4, 1)
    logits[2, 40] = float("nan")
    sampled = read_out(Sampler(KERNELS, 0.5, 2.0)(logits, rows, index, masks=masks_of({1: [5], 2: [5], 3: [7]})))
    assert sampled.not_finite == [1, 2] and sampled.without_token == [1]
    assert sampled.token_ids.tolist() == [int(LOGITS.argmax()), 0, 0, 7]


def test_the_most_likely_tokens_of_a_masked_row_are_tokens_of_its_mask() -> None:
    sampled = sampled_with([Sampling(top_n_tokens=5), Sampling(top_n_tokens=2)], masks_of({0: [2, 9, 44]}))
    assert sampled.top_counts == [3, 2] and set(sampled.top_ids[:3].tolist()) == {2, 9, 44}
    assert sampled.top_ids[3:].tolist() == LOGITS.topk(2).indices.tolist()


def test_the_masks_of_a_warm_up_exclude_no_token() -> None:
    choices = [Sampling(do_sample=True, seed=i, top_k=9 * (i % 2)) for i in range(4)]
    masked, free = sampled_with(choices, all_allowed([0, 2, 3], VOCABULARY, CPU)), sampled_with(choices, None)
    assert torch.equal(masked.token_ids, free.token_ids) and torch.equal(masked.logprobs, free.logprobs)
