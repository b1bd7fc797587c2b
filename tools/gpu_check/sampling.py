"""Compares sampling with the reference: the token must be the same, and its log-probability the same within TOLERANCE.

Two tokens whose scores differ only by rounding (less than NEAR) are a near-tie: either is right. Near-ties are counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu_check.comparing import backends, reason
from gpu_check.findings import Context, Finding
from text_generation_server.kernels.interface import Bias, Choices, Chosen
from text_generation_server.kernels.reference import gumbel_noise

TABLE = "Sampling against the reference"
NEAR = 1e-4  # largest difference of scores that rounding can cause
TOLERANCE = 1e-3  # largest accepted difference of log-probabilities
SEED = 2**63 - 5


def neutral(rows: int, length: int, vocabulary: int, device: torch.device) -> Choices:
    """Choices with every option off: greedy rows with random histories."""
    history = torch.randint(0, vocabulary, (rows + 1, length + 8), dtype=torch.int32, device=device)

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    return Choices(
        rows_R=numbers.flip(0).contiguous(), history=history,
        lengths=torch.full((rows + 1,), length, dtype=torch.int32, device=device),
        prompt_lengths_R=column(length // 2, torch.int32), draws_R=column(False, torch.bool),
        seeds_R=SEED - numbers.long() * 7919, temperature_R=column(1, torch.float32), top_k_R=column(0, torch.int32),
        top_p_R=column(1, torch.float32), min_p_R=column(0, torch.float32), typical_p_R=column(1, torch.float32),
        repetition_penalty_R=column(1, torch.float32), frequency_penalty_R=column(0, torch.float32), bias=None,
        any_draws=False, any_penalties=False, any_cuts=False, any_typical=False,
    )  # fmt: skip


def variants(choices: Choices, vocabulary: int) -> Iterator[tuple[str, Choices]]:
    """Sampling parameters to compare: every option alone, then all together. The last row has neutral parameters,
    except that it draws its token, and has a bias if the other rows have one.
    """

    def with_values(base: Choices, **values: float) -> Choices:
        columns: dict[str, Any] = {}
        for name, value in values.items():
            columns[f"{name}_R"] = getattr(base, f"{name}_R").clone()
            columns[f"{name}_R"][:-1] = value
        return replace(base, **columns)

    rows, device = len(choices.rows_R), choices.rows_R.device
    drawing = replace(choices, draws_R=torch.ones_like(choices.draws_R), any_draws=True)
    tokens = torch.randperm(vocabulary, device=device)[:16].int().repeat(rows, 1)
    bias = Bias(tokens, torch.randn(rows, 16, device=device) * 4)
    cutting = replace(drawing, any_cuts=True)
    yield "greedy", choices
    yield "draws", drawing
    yield "temperature", with_values(drawing, temperature=0.7)
    yield "top-k", with_values(cutting, top_k=40)
    yield "top-p", with_values(cutting, top_p=0.9)
    yield "min-p", with_values(cutting, min_p=0.05)
    yield "typical-p", with_values(replace(cutting, any_typical=True), typical_p=0.8)
    yield "repetition penalty", with_values(replace(drawing, any_penalties=True), repetition_penalty=1.3)
    yield "frequency penalty", with_values(replace(drawing, any_penalties=True), frequency_penalty=0.4)
    yield "bias", replace(drawing, bias=bias)
    everything = replace(drawing, bias=bias, any_penalties=True, any_cuts=True, any_typical=True)
    yield "all together", with_values(
        everything, temperature=0.8, top_k=300, top_p=0.95, min_p=0.001, typical_p=0.95, repetition_penalty=1.1,
        frequency_penalty=0.1,
    )  # fmt: skip


def compare_all(context: Context) -> Iterator[Finding]:
    rows, length, vocabulary = (64, 700, 128256) if context.on_gpu else (3, 40, 1000)
    for name, choices in variants(neutral(rows, length, vocabulary, context.device), vocabulary):
        cells = {"option": name, "shape": f"{rows} rows, {vocabulary} tokens"}
        try:
            yield _compare(cells, choices, torch.randn(rows, vocabulary, device=context.device) * 3)
        except Exception as error:  # any error of a kernel is reported as a result of the check
            yield Finding(TABLE, cells, failure=reason(error))


def _compare(cells: Mapping[str, str], choices: Choices, logits: Tensor) -> Finding:
    triton, reference = backends()
    logits[0, 5] = float("nan")
    expected_logits = logits.clone()
    ours = triton.sample(logits, choices)
    theirs = reference.sample(expected_logits, choices)
    scores = expected_logits
    if choices.any_draws:
        positions = choices.lengths[choices.rows_R]
        scores = scores + gumbel_noise(choices.seeds_R, positions, logits.shape[1]) * choices.draws_R.unsqueeze(1)
    others = ours.ids_R != theirs.ids_R
    behind = scores.amax(dim=1) - scores.gather(1, ours.ids_R.long().unsqueeze(1)).squeeze(1)
    wrong = others & ~(behind <= NEAR)
    difference = (ours.logprobs_R - theirs.logprobs_R).abs().masked_fill(others, 0)
    said = {
        "other tokens": str(int(others.sum())),
        "of them near-ties": str(int((others & ~wrong).sum())),
        "largest difference of log-probabilities": f"{float(difference.max()):.1e}",
    }
    return Finding(TABLE, {**cells, **said}, failure=_failure(ours, theirs, int(wrong.sum()), float(difference.max())))


def _failure(ours: Chosen, theirs: Chosen, wrong: int, difference: float) -> str:
    if wrong:
        return f"{wrong} rows chose another token, without a near-tie"
    if not torch.equal(ours.finite_R, theirs.finite_R):
        return "the kernel and the reference disagree about which rows are finite"
    return "" if difference <= TOLERANCE else f"log-probabilities differ by {difference:.1e}"
