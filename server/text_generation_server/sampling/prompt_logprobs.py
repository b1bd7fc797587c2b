"""Log-probabilities of the tokens of prompts, from the hidden states of a step. Logits are computed for a bounded
number of tokens at a time, so the memory that they take does not depend on the length of the prompts.

Legend: P tokens of the step that tokens of prompts follow, K most likely tokens, V ids of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from text_generation_server.device.graphs import Head, Signal
from text_generation_server.device.transfers import send
from text_generation_server.step.preparation import ScoredTokens
from text_generation_server.step.results import PromptOutput

# Most bytes of float32 logits at a time. The softmax makes a copy of them and, in a group, rank 0 has the parts of all
# ranks beside them. A warm-up does not count this memory: it fits into what a shard leaves free in any case, which is a
# tenth of a GPU's memory, or half of the memory that a CPU has free.
MAX_LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probabilities of the prompts' tokens that follow the tokens `of`."""

    of: ScoredTokens
    logprobs_P: Tensor  # float32
    top_ids_PK: Tensor  # int32; K is the largest number that any request wants
    top_logprobs_PK: Tensor  # float32, the largest first

    def moved(self, move: Callable[[Tensor], Tensor]) -> "PromptScores":
        """Applies `move`, such as a copy to the host, to every tensor."""
        return PromptScores(self.of, move(self.logprobs_P), move(self.top_ids_PK), move(self.top_logprobs_PK))

    def read_out(self) -> PromptOutput:
        """The same without the most likely tokens that their requests do not want. The tensors must be on the host."""
        of, most = self.of, self.top_ids_PK.shape[1]
        top_counts = tuple(min(count, most) for count in of.top_counts)
        wanted_PK = torch.arange(most) < torch.tensor(np.repeat(top_counts, of.counts)).unsqueeze(1)
        tops = self.top_ids_PK[wanted_PK], self.top_logprobs_PK[wanted_PK]
        return PromptOutput(of.request_ids, of.counts, top_counts, self.logprobs_P, *tops)


def tokens_at_a_time(vocab_size: int) -> int:
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


def score_prompts(
    scored: ScoredTokens, history: Tensor, logits_after: Head, vocab_size: int, min_rows: int, on_progress: Signal
) -> PromptScores | None:
    """The log-probabilities, on rank 0; None on other ranks. All ranks must call it.

    `history`: token ids of all rows, by position. `logits_after` at least `min_rows` of the step's tokens, by their
    indices: in float32. `on_progress` is called after each part of the tokens.
    """
    count, at_a_time = len(scored.tokens_P), tokens_at_a_time(vocab_size)
    tokens = np.pad(scored.tokens_P, (0, min_rows))  # the last part may have fewer tokens than `head` has to get
    tokens_P, rows_P, positions_P = send([tokens, scored.rows_P, scored.positions_P], history.device)
    ids_P = history[rows_P, positions_P]
    most = min(max(scored.top_counts), vocab_size)
    parts = []
    for first in range(0, count, at_a_time):
        end = min(first + at_a_time, count)
        logits = logits_after(tokens_P[first : max(end, first + min_rows)])
        parts.append(None if logits is None else _score_part(logits, ids_P[first:end], most))
        on_progress()
    found = [part for part in parts if part is not None]
    if not found:
        return None
    logprobs, top_ids, top_logprobs = map(torch.cat, zip(*found, strict=True))
    return PromptScores(scored, logprobs, top_ids, top_logprobs)


def _score_part(logits: Tensor, ids_P: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each of the ids, and the `most` most likely ids in its place with theirs."""
    logprobs_PV = logits[: len(ids_P)].log_softmax(dim=1)
    of_ids = logprobs_PV.gather(1, ids_P.long().unsqueeze(1)).squeeze(1)
    if not most:
        nothing = of_ids.new_empty((len(ids_P), 0))
        return of_ids, nothing.int(), nothing
    top_logprobs, top_ids = logprobs_PV.topk(most, dim=1)
    return of_ids, top_ids.int(), top_logprobs
