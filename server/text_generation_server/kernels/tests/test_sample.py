"""The next token of each row, over all backends, compared with a plain computation in float64.

The interpreter is slow. Where a test needs thousands of draws, the reference draws them, and the interpreter's draws
are only tested to equal the reference's draws."""

import random
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampled_rows import MINUS_INFINITY, VOCABULARY, Row, banned, choices, plain, random_logits, sample
from torch import Tensor

from text_generation_common.cpu_features import NEEDS
from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import Allowed, Bans, Bias, Choices

SUBJECTS = [(name, torch.float32) for name in ("reference", "triton", *(f"cpu_{target}" for target in NEEDS))]
pytestmark = pytest.mark.parametrize("subject", SUBJECTS, indirect=True, ids=[name for name, _ in SUBJECTS])
CPU = torch.device("cpu")
GPU = torch.cuda.is_available()


ALONE = {
    "neutral": Row(), "temperature": Row(temperature=0.6), "top-k": Row(top_k=5), "top-p": Row(top_p=0.7),
    "min-p": Row(min_p=0.1), "typical-p": Row(typical_p=0.6), "repetition": Row(repetition=1.5),
    "repetition that rewards": Row(repetition=0.7), "frequency": Row(frequency=0.8),
    "frequency that rewards": Row(frequency=-0.8), "presence": Row(presence=0.8),
    "presence that rewards": Row(presence=-0.8), "bias": Row(bias=((7, 2.5), (0, -3.0))),
}  # fmt: skip
# The history is 3, 4 in the prompt, and 5, 5, 4, 5 in the output.
MASKS = {
    "allowed": Row(allowed=(12, 5, 0, 5)),
    "single words": Row(words=((5,), (0,))),
    "words after the output": Row(words=((4, 5, 7), (5, 4, 5, 8), (5, 5, 9), (4, 10))),
    "words after the prompt": Row(words=((3, 4, 5, 5, 4, 5, 7), (4, 5, 5, 4, 5, 8), (9, 3, 4, 5, 5, 4, 5, 2))),
    "too short": Row(ends=(1, 6), least=5),
    "long enough": Row(ends=(1, 6), least=4),
    "masks": Row(allowed=(1, 2, 5, 9, 12, 14), words=((2,), (4, 5, 12)), ends=(9,), least=6),
}
COMBINED = Row(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, typical_p=0.9, repetition=1.2, frequency=0.3, presence=0.2,
    words=((6,), (4, 5, 7), (5, 5, 8)), ends=(1,), least=2000, bias=((7, 1.5), (2, 1.0)),
)  # fmt: skip
CASES = {
    **ALONE,
    **MASKS,
    "two": Row(top_k=10, top_p=0.8),
    "combined": COMBINED,
    "best": Row(draws=False, frequency=0.5, top_k=3),
}


def repeated(row: Row, count: int, device: torch.device) -> Choices:
    """Choices of `count` copies of one row, each with another seed."""
    single = choices([row], device)
    columns = {
        field.name: getattr(single, field.name).repeat(count) for field in fields(Choices) if field.name.endswith("_R")
    }
    columns["seeds_R"] = torch.arange(count, device=device) * 7919 - 10**6
    bias = single.bias and Bias(single.bias.tokens_RB.repeat(count, 1), single.bias.values_RB.repeat(count, 1))
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    allowed = single.allowed and Allowed(numbers, single.allowed.tokens_AW.repeat(count, 1))
    return replace(
        single, bias=bias, allowed=allowed, bans=single.bans and repeated_bans(single.bans, count), **columns
    )


def repeated_bans(bans: Bans, count: int) -> Bans:
    numbers = torch.arange(count, dtype=torch.int32, device=bans.tokens_E.device)
    sizes = bans.offsets.diff().repeat(count).cumsum(0, dtype=torch.int32)
    return Bans(
        numbers.repeat_interleave(len(bans.tokens_E)), bans.tokens_E.repeat(count), bans.until_E.repeat(count),
        torch.cat([sizes.new_zeros(1), sizes]), bans.before.repeat(count),
    )  # fmt: skip


def test_every_option_alone_and_with_others_leaves_what_the_plain_computation_leaves(subject: Any) -> None:
    rows = list(CASES.values())
    logits = random_logits(len(rows))
    left, chosen = sample(subject, logits, rows)
    for i, (name, row) in enumerate(CASES.items()):
        expected = plain(logits[i], row)
        logprobs = left[i].double().log_softmax(0)
        assert torch.equal(logprobs.isfinite(), expected.isfinite()), name
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-5)
        picked = int(chosen.ids_R[i])
        assert expected[picked].isfinite() and (row.draws or picked == expected.argmax()), name
        torch.testing.assert_close(chosen.logprobs_R[i].double(), expected[picked], atol=2e-5, rtol=1e-5)


def test_all_backends_choose_the_same_for_random_mixtures(subject: Any) -> None:
    generator = torch.Generator().manual_seed(5)

    def some(most: float) -> float:
        return float(torch.rand((), generator=generator)) * most

    rows = [
        Row(
            draws=i % 4 > 0, seed=i, temperature=0.3 + some(1), top_k=int(some(60)), top_p=some(1.3),
            min_p=max(0, some(0.2) - 0.1), typical_p=some(1.5), repetition=0.5 + some(1), frequency=some(1) - 0.5,
            presence=max(0, some(1) - 0.5), allowed=tuple(range(0, 60, 1 + i % 5)) if i % 2 else (),
            words=((7,), (5, 10), (4, 20))[: i % 4], ends=(0, 30), least=3 + i % 3,
            bias=tuple((j, some(2)) for j in range(i % 3)),
        )
        for i in range(24)
    ]  # fmt: skip
    logits = random_logits(len(rows), vocabulary=70, seed=6)
    expected_left = logits.clone()
    expected = reference.sample(expected_left, choices(rows, logits.device))
    left, chosen = sample(subject, logits, rows)
    assert torch.equal(chosen.ids_R, expected.ids_R)
    torch.testing.assert_close(left, expected_left, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chosen.logprobs_R, expected.logprobs_R, atol=1e-5, rtol=1e-5)


def test_in_a_large_vocabulary_the_choice_is_the_references_but_for_near_ties(subject: Any) -> None:
    """Tokens whose scores differ by less than rounding may change places."""
    count, vocabulary, length = (64, 128_256, 700) if GPU else (3, 1000, 40)
    history = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(3)).tolist()
    options = [COMBINED, Row(draws=False), Row(), Row(top_k=40), Row(top_p=0.9), Row(typical_p=0.8), Row(min_p=0.05)]
    rows = [
        replace(
            options[i % len(options)], seed=2**63 - 5 - 7919 * i, history=tuple(history[i]), prompt_length=length // 2
        )
        for i in range(count)
    ]
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(4)) * 3
    asked = choices(rows, logits.device)
    scores = logits.clone()
    expected = reference.sample(scores, asked)
    positions = asked.lengths[asked.rows_R]
    scores += reference.gumbel_noise(asked.seeds_R, positions, vocabulary) * asked.draws_R.unsqueeze(1)
    _, chosen = sample(subject, logits, rows)
    behind = scores.amax(dim=1) - scores.gather(1, chosen.ids_R.long().unsqueeze(1)).squeeze(1)
    assert (behind <= 1e-4).all()
    same = chosen.ids_R == expected.ids_R
    torch.testing.assert_close(chosen.logprobs_R[same], expected.logprobs_R[same], atol=1e-3, rtol=0)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """P-value of Pearson's chi-square test. Tokens that are expected less than 5 times are counted as one token."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"best", *MASKS} - {"masks"}])
def test_20_000_draws_follow_the_distribution(subject: Any, name: str) -> None:
    """The seeds are fixed, because even a right sampler fails with one of a thousand seeds."""
    draws = 24 if subject.interpreted else 20_000
    logits = random_logits(1, vocabulary=16, seed=9).expand(draws, 16)
    ids = subject.kernels.sample(logits.clone().to(subject.device), repeated(CASES[name], draws, subject.device)).ids_R
    if subject.interpreted:
        assert torch.equal(ids, reference.sample(logits.clone(), repeated(CASES[name], draws, CPU)).ids_R)
        return
    counts = torch.bincount(ids.cpu(), minlength=16).double()
    probabilities = plain(logits[0], CASES[name]).exp()
    assert counts[probabilities == 0].sum() == 0
    assert p_value(counts, probabilities * draws) > 1e-3


def test_draws_at_consecutive_positions_of_one_seed_follow_the_distribution(subject: Any) -> None:
    draws = 24 if subject.interpreted else 20_000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01]).log().expand(draws, 5)
    every_position = replace(
        repeated(Row(), draws, subject.device),
        seeds_R=torch.full((draws,), -(2**63), device=subject.device),
        rows_R=torch.arange(draws, dtype=torch.int32, device=subject.device),
        lengths=torch.arange(draws, dtype=torch.int32, device=subject.device),
    )
    ids = subject.kernels.sample(logits.clone().to(subject.device), every_position).ids_R.cpu()
    if subject.interpreted:
        assert torch.equal(ids, reference.sample(logits.clone(), every_position).ids_R)
    else:
        assert p_value(torch.bincount(ids, minlength=5).double(), logits[0].double().exp() * draws) > 1e-3


def test_the_noise_is_the_hash_of_seed_position_and_token(subject: Any) -> None:
    """Compares with Python's integers, which are unbounded: seeds of both signs and 64 bits, and large positions."""
    for seed, length in ((0, 1), (5, 7), (-(2**63), 3), (2**63 - 1, 900), (123456789123456789, 2)):
        rows = [Row(seed=seed, history=(1,) * length)]
        key = mix(mix(mix(seed & 0xFFFFFFFF) ^ (seed >> 32 & 0xFFFFFFFF)) ^ length)
        noise = []
        for token in range(16):
            bits = mix((mix(key ^ (token * 0x9E3779B1 & 0xFFFFFFFF)) + key) & 0xFFFFFFFF)
            v = torch.tensor((bits + 0.5) / 2**32, dtype=torch.float64)
            noise.append(-(-torch.log1p(-v)).log())
        # The negated noise plus steps of 1e-3: after the noise is added, the largest step decides.
        order = torch.randperm(16, generator=torch.Generator().manual_seed(length))
        logits = (order * 1e-3 - torch.stack(noise)).float().unsqueeze(0)
        assert sample(subject, logits, rows)[1].ids_R.item() == order.argmax()


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize(("size", "vocabulary"), [(70, VOCABULARY), (1030, VOCABULARY), *[(20, 128_256)] * GPU])
def test_a_row_is_the_same_to_the_bit_whatever_the_other_rows_are(subject: Any, size: int, vocabulary: int) -> None:
    rows = [Row(draws=i % 8 == 1, seed=i, temperature=1 + (i % 8 == 1)) for i in range(size)]
    watched = [0, 1, 2, size // 2, size - 7, size - 6, size - 5, size - 1]
    # In the slow interpreter, 1,030 rows get no other options, so that half of the kernels are not launched.
    if size < 1000 or not subject.interpreted:
        special = [COMBINED, Row(top_k=3, seed=8), Row(typical_p=0.5, seed=3), Row(repetition=2.0, seed=4)]
        special += [Row(top_p=0.5, min_p=0.1, seed=9), Row(bias=((3, 4.0),)), COMBINED]
        for i, row in zip(watched, special, strict=False):
            rows[i] = row
    logits = random_logits(size, vocabulary, seed=3)
    left, together = sample(subject, logits, rows)
    for i in watched:
        left_alone, alone = sample(subject, logits[i : i + 1], [rows[i]])
        assert torch.equal(left_alone[0].view(torch.int32), left[i].view(torch.int32))
        assert (alone.ids_R[0], alone.logprobs_R[0]) == (together.ids_R[i], together.logprobs_R[i])


def test_neutral_values_leave_a_row_as_it_is_to_the_bit_whatever_others_ask(subject: Any) -> None:
    logits = random_logits(2)
    logits[0, :6] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e38, -1e38])
    for neutral in (Row(draws=False), Row()):
        left, _ = sample(subject, logits, [neutral, COMBINED])
        assert torch.equal(left[0].view(torch.int32), logits[0].view(torch.int32))
        assert not torch.equal(left[1], logits[1])


def test_a_resumed_row_draws_what_it_would_have_drawn(subject: Any) -> None:
    """A draw depends on position and seed, not on the row, the other rows, or where the prompt ends."""
    logits = random_logits(1).expand(3, VOCABULARY)
    row = Row(seed=42, top_p=0.9)
    before = sample(subject, logits[:1], [row])[1]
    resumed = sample(subject, logits, [Row(seed=1), Row(), replace(row, prompt_length=6, history=(9,) * 6)])[1]
    assert before.ids_R[0] == resumed.ids_R[2]
    elsewhere = [sample(subject, logits[:1], [replace(row, history=(9,) * n)])[1].ids_R.item() for n in range(7, 19)]
    assert len(set(elsewhere)) > 1


def test_equals_are_taken_in_the_order_of_their_ids(subject: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 2.0, 2.0, 0.0, 2.0]]).repeat(6, 1)
    rows = [
        Row(draws=False), Row(top_k=3), Row(top_k=7), Row(top_p=0.35), Row(typical_p=0.35), Row(draws=False, top_k=1)
    ]  # fmt: skip
    left, chosen = sample(subject, logits, rows)
    kept = [row.isfinite().nonzero().flatten().tolist() for row in left]
    assert kept == [list(range(8)), [1, 2, 4], [0, 1, 2, 3, 4, 5, 7], [1, 2], [1, 2], [1]]
    assert chosen.ids_R[0] == 1 and chosen.ids_R[5] == 1


def test_rows_that_are_not_finite_are_named_and_change_no_other_row(subject: Any) -> None:
    clean = random_logits(8)
    poisoned = clean.clone()
    poisoned[1, 3], poisoned[3, 0], poisoned[4, 39] = float("nan"), float("inf"), MINUS_INFINITY
    poisoned[6] = float("nan")
    for row in (Row(draws=False), Row(), COMBINED):
        left, chosen = sample(subject, poisoned, [row] * 8)
        left_clean, chosen_clean = sample(subject, clean, [row] * 8)
        bad = torch.tensor([1, 3, 4, 6])
        assert (~chosen.finite_R).nonzero().flatten().tolist() == bad.tolist() and chosen_clean.finite_R.all()
        assert not left[bad].any() and not chosen.ids_R[bad].any() and not chosen.logprobs_R[bad].any()
        good = chosen.finite_R
        assert torch.equal(left[good], left_clean[good]) and torch.equal(chosen.ids_R[good], chosen_clean.ids_R[good])
        assert torch.equal(chosen.logprobs_R[good], chosen_clean.logprobs_R[good])


def test_a_token_that_a_bias_forbids_is_never_chosen(subject: Any) -> None:
    forbidden = tuple((token, MINUS_INFINITY) for token in range(VOCABULARY) if token not in (8, 30))
    options = [Row(draws=False), Row(), Row(top_k=5), Row(top_p=0.99), Row(min_p=1e-6), Row(typical_p=0.99), COMBINED]
    rows = [replace(row, bias=forbidden, seed=i) for i, row in enumerate(options)]
    left, chosen = sample(subject, random_logits(len(rows)), rows)
    assert set(chosen.ids_R.tolist()) <= {8, 30} and chosen.finite_R.all()
    assert chosen.logprobs_R.isfinite().all() and (left.isfinite().sum(dim=1) <= 2).all()


def test_masks_exclude_exactly_what_a_plain_search_of_the_history_excludes(subject: Any) -> None:
    """A row fails, without an effect on other rows, if its masks exclude every token."""
    rng = random.Random(4)

    def some(most: int, least: int = 1) -> tuple[int, ...]:
        return tuple(rng.choices(range(5), k=rng.randint(least, most)))

    options = (Row(draws=False), Row(), Row(top_k=2), Row(typical_p=0.9), Row(top_p=0.9, min_p=0.01))
    rows = [
        replace(
            rng.choice(options), seed=i, history=some(9), prompt_length=1, allowed=some(7, 0), ends=some(2, 0),
            words=tuple(some(3) for _ in range(rng.randint(0, 4))), least=rng.randint(0, 9),
        )
        for i in range(60)
    ]  # fmt: skip
    logits = random_logits(len(rows), vocabulary=6, seed=12)
    left, chosen = sample(subject, logits, rows)
    for i, row in enumerate(rows):
        expected = (set(row.allowed) or set(range(6))) - banned(row)
        assert bool(chosen.finite_R[i]) == bool(expected)
        if not expected:
            assert not left[i].any() and chosen.ids_R[i] == 0 and chosen.logprobs_R[i] == MINUS_INFINITY
            continue
        kept = set(left[i].isfinite().nonzero().flatten().tolist())
        assert int(chosen.ids_R[i]) in kept <= expected and chosen.logprobs_R[i].isfinite()
        if replace(row, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0) == row:
            assert kept == expected and torch.equal(left[i, list(kept)], logits[i, list(kept)])
    assert 0 < int(chosen.finite_R.sum()) < len(rows)


def test_lists_as_long_as_a_request_may_have_them_leave_the_row_beside_them_alone(subject: Any) -> None:
    history = tuple(i % 7 for i in range(300))
    allowed = tuple(range(1, 1480, 2))
    words = ((*history[40:], 5), *((token,) for token in range(7, 770)))
    rows = [Row(draws=False), Row(allowed=allowed, words=words, history=history), Row(allowed=tuple(range(1024)))]
    logits = random_logits(3, vocabulary=1500, seed=5)
    left, chosen = sample(subject, logits, rows)
    assert torch.equal(left[0], logits[0]) and chosen.finite_R.all()
    for i in (1, 2):
        kept = left[i].isfinite().nonzero().flatten().tolist()
        assert kept == sorted(set(rows[i].allowed) - banned(rows[i]))
        assert torch.equal(left[i, kept], logits[i, kept])
    assert banned(rows[1]) == {5, *range(7, 770)}


def test_the_best_token_survives_the_narrowest_cuts_and_the_coldest_temperature(subject: Any) -> None:
    logits = random_logits(5) * 1e4
    rows = [Row(top_p=0.0), Row(top_p=1e-30), Row(min_p=1.0), Row(top_k=1), Row(temperature=1e-6, top_p=0.5)]
    _, chosen = sample(subject, logits, rows)
    assert torch.equal(chosen.ids_R.long(), logits.argmax(dim=1)) and not chosen.logprobs_R.any()


def test_blocks_and_programs_share_a_row_without_a_seam(subject: Any) -> None:
    """Several programs share a row, and its history is longer than one program reads."""
    if subject.backend != "triton":
        return
    module = import_module("text_generation_server.kernels.triton.sample")
    rows = [COMBINED, Row(draws=False), Row(top_k=17, history=tuple(i % 50 for i in range(1100)), frequency=0.1)]
    logits = random_logits(len(rows), vocabulary=75)
    expected_left, left = logits.clone(), logits.clone().to(subject.device)
    expected = reference.sample(expected_left, choices(rows, logits.device))
    chosen = module.sample_tiled(left, choices(rows, subject.device), 16)
    assert torch.equal(chosen.ids_R.cpu(), expected.ids_R)
    torch.testing.assert_close(left.cpu(), expected_left, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chosen.logprobs_R.cpu(), expected.logprobs_R, atol=1e-5, rtol=1e-5)


def long_rows() -> dict[str, Tensor]:
    """Rows of 603 logits, for cuts that must look at few tokens, at most tokens, or at many equal ones."""
    noise = torch.randn(603, generator=torch.Generator().manual_seed(8))
    banned = noise * 3
    banned[100:500] = -1e9
    return {
        "peaked": noise * 6,
        "usual": noise * 2.5,
        "flat": noise * 0.01,
        "equal": torch.full((603,), -3.5),
        "quantised": (noise * 2).round() / 2,
        "mostly banned": banned,
        "zeros of both signs": torch.where(noise > 0, 0.0, -0.0),
        "huge": noise * 1e30,
    }


LONG_CUTS = [
    Row(top_k=1), Row(top_k=50), Row(top_k=302), Row(top_k=602), Row(top_p=0.1003), Row(top_p=0.9003),
    Row(top_k=90, top_p=0.8003, min_p=0.004), Row(typical_p=0.5003), Row(top_k=70, typical_p=0.7003), Row(min_p=0.3),
    Row(top_p=0.95, min_p=0.03, typical_p=0.9003, temperature=0.7),
]  # fmt: skip


@pytest.mark.parametrize("name", long_rows())
def test_cuts_of_rows_with_many_groups_keep_what_the_sorted_row_keeps(subject: Any, name: str) -> None:
    """Several tiles, with floors that leave few groups, and floors that leave all. Rows have padding behind them."""
    if subject.backend != "triton":
        pytest.skip("the other backends have no groups")
    module = import_module("text_generation_server.kernels.triton.sample")
    logits = long_rows()[name].repeat(len(LONG_CUTS), 1)
    expected_left = logits.clone()
    expected = reference.sample(expected_left, choices(LONG_CUTS, logits.device))
    left = torch.full((len(LONG_CUTS), 604), float("nan"), device=subject.device)[:, :603].copy_(logits)
    chosen = module.sample_tiled(left, choices(LONG_CUTS, subject.device), 256)
    for cut, actual, sorted_row in zip(LONG_CUTS, left.cpu(), expected_left, strict=True):
        assert torch.equal(actual.isfinite(), sorted_row.isfinite()), cut
    torch.testing.assert_close(left.cpu(), expected_left, atol=1e-5, rtol=1e-5)
    assert torch.equal(chosen.ids_R.cpu(), expected.ids_R)
    torch.testing.assert_close(chosen.logprobs_R.cpu(), expected.logprobs_R, atol=1e-5, rtol=1e-5)


def targets_that_ties_reach(logits: Tensor, typical: bool) -> Tensor:
    """For each row a mass that the tokens before some token have to the last bit, as far as float32 can say it."""
    halvings = reference.halvings(logits, logits.amax(dim=1, keepdim=True))
    rank = halvings
    weights = reference.token_weights(halvings)
    if typical:
        mean = (weights * halvings.double()).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        rank = (halvings - mean.float()).abs()
    sums = weights.gather(1, rank.sort(dim=1, stable=True).indices).cumsum(dim=1).double()
    shares = (sums / sums[:, -1:]).float()
    choice = torch.randint(0, logits.shape[1], (len(logits), 1), generator=torch.Generator().manual_seed(2))
    return shares.gather(1, choice).squeeze(1).clamp(max=0.9999)


def test_all_backends_keep_the_same_tokens_where_a_mass_ends_at_a_token_and_tokens_are_equal(subject: Any) -> None:
    """The sums are integers, so no order of summation and no rounding decides."""
    count, vocabulary = (2, 300) if subject.interpreted else (60, 1000)
    noise = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(7))
    kinds = [noise * 3, (noise * 4).round() / 2, noise.bfloat16().float(), torch.full_like(noise, 0.7), noise * 30]
    for logits in kinds:
        likely, typical = targets_that_ties_reach(logits, False), targets_that_ties_reach(logits, True)
        for rows in (
            [Row(top_p=float(p)) for p in likely],
            [Row(typical_p=float(p)) for p in typical],
            [Row(top_k=vocabulary - 9, top_p=float(p), typical_p=float(p)) for p in likely],
        ):
            expected = logits.clone()
            reference.sample(expected, choices(rows, CPU))
            left, _ = sample(subject, logits, rows)
            assert torch.equal(left, expected)


@pytest.mark.parametrize("poison", [float("nan"), 1e9])
def test_what_lies_behind_a_row_is_never_read_as_a_logit(subject: Any, poison: float) -> None:
    rows = [Row(draws=False), Row(), COMBINED, Row(typical_p=0.5), Row(repetition=1.3)]
    logits = random_logits(len(rows), vocabulary=75)
    padded = torch.full((len(rows), 80), poison, device=subject.device)
    left = padded[:, :75].copy_(logits)
    chosen = subject.kernels.sample(left, choices(rows, subject.device))
    expected_left, expected = sample(subject, logits, rows)
    assert torch.equal(chosen.ids_R.cpu(), expected.ids_R) and torch.equal(chosen.finite_R.cpu(), expected.finite_R)
    assert torch.equal(left.cpu(), expected_left)
    # torch sums up rows that are not contiguous in another order.
    torch.testing.assert_close(chosen.logprobs_R.cpu(), expected.logprobs_R, atol=1e-5, rtol=1e-5)
    assert expected.finite_R.all()


@pytest.mark.parametrize("part", [32, 48])
def test_ranks_with_parts_of_the_logits_choose_what_one_rank_with_all_chooses(
    subject: Any, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """The last rank has fewer ids, or none. With the Triton kernels every bit is the same."""
    is_triton = subject.backend == "triton"
    if is_triton:
        monkeypatch.setattr(import_module("text_generation_server.kernels.triton.sample"), "BLOCK", 16)
    rows = [Row(draws=False), Row(seed=4), Row(seed=9, temperature=1.7), Row(seed=2), Row(draws=False)]
    logits = random_logits(len(rows), vocabulary=75)
    logits[3, 70], logits[4, [20, 69]] = float("nan"), 30.0
    own = choices(rows, subject.device)
    padded = F.pad(logits, (0, 3 * part - 75), value=1e9).to(subject.device)
    parts = [
        subject.kernels.reduce_part(padded[:, first:end].contiguous(), own, range(min(first, 75), min(end, 75)))
        for first, end in ((rank * part, (rank + 1) * part) for rank in range(3))
    ]
    assert len({x.shape for x in parts}) == 1 and all(x.is_contiguous() for x in parts)
    merged = subject.kernels.merge_parts(parts, 75)
    _, expected = sample(subject, logits, rows)
    assert torch.equal(merged.ids_R.cpu(), expected.ids_R) and merged.ids_R[4] == 20
    assert merged.finite_R.tolist() == expected.finite_R.tolist() == [True, True, True, False, True]
    if is_triton:
        assert torch.equal(merged.logprobs_R.cpu(), expected.logprobs_R)
    torch.testing.assert_close(merged.logprobs_R.cpu(), expected.logprobs_R, atol=1e-5, rtol=1e-5)


def test_parts_of_a_vocabulary_are_aligned_where_that_costs_little(subject: Any) -> None:
    sizes = [(128_256, 1), (50_257, 1), (128_256, 8), (151_936, 8), (32_000, 2), (50_257, 8), (75, 2)]
    parts = [subject.kernels.vocabulary_part(*size) for size in sizes]
    splits = [subject.kernels.splits_draws(part) for part in parts]
    if subject.backend == "triton":
        assert parts == [128_256, 50_260, 16_384, 20_480, 16_384, 6_284, 40]
        assert splits == [False, False, True, True, True, False, False]
    else:
        assert parts == [128_256, 50_257, 16_032, 18_992, 16_000, 6_283, 38] and not any(splits)
