"""The next token of every row. Order: watermark, penalties, temperature, top-k, top-p, typical-p, then the draw.

Everything is computed row by row, so that a row's token does not depend on its neighbours; steps that no row of the
batch asks for are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_server.batch import Rows
from text_generation_server.kernels.interface import Kernels
from text_generation_server.sampling.watermark import green_list

MINUS_INFINITY = float("-inf")
SORTED_ROWS = 16  # at a time: a large vocabulary takes some 25 ms for each


@dataclass(frozen=True, slots=True)
class Sampled:
    ids_R: Tensor  # int64
    logprobs_R: Tensor  # float32, of the distribution that was drawn from
    top_counts: list[int]  # how many best tokens each row asked for
    top_ids: Tensor  # int32, row after row
    top_logprobs: Tensor  # float32
    not_finite: list[int]  # which of the R had a NaN or an infinity among their logits: the rest of them means nothing


class Sampler:
    def __init__(
        self,
        kernels: Kernels,
        watermark_gamma: float,
        watermark_delta: float,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called while a large vocabulary is sorted for many rows, as a sign of life."""
        self._kernels = kernels
        self._on_progress = on_progress
        self._gamma = watermark_gamma
        self._delta = watermark_delta

    def __call__(self, logits_RV: Tensor, rows: Rows, index: list[int]) -> Sampled:
        """`index` are the rows that the logits belong to."""
        choices = [rows.parameters.of_row[row] for row in index]
        logits = logits_RV.float()
        if not_finite := _not_finite(logits):
            logits[not_finite] = 0  # so that nothing poisonous goes on
        index_R = torch.tensor(index, dtype=torch.int64, device=logits.device)
        if any(c.watermark for c in choices):
            logits = self._watermark(logits, rows, index)
        if penalized := [i for i, c in enumerate(choices) if c.penalizes]:
            logits[penalized] = _penalize(logits[penalized], rows, index_R[penalized])
        if drawn := [i for i, c in enumerate(choices) if not c.greedy]:
            logits[drawn] = logits[drawn] / rows.parameters.temperature[index_R[drawn]].unsqueeze(1)
        warped = [i for i, c in enumerate(choices) if c.warps]
        for block in (warped[first : first + SORTED_ROWS] for first in range(0, len(warped), SORTED_ROWS)):
            logits[block] = _cut_tails(logits[block], rows, index_R[block])
            self._on_progress()
        ids, logprobs = self._kernels.sample(logits, self._noise(logits, rows, index_R, drawn))
        counts = [c.top_n_tokens for c in choices]
        return Sampled(ids, logprobs, *_top_tokens(logits, counts), not_finite)

    def _noise(self, logits: Tensor, rows: Rows, index_R: Tensor, drawn: list[int]) -> Tensor | None:
        if not drawn:
            return None
        noise = torch.zeros_like(logits)
        who = index_R[drawn]
        # The position of the token that is being drawn: absolute, so that a resumed request goes on as it would have.
        noise[drawn] = self._kernels.gumbel_noise(rows.parameters.seed[who], rows.lengths[who], logits.shape[1])
        return noise

    def _watermark(self, logits: Tensor, rows: Rows, index: list[int]) -> Tensor:
        for i, row in enumerate(index):
            if rows.parameters.of_row[row].watermark:
                previous = int(rows.history[row, int(rows.lengths[row]) - 1])
                logits[i, green_list(previous, logits.shape[1], self._gamma).to(logits.device)] += self._delta
        return logits


def _not_finite(logits: Tensor) -> list[int]:
    """A sum is finite only if all of it is, and is much cheaper than a look at each; who fails it is looked at."""
    suspects: list[int] = (~logits.sum(dim=1).isfinite()).nonzero().flatten().tolist()
    return [i for i in suspects if not bool(logits[i].isfinite().all())]


def _penalize(logits: Tensor, rows: Rows, index_R: Tensor) -> Tensor:
    """Repetition: tokens of prompt and output lose likelihood once. Frequency: output tokens lose it for each use."""
    lengths = rows.lengths[index_R].unsqueeze(1)
    history = rows.history[index_R, : int(lengths.max())].long()
    positions = torch.arange(history.shape[1], device=logits.device)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    # Positions past the end repeat the row's first token, which is seen anyway.
    seen.scatter_(1, torch.where(positions < lengths, history, history[:, :1]), True)
    penalty = rows.parameters.repetition_penalty[index_R].unsqueeze(1)
    logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    is_output = (positions >= rows.parameters.prompt_length[index_R].unsqueeze(1)) & (positions < lengths)
    counts = torch.zeros_like(logits).scatter_add_(1, history, is_output.float())
    return logits - counts * rows.parameters.frequency_penalty[index_R].unsqueeze(1)


def _cut_tails(logits: Tensor, rows: Rows, index_R: Tensor) -> Tensor:
    """Minus infinity for what top-k, top-p and typical-p leave out, one after the other; the best token stays."""
    parameters = rows.parameters
    values, order = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    top_k = parameters.top_k[index_R].unsqueeze(1)
    values = values.masked_fill((top_k > 0) & (rank >= top_k), MINUS_INFINITY)
    probabilities = values.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities  # the mass of all better tokens
    top_p = parameters.top_p[index_R].unsqueeze(1)
    values = values.masked_fill((top_p < 1) & (before >= top_p), MINUS_INFINITY)
    logits = torch.empty_like(logits).scatter_(1, order, values)
    typical_p = parameters.typical_p[index_R].unsqueeze(1)
    if not bool((typical_p < 1).any()):
        return logits
    return torch.where(typical_p < 1, _cut_untypical(logits, typical_p), logits)


def _cut_untypical(logits: Tensor, mass: Tensor) -> Tensor:
    """Keeps the tokens whose surprise is nearest to the entropy, until they hold `mass`.

    Locally Typical Sampling, Meister et al. 2022 (https://arxiv.org/abs/2202.00666).
    """
    logprobs = logits.log_softmax(dim=1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(dim=1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    order = distance.sort(dim=1, stable=True).indices
    probabilities = logprobs.exp().gather(1, order)
    before = probabilities.cumsum(dim=1) - probabilities
    cut = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, before >= mass)
    return logits.masked_fill(cut, MINUS_INFINITY)


def _top_tokens(logits: Tensor, counts: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """The best tokens of the rows that ask; fewer where fewer have any likelihood left."""
    asking = [i for i, count in enumerate(counts) if count]
    if not asking:
        return [0] * len(counts), torch.empty(0, dtype=torch.int32), torch.empty(0)
    logprobs, ids = logits[asking].log_softmax(dim=1).topk(min(max(counts), logits.shape[1]), dim=1)
    logprobs, ids = logprobs.cpu(), ids.int().cpu()
    kept = [0] * len(counts)
    id_rows, logprob_rows = [], []
    for i, row_ids, row_logprobs in zip(asking, ids, logprobs, strict=True):
        kept[i] = min(counts[i], int(row_logprobs.isfinite().sum()))
        id_rows.append(row_ids[: kept[i]])
        logprob_rows.append(row_logprobs[: kept[i]])
    return kept, torch.cat(id_rows), torch.cat(logprob_rows)
