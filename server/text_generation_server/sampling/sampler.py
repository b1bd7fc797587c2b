"""Samples the next tokens of a step's rows from their logits. Waits for the device only if a row has a watermark, and
then not for this step but for the step before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from text_generation_common import faults
from text_generation_server.device.transfers import Moment, fetch, send
from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Chosen, Kernels, Masks
from text_generation_server.sampling.plan import RowBlock, SamplingPlan, make_plan
from text_generation_server.step.results import Pending
from text_generation_server.step.rows import Rows

NO_TOP_IDS, NO_TOP_LOGPROBS = torch.empty((0, 0), dtype=torch.int32), torch.empty((0, 0))
MINUS_INFINITY = float("-inf")
NO_IDS, NO_LOGPROBS = torch.empty(0, dtype=torch.int32), torch.empty(0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """R sampled tokens, and the most likely tokens of the A rows that asked for them."""

    ids_R: Tensor  # int32
    logprobs_R: Tensor  # float32, in the distribution from which the token was drawn
    finite_R: Tensor  # bool; like the logprobs, as in `Chosen`
    top_counts: tuple[int, ...]  # number of most likely tokens that each row asked for
    top_ids_AK: Tensor  # int32 [A, K]; K is the largest of top_counts
    top_logprobs_AK: Tensor  # float32; minus infinity for excluded tokens

    words: Tensor | None = None  # the first three in one buffer, as in `Chosen`

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Sampled":
        """Applies `move`, such as a copy to the host, to every tensor; only once if the results have a buffer."""
        tops = self.top_ids_AK, self.top_logprobs_AK
        if self.words is None:
            ids, logprobs, finite = map(move, (self.ids_R, self.logprobs_R, self.finite_R))
            return Sampled(ids, logprobs, finite, self.top_counts, *map(move, tops))
        packed = self.words.view(-1)
        if self.top_ids_AK.numel():
            packed = torch.cat([packed, *(top.view(torch.int32).view(-1) for top in tops)])
        words, top_ids, top_logprobs = torch.split(move(packed), [self.words.numel(), *(top.numel() for top in tops)])
        chosen = Chosen.in_words(words.view_as(self.words), len(self.ids_R))
        shape = self.top_ids_AK.shape
        return Sampled(
            ids_R=chosen.ids_R,
            logprobs_R=chosen.logprobs_R,
            finite_R=chosen.finite_R,
            top_counts=self.top_counts,
            top_ids_AK=top_ids.view(shape),
            top_logprobs_AK=top_logprobs.view(torch.float32).view(shape),
            words=chosen.words,
        )


@dataclass(frozen=True, slots=True)
class SampledOnHost:
    token_ids: Tensor  # int32
    logprobs: Tensor  # float32
    top_counts: list[int]  # number of most likely tokens of each row
    top_ids: Tensor  # int32, row after row
    top_logprobs: Tensor  # float32
    not_finite: list[int]  # rows whose results are invalid: a logit was NaN or infinite, or no token is left
    without_token: list[int]  # the rows of `not_finite` whose logits were finite: no token is left


def read_out(sampled: Sampled) -> SampledOnHost:
    """Converts a result whose tensors are on the host. Leaves out most likely tokens that were excluded."""
    top_counts = list(sampled.top_counts)
    top_ids, top_logprobs = NO_IDS, NO_LOGPROBS
    asking = [i for i, count in enumerate(top_counts) if count]
    if asking:
        top_ids, top_logprobs = sampled.top_ids_AK.flatten(), sampled.top_logprobs_AK.flatten()
        possible = sampled.top_logprobs_AK.isfinite().sum(dim=1).tolist()
        for i, most in zip(asking, possible, strict=True):
            top_counts[i] = min(top_counts[i], most)
        taken_A1 = torch.tensor([top_counts[i] for i in asking], dtype=torch.int64).unsqueeze(1)
        taken = (torch.arange(sampled.top_ids_AK.shape[1]) < taken_A1).flatten()
        top_ids, top_logprobs = top_ids[taken], top_logprobs[taken]
    finite = sampled.finite_R.tolist()
    not_finite = [] if all(finite) else [i for i, is_finite in enumerate(finite) if not is_finite]
    without_token = [i for i in not_finite if sampled.logprobs_R[i] == MINUS_INFINITY]
    return SampledOnHost(
        token_ids=sampled.ids_R,
        logprobs=sampled.logprobs_R,
        top_counts=top_counts,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        not_finite=not_finite,
        without_token=without_token,
    )


class Sampler:
    """In a group, rank 0 samples from the logits of all ids; or, where no row needs more than that, each rank reduces
    the logits of its own part of the vocabulary, and rank 0 merges the results, which are much smaller."""

    def __init__(
        self,
        kernels: Kernels,
        watermark_gamma: float,
        watermark_delta: float,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called between blocks of rows, where the kernels sort rows, to report progress."""
        self._kernels = kernels
        self._on_progress = on_progress
        self._gamma = watermark_gamma
        self._delta = watermark_delta
        self._plan: SamplingPlan | None = None  # the plan of the last step, which usually fits the next step too

    def before(self, rows: Rows, index: tuple[int, ...], mark: Callable[[], Moment]) -> Pending[list[int]] | None:
        """The newest tokens of the rows of `index` that have a watermark, if any has one. To be called before the
        step's forward pass is launched. `mark` is the platform's."""
        plan = self._plan_for(rows, index)
        return newest_tokens(rows, tuple(index[i] for i in plan.watermarked), mark) if plan.watermarked else None

    def constrained(self, rows: Rows, index: tuple[int, ...]) -> tuple[int, ...]:
        """The places within `index` of the rows that have a grammar, which need a mask at each step."""
        return self._plan_for(rows, index).constrained

    def __call__(
        self,
        logits_RV: Tensor,
        rows: Rows,
        index: tuple[int, ...],
        newest: Pending[list[int]] | None = None,
        masks: Masks | None = None,
    ) -> Sampled:
        """Samples one token for each row of `index`, in the order of the logits. May overwrite the logits. `newest` is
        the result of `before`. The rows of `masks` are places within `index`."""
        plan = self._plan_for(rows, index)
        logits = logits_RV.float()
        if plan.watermarked:
            assert newest is not None
            self._watermark(logits, plan, newest)
        if len(plan.blocks) == 1:
            chosen = self._choose(logits, rows, plan.blocks[0], masks)
        else:
            chosen = self._choose_in_blocks(logits, rows, plan.blocks, masks)
        top_ids, top_logprobs = _top_tokens(logits, plan)
        tops = plan.top_counts, top_ids, top_logprobs
        return Sampled(chosen.ids_R, chosen.logprobs_R, chosen.finite_R, *tops, chosen.words)

    def works_on_parts(self, rows: Rows, index: tuple[int, ...], group: Group, part: int) -> bool:
        """Whether `sample_parts` serves the rows of `index`. Depends on the rows' parameters only, so all ranks of a
        group decide alike. `part` is the number of ids of each rank, with padding."""
        return group.size > 1 and self._kernels.splits_draws(part) and self._plan_for(rows, index).only_draws

    def sample_parts(
        self, logits_RV: Tensor, ids: range, vocab_size: int, rows: Rows, index: tuple[int, ...], group: Group
    ) -> Sampled | None:
        """As a call of the sampler, on rank 0, with the same bits; None on other ranks. `logits_RV` are the logits of
        this rank's ids, with padding. All ranks must call it."""
        plan = self._plan_for(rows, index)
        parts = group.gather(self._kernels.reduce_part(logits_RV, plan.blocks[0].choices, ids))
        if parts is None:
            return None
        chosen = self._kernels.merge_parts(parts, vocab_size)
        tops = plan.top_counts, NO_TOP_IDS, NO_TOP_LOGPROBS
        return Sampled(chosen.ids_R, chosen.logprobs_R, chosen.finite_R, *tops, chosen.words)

    def _plan_for(self, rows: Rows, index: tuple[int, ...]) -> SamplingPlan:
        plan = self._plan
        if plan is None or not plan.holds_for(rows, index):
            plan = self._plan = make_plan(rows, index, self._kernels.sorts())
        return plan

    def _choose(self, logits: Tensor, rows: Rows, block: RowBlock, masks: Masks | None) -> Chosen:
        choices = block.choices if masks is None else replace(block.choices, masks=masks)
        if choices.any_penalties:
            # The kernel need not read beyond the longest row, whose length the host knows.
            longest = int(rows.known[block.rows].max())
            choices = replace(choices, history=choices.history[:, :longest])
        return self._kernels.sample(logits, choices)

    def _choose_in_blocks(
        self, logits: Tensor, rows: Rows, blocks: tuple[RowBlock, ...], masks: Masks | None
    ) -> Chosen:
        count, device = logits.shape[0], logits.device
        ids = torch.empty(count, dtype=torch.int32, device=device)
        logprobs = torch.empty(count, device=device)
        finite = torch.empty(count, dtype=torch.bool, device=device)
        for block in blocks:
            own = logits[block.where]
            own_masks = None if masks is None else block.own_masks(masks, count)
            chosen = self._choose(own, rows, block, own_masks)
            logits[block.where] = own
            ids[block.where], logprobs[block.where] = chosen.ids_R, chosen.logprobs_R
            finite[block.where] = chosen.finite_R
            self._on_progress()
        return Chosen(ids, logprobs, finite)

    def _watermark(self, logits: Tensor, plan: SamplingPlan, newest: Pending[list[int]]) -> None:
        for i, previous in zip(plan.watermarked, newest.wait(), strict=True):
            green = green_list(previous, logits.shape[1], self._gamma)
            (there,) = send([green.int().numpy()], logits.device)
            logits[i, there] += self._delta


def _top_tokens(logits: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """The most likely tokens of the rows that ask for any. Every row gets the largest number that any row asks for."""
    if plan.top_where is None:
        return NO_TOP_IDS, NO_TOP_LOGPROBS
    most = min(max(plan.top_counts), logits.shape[1])
    logprobs, ids = logits[plan.top_where].log_softmax(dim=1).topk(most, dim=1)
    return ids.int(), logprobs


def emit(ids_R: Tensor, rows: Rows, index: tuple[int, ...]) -> None:
    """Overwrites sampled ids by those that the fault point `shard.sampled` names, if it names any. Each row of `index`
    gets the id at its place in the row's output; after the last one its own id remains."""
    for i, row in enumerate(index if (given := faults.emitted("shard.sampled")) else ()):
        place = int(rows.known[row]) - rows.parameters.prompt_length[row]
        if place < len(given):
            ids_R[i] = given[place]


# Watermarks a text by favouring a "green" part of the vocabulary, drawn from the previous token.
#
# A Watermark for Large Language Models, Kirchenbauer et al. 2023 (https://arxiv.org/abs/2301.10226), with TGI's key, so
# that its detectors find it.
#
# torch draws the list on the CPU, so the host must know the previous token. It is copied to the host before the step's
# forward pass is launched: the host waits for the step before, while the GPU computes the forward pass.
HASH_KEY = 15485863


def newest_tokens(rows: Rows, index: tuple[int, ...], mark: Callable[[], Moment]) -> Pending[list[int]]:
    """The newest known token of each of the rows `index`, in their order. To be called before the step's forward pass
    is launched."""
    last = rows.known[list(index)] - 1
    rows_W, positions_W = send([np.array(index, np.int32), last.astype(np.int32)], rows.device)
    ids_W = fetch(rows.history[rows_W, positions_W])
    copied = mark()

    def read() -> list[int]:
        copied.wait()
        return [int(token) for token in ids_W.tolist()]

    return Pending(copied, read)


def green_list(previous_token: int, vocabulary: int, gamma: float) -> torch.Tensor:
    """The favoured ids after `previous_token`, as int64 [int(vocabulary * gamma)]."""
    generator = torch.Generator().manual_seed(HASH_KEY * previous_token)
    return torch.randperm(vocabulary, generator=generator)[: int(vocabulary * gamma)]
