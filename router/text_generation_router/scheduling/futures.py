"""Guesses the final output lengths of requests, in tokens, by sampling the lengths of recent outputs."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.running import Lengths, Running

# Number of output lengths that are remembered, and the number below which nothing is predicted.
WINDOW, ENOUGH = 1000, 32
# Number of sampled futures. The future with the highest peak decides.
DRAWS = 6


class OutputLengths:
    """The lengths, in tokens, of recent complete outputs: ended by limit, end token or stop string."""

    def __init__(self, seed: int = 0) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._sorted: Lengths = np.empty(0, dtype=np.int64)
        self._is_sorted = True
        self._random = np.random.default_rng(seed)

    def add(self, length: int) -> None:
        self._recent.append(length)
        self._is_sorted = False

    @property
    def are_enough(self) -> bool:
        return len(self._recent) >= ENOUGH

    def draw(self, longer_than_K: Lengths, max_K: Lengths) -> Lengths:
        """Samples K lengths. Each one is a recent length above `longer_than`, at most `most`; `most` if no recent
        length is longer.
        """
        if not self._is_sorted:
            self._sorted, self._is_sorted = np.sort(np.array(self._recent, dtype=np.int64)), True
        known = len(self._sorted)
        first_K = np.searchsorted(self._sorted, longer_than_K, side="right")
        chosen_K = first_K + (self._random.random(len(first_K)) * (known - first_K)).astype(np.int64)
        drawn_K = np.where(first_K < known, self._sorted[np.minimum(chosen_K, known - 1)], max_K)
        lengths: Lengths = np.minimum(drawn_K, max_K)
        return lengths

    def mean(self, longer_than_K: Lengths, max_K: Lengths) -> Lengths:
        """K mean lengths. Each one is the mean of the recent lengths above `longer_than`, at most `most`."""
        recent = np.sort(np.array(self._recent, dtype=np.int64))
        sums = np.append(np.cumsum(recent[::-1])[::-1], 0)
        first_K = np.searchsorted(recent, longer_than_K, side="right")
        means_K = -(-sums[first_K] // np.maximum(len(recent) - first_K, 1))
        lengths: Lengths = np.minimum(np.where(first_K < len(recent), means_K, max_K), max_K)
        return lengths


class Futures:
    """A table of guesses for the running requests: a row of DRAWS lengths for each. A request that joins without
    guesses gets them when `totals` is called."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self._totals = np.zeros((64, DRAWS), dtype=np.int64)
        self._free: list[int] = list(range(64))

    def guess(self, request: Running) -> Lengths:
        """DRAWS guesses for a waiting request, remembered until the request has reached one of them."""
        made = len(request.output_ids)
        if not len(request.expected) or int(request.expected.min()) <= made:
            request.expected = self._lengths.draw(_repeated(made), _repeated(request.request.max_new_tokens))
        return request.expected

    def join(self, request: Running) -> None:
        if not self._free:
            rows = len(self._totals)
            self._totals = np.vstack([self._totals, np.zeros_like(self._totals)])
            self._free = list(range(rows, 2 * rows))
        request.futures_row = self._free.pop()
        self._totals[request.futures_row] = request.expected if len(request.expected) else 0

    def leave(self, request: Running) -> None:
        request.expected = self._totals[request.futures_row].copy()
        self._free.append(request.futures_row)

    def totals(self, requests: Sequence[Running]) -> Lengths:
        """The guesses for N requests, N × DRAWS. A guess that its request has reached is sampled anew."""
        count = len(requests)
        rows_N = np.fromiter((r.futures_row for r in requests), np.int64, count)
        made_N = np.fromiter((len(r.output_ids) for r in requests), np.int64, count)
        totals_ND = self._totals[rows_N]
        outlived: npt.NDArray[np.bool_] = totals_ND <= made_N[:, None]
        if outlived.any():
            which_K = np.nonzero(outlived)[0]
            max_K = np.array([requests[i].request.max_new_tokens for i in which_K.tolist()], dtype=np.int64)
            totals_ND[outlived] = self._lengths.draw(made_N[which_K], max_K)
            self._totals[rows_N] = totals_ND
        return totals_ND


def _repeated(value: int) -> Lengths:
    return np.full(DRAWS, value, dtype=np.int64)
