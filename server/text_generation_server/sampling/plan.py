"""Turns the parameters of a step's rows into the kernels' arguments: columns on the device, made once for a batch, and
what rows ask of single tokens. A step whose rows ask for nothing sends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from text_generation_common.sampling import Sampling
from text_generation_server.device.transfers import send
from text_generation_server.kernels.interface import Allowed, Bans, Bias, Choices, Masks
from text_generation_server.step.parameters import (
    RowParameters,
    TokenLists,
    cuts,
    log_min_p,
    penalizes,
    repetition_penalty,
    signed_seed,
    temperature,
)
from text_generation_server.step.rows import Rows

# Most rows that are sorted at a time: with a large vocabulary, a row takes about 25 ms.
SORTED_ROWS = 16
LARGEST_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of a step that are sampled by one call of the kernel."""

    where: Tensor | None  # int32: indices of the rows within the step; None: all rows of the step
    rows: list[int]
    choices: Choices

    def own_masks(self, masks: Masks, count: int) -> Masks | None:
        """The masks of a step that belong to rows of this block, with indices within the block. The step has
        `count` rows. Waits for the device if the block has not all of them."""
        if self.where is None:
            return masks
        places_R = torch.full((count,), -1, dtype=torch.int32, device=self.where.device)
        places_R[self.where] = torch.arange(len(self.rows), dtype=torch.int32, device=self.where.device)
        places_M = places_R[masks.rows_M]
        is_own_M = places_M >= 0
        rows_M = places_M[is_own_M]
        return Masks(rows_M, masks.bits_MW[is_own_M]) if len(rows_M) else None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the rows of `index` choose their next tokens. Valid until `parameters` change."""

    index: tuple[int, ...]
    parameters: RowParameters
    version: int
    blocks: tuple[RowBlock, ...]
    watermarked: tuple[int, ...]  # indices of the rows that have a watermark, within the step
    constrained: tuple[int, ...]  # indices of the rows that have a grammar: their masks come with each step
    top_counts: tuple[int, ...]  # number of most likely tokens that each row asks for
    top_where: Tensor | None  # int32: indices, within the step, of the rows that ask for most likely tokens

    @property
    def only_draws(self) -> bool:
        """Whether the tokens depend on temperature and noise only, and no row asks for more than its token."""
        if self.watermarked or self.constrained or self.top_where is not None or len(self.blocks) != 1:
            return False
        choices = self.blocks[0].choices
        return not choices.any_changes and not choices.any_cuts

    def holds_for(self, rows: Rows, index: tuple[int, ...]) -> bool:
        same_parameters = self.parameters is rows.parameters and self.version == rows.parameters.version
        return same_parameters and self.index == index


def make_plan(rows: Rows, index: tuple[int, ...], sorts: bool) -> SamplingPlan:
    """`sorts`: whether the kernels sort rows that ask for a cut."""
    parameters = [rows.parameters.of_row[row] for row in index]
    counts = tuple(p.top_n_tokens for p in parameters)
    asking = [i for i, count in enumerate(counts) if count]
    return SamplingPlan(
        index=index,
        parameters=rows.parameters,
        version=rows.parameters.version,
        blocks=tuple(_block(rows, index, where) for where in _split(parameters, sorts)),
        watermarked=tuple(i for i, p in enumerate(parameters) if p.watermark),
        constrained=tuple(i for i, p in enumerate(parameters) if p.grammar),
        top_counts=counts,
        top_where=_int32(asking, rows.device) if asking else None,
    )


def _split(parameters: list[Sampling], sorts: bool) -> list[list[int]]:
    """Splits the rows for calls of the kernel. Rows that must be sorted are split into blocks, so that progress is
    reported after each block.
    """
    if not sorts:
        return [list(range(len(parameters)))]
    sorted_rows = [i for i, p in enumerate(parameters) if cuts(p)]
    others = [i for i, p in enumerate(parameters) if not cuts(p)]
    blocks = [sorted_rows[first : first + SORTED_ROWS] for first in range(0, len(sorted_rows), SORTED_ROWS)]
    return [*blocks, others] if others else blocks


def _block(rows: Rows, index: tuple[int, ...], where: list[int]) -> RowBlock:
    own = [index[i] for i in where]
    choices = _choices(rows, own)
    return RowBlock(None if len(own) == len(index) else _int32(where, rows.device), own, choices)


def _choices(rows: Rows, index: list[int]) -> Choices:
    parameters = [rows.parameters.of_row[row] for row in index]
    prompt_lengths = [rows.parameters.prompt_length[row] for row in index]
    floats = [
        [
            temperature(p), p.top_p, log_min_p(p), p.typical_p, repetition_penalty(p), p.frequency_penalty,
            p.presence_penalty,
        ]
        for p in parameters
    ]  # fmt: skip
    ints = np.array(
        [index, prompt_lengths, [min(p.top_k, LARGEST_INT32) for p in parameters], [p.do_sample for p in parameters]],
        np.int32,
    )
    seeds = np.array([signed_seed(p) for p in parameters], np.int64)
    words = [*ints, *np.array(floats, np.float32).T, seeds]
    sent = send([np.ascontiguousarray(column).view(np.int32) for column in words], rows.device)
    rows_R, prompt_lengths_R, top_k_R, draws_R = sent[:4]
    temperature_R, top_p_R, log_min_p_R, typical_p_R, repetition_R, frequency_R, presence_R = (
        c.view(torch.float32) for c in sent[4:11]
    )
    lists = [rows.parameters.lists[row] for row in index]
    return Choices(
        rows_R=rows_R, history=rows.history, lengths=rows.lengths, prompt_lengths_R=prompt_lengths_R,
        draws_R=draws_R != 0, seeds_R=sent[11].view(torch.int64), temperature_R=temperature_R, top_k_R=top_k_R,
        top_p_R=top_p_R, log_min_p_R=log_min_p_R, typical_p_R=typical_p_R, repetition_penalty_R=repetition_R,
        frequency_penalty_R=frequency_R, presence_penalty_R=presence_R, bias=bias_of(lists, rows.device),
        allowed=allowed_of(lists, rows.device), bans=bans_of(lists, rows.device),
        any_draws=any(p.do_sample for p in parameters), any_penalties=any(penalizes(p) for p in parameters),
        any_cuts=any(cuts(p) for p in parameters), any_typical=any(p.typical_p < 1.0 for p in parameters),
    )  # fmt: skip


def _int32(values: Sequence[int], device: torch.device) -> Tensor:
    return send([np.array(values, np.int32)], device)[0]


Lists = Sequence[TokenLists | None]  # the lists of each row


def bias_of(lists: Lists, device: torch.device) -> Bias | None:
    widest = max((len(own.bias_tokens) for own in lists if own), default=0)
    if not widest:
        return None
    tokens = np.full((len(lists), widest), -1, np.int32)
    values = np.zeros((len(lists), widest), np.float32)
    for i, own in enumerate(lists):
        if own:
            tokens[i, : len(own.bias_tokens)], values[i, : len(own.bias_values)] = own.bias_tokens, own.bias_values
    there = send([tokens.ravel(), values.view(np.int32).ravel()], device)
    return Bias(there[0].view(tokens.shape), there[1].view(torch.float32).view(tokens.shape))


def allowed_of(lists: Lists, device: torch.device) -> Allowed | None:
    asking = [(i, own.allowed) for i, own in enumerate(lists) if own and len(own.allowed)]
    if not asking:
        return None
    tokens = np.full((len(asking), max(len(allowed) for _, allowed in asking)), -1, np.int32)
    for a, (_, allowed) in enumerate(asking):
        tokens[a, : len(allowed)] = allowed
    rows, listed = send([np.array([i for i, _ in asking], np.int32), tokens.ravel()], device)
    return Allowed(rows, listed.view(tokens.shape))


def bans_of(lists: Lists, device: torch.device) -> Bans | None:
    asking = [(i, own) for i, own in enumerate(lists) if own and len(own.banned)]
    if not asking:
        return None
    rows = np.repeat(np.array([i for i, _ in asking], np.int32), [len(own.banned) for _, own in asking])
    columns = [(own.banned, own.until, own.sizes, own.before) for _, own in asking]
    tokens, until, sizes, before = map(np.concatenate, zip(*columns, strict=True))
    offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
    return Bans(*send([rows, tokens, until, offsets, before], device))
