"""Masks of tokens, over all backends: rows that have a mask, beside rows without one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sampled_rows import MINUS_INFINITY, Row, banned, choices, masks, plain, random_logits, sample
from torch import Tensor

from text_generation_common.cpu_features import NEEDS
from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import WORD_BITS, Choices, Chosen, Masks

SUBJECTS = [(name, torch.float32) for name in ("reference", "triton", *(f"cpu_{target}" for target in NEEDS))]
pytestmark = pytest.mark.parametrize("subject", SUBJECTS, indirect=True, ids=[name for name, _ in SUBJECTS])
VOCABULARY = 75  # three words, of which the last has 11 tokens
EVERYTHING = Row(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, typical_p=0.9, repetition=1.2, frequency=0.3, presence=0.2,
    words=((6,), (4, 5, 7)), ends=(1,), least=2000, bias=((7, 1.5), (2, 1.0)),
)  # fmt: skip
OPTIONS = [
    Row(draws=False), Row(), Row(temperature=0.6), Row(draws=False, repetition=1.5, frequency=0.3, presence=0.2),
    Row(top_k=3), Row(top_k=30), Row(top_p=0.7), Row(min_p=0.1), Row(typical_p=0.6), Row(top_k=40, typical_p=0.3),
    Row(bias=((9, 3.0), (12, -2.0))), Row(allowed=(2, 6, 9, 12, 33, 34, 35, 70)), Row(words=((9,), (5, 33))),
    EVERYTHING, replace(EVERYTHING, allowed=tuple(range(0, 75, 3))),
]  # fmt: skip
# Few tokens and most tokens, because the C kernels go over them in two ways; masks of 32 and 64 tokens fill words.
MASKS = [
    (9,), (2, 6, 9, 33, 70), (0, 31, 32, 63, 64, 74), tuple(range(2, 75, 5)), tuple(range(6, 75)),
    tuple(i for i in range(75) if i != 10), tuple(range(32)), tuple(range(2, 66)),
]  # fmt: skip


def sample_with(subject: Any, logits: Tensor, asked: Choices) -> tuple[Tensor, Chosen]:
    left = logits.clone().to(subject.device)
    chosen = subject.kernels.sample(left, asked)
    return left.cpu(), Chosen(chosen.ids_R.cpu(), chosen.logprobs_R.cpu(), chosen.finite_R.cpu())


def assert_equal_bits(ours: tuple[Tensor, Chosen], theirs: tuple[Tensor, Chosen], rows: Any = slice(None)) -> None:
    for mine, other in zip((ours[0], ours[1].logprobs_R), (theirs[0], theirs[1].logprobs_R), strict=True):
        assert torch.equal(mine[rows].view(torch.int32), other[rows].view(torch.int32))
    assert torch.equal(ours[1].ids_R[rows], theirs[1].ids_R[rows])
    assert torch.equal(ours[1].finite_R[rows], theirs[1].finite_R[rows])


def test_a_masked_row_draws_from_what_a_plain_computation_leaves(subject: Any) -> None:
    rows = [replace(row, mask=mask, seed=i) for i, row in enumerate(OPTIONS) for mask in MASKS]
    rows = rows[::7] if subject.interpreted else rows  # the interpreter is slow
    logits = random_logits(len(rows), VOCABULARY, seed=1)
    left, chosen = sample(subject, logits, rows)
    expected_ids = reference.sample(logits.clone(), choices(rows, logits.device)).ids_R
    empty = 0
    for i, row in enumerate(rows):
        expected = plain(logits[i], row) if left_of(row) else torch.full((VOCABULARY,), MINUS_INFINITY)
        if not expected.isfinite().any():
            empty += 1
            assert not chosen.finite_R[i] and chosen.logprobs_R[i] == MINUS_INFINITY and not left[i].any(), row
            continue
        logprobs = left[i].double().log_softmax(0)
        assert torch.equal(logprobs.isfinite(), expected.isfinite()), row
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
        picked = int(chosen.ids_R[i])
        assert chosen.finite_R[i] and picked == expected_ids[i] and (row.draws or picked == expected.argmax()), row
        torch.testing.assert_close(chosen.logprobs_R[i].double(), expected[picked], atol=2e-5, rtol=1e-5)
    assert empty < len(rows) // 4


def left_of(row: Row) -> set[int]:
    tokens = (set(row.allowed) or set(range(VOCABULARY))) - banned(row)
    return tokens if row.mask is None else tokens & set(row.mask)


@pytest.mark.parametrize("vocabulary", [75, 96, 1003])
def test_a_mask_of_ones_changes_no_bit(subject: Any, vocabulary: int) -> None:
    rows = [replace(row, seed=i) for i, row in enumerate(OPTIONS)]
    rows = rows[1::3] if subject.interpreted else rows
    logits = random_logits(len(rows), vocabulary, seed=2)
    free = choices(rows, subject.device)
    ones = torch.full((len(rows), -(-vocabulary // WORD_BITS)), -1, dtype=torch.int32, device=subject.device)
    every_row = torch.arange(len(rows), dtype=torch.int32, device=subject.device)
    masked = replace(free, masks=Masks(every_row, ones))
    assert_equal_bits(sample_with(subject, logits, masked), sample_with(subject, logits, free))


@pytest.mark.parametrize("options", [[Row(draws=False), Row(), Row(temperature=0.7)], OPTIONS], ids=["draws", "all"])
def test_masks_change_no_bit_of_the_rows_beside_them(subject: Any, options: list[Row]) -> None:
    free = [replace(options[i % len(options)], seed=i) for i in range(8 if subject.interpreted else 17)]
    masked = [replace(row, mask=MASKS[i % len(MASKS)] if i % 3 == 1 else None) for i, row in enumerate(free)]
    logits = random_logits(len(free), VOCABULARY, seed=3)
    beside = [i for i in range(len(free)) if i % 3 != 1]
    ours, theirs = sample(subject, logits, masked), sample(subject, logits, free)
    assert_equal_bits(ours, theirs, beside)
    assert not torch.equal(ours[0], theirs[0])
    # A masked row has the same bits alone as among others.
    for i in (1, 4):
        alone = sample(subject, logits[i : i + 1], [masked[i]])
        assert_equal_bits((ours[0][i : i + 1], at(ours[1], i)), alone)


def at(chosen: Chosen, i: int) -> Chosen:
    return Chosen(chosen.ids_R[i : i + 1], chosen.logprobs_R[i : i + 1], chosen.finite_R[i : i + 1])


def test_bits_and_words_behind_the_vocabulary_are_not_used(subject: Any) -> None:
    rows = [replace(Row(seed=i), mask=mask) for i, mask in enumerate(MASKS)]
    logits = random_logits(len(rows), VOCABULARY, seed=4)
    asked = choices(rows, subject.device)
    clean = masks(rows, subject.device, words=3)
    assert clean is not None
    dirty = torch.full((len(rows), 7), -1, dtype=torch.int32, device=subject.device)
    dirty[:, :3] = clean.bits_MW
    dirty[:, 2] |= -1 << VOCABULARY % WORD_BITS
    expected = sample_with(subject, logits, replace(asked, masks=clean))
    # The second has rows that lie apart, in words that other rows may use.
    for bits in (dirty, torch.cat([dirty, ~dirty], dim=1)[:, :7]):
        room = torch.full((len(rows), 96), 7.0, device=subject.device)
        room[:, :VOCABULARY] = logits
        chosen = subject.kernels.sample(room[:, :VOCABULARY], replace(asked, masks=Masks(clean.rows_M, bits)))
        assert torch.equal(room[:, :VOCABULARY].cpu(), expected[0]) and (room[:, 76:] == 7).all()
        assert torch.equal(chosen.ids_R.cpu(), expected[1].ids_R)
        # torch sums up rows that are not contiguous in another order.
        torch.testing.assert_close(chosen.logprobs_R.cpu(), expected[1].logprobs_R, atol=1e-5, rtol=1e-5)


def test_of_a_single_token_every_option_draws_this_token_with_certainty(subject: Any) -> None:
    rows = [replace(row, allowed=(), words=(), ends=(), mask=(7 * i % VOCABULARY,)) for i, row in enumerate(OPTIONS)]
    left, chosen = sample(subject, random_logits(len(rows), VOCABULARY, seed=5), rows)
    assert chosen.ids_R.tolist() == [7 * i % VOCABULARY for i in range(len(rows))]
    assert chosen.finite_R.all() and not chosen.logprobs_R.any()
    assert left.isfinite().sum(dim=1).tolist() == [1] * len(rows)


def test_a_row_without_a_token_fails_alone_and_is_told_from_a_row_that_is_not_finite(subject: Any) -> None:
    """Whichever masks exclude the tokens together. A logit that is not finite counts where its token is excluded."""
    clean = [replace(OPTIONS[i % len(OPTIONS)], seed=i, allowed=(), words=(), ends=()) for i in range(12)]
    rows = list(clean)
    rows[1] = replace(rows[1], mask=())
    rows[3] = replace(rows[3], mask=(2, 3), allowed=(4, 5))
    rows[4] = replace(rows[4], mask=tuple(range(75)), allowed=(2, 3), words=((2,), (3,)))
    rows[6] = replace(rows[6], mask=(2, 3), ends=(2, 3), least=9)
    rows[8] = replace(rows[8], mask=(30, 31))
    rows[9] = replace(rows[9], mask=())
    rows[10] = replace(rows[10], mask=tuple(range(70)))
    logits = random_logits(len(rows), VOCABULARY, seed=6)
    poisoned = logits.clone()
    poisoned[8, 2], poisoned[9, 3], poisoned[10, 74] = float("nan"), float("inf"), MINUS_INFINITY
    ours, theirs = sample(subject, poisoned, rows), sample(subject, logits, clean)
    left, chosen = ours
    empty, not_finite = [1, 3, 4, 6], [8, 9, 10]
    bad = sorted(empty + not_finite)
    assert (~chosen.finite_R).nonzero().flatten().tolist() == bad
    assert not left[bad].any() and not chosen.ids_R[bad].any()
    assert chosen.logprobs_R[empty].tolist() == [MINUS_INFINITY] * 4 and not chosen.logprobs_R[not_finite].any()
    assert_equal_bits(ours, theirs, [i for i in range(len(rows)) if i not in bad])


def test_in_a_large_vocabulary_masked_rows_draw_what_the_reference_draws(subject: Any) -> None:
    vocabulary = 1500
    generator = torch.Generator().manual_seed(7)
    shares = torch.linspace(0.001, 1, 8 if subject.interpreted else 24).tolist()
    rows = [
        replace(
            OPTIONS[i % len(OPTIONS)], seed=i, words=(), ends=(), allowed=(),
            mask=(i, *(torch.rand(vocabulary, generator=generator) < share).nonzero().flatten().tolist()),
        )
        for i, share in enumerate(shares)
    ]  # fmt: skip
    logits = random_logits(len(rows), vocabulary, seed=8)
    expected_left = logits.clone()
    expected = reference.sample(expected_left, choices(rows, logits.device))
    left, chosen = sample(subject, logits, rows)
    assert torch.equal(chosen.ids_R, expected.ids_R) and chosen.finite_R.all()
    assert torch.equal(left.isfinite(), expected_left.isfinite())
    torch.testing.assert_close(chosen.logprobs_R, expected.logprobs_R, atol=1e-5, rtol=1e-5)
