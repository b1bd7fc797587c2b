"""How many tokens requests will have made in the end: guesses, drawn from how long recent outputs became."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.running import Lengths, Running

# Lengths of outputs that are remembered, and how many it takes to believe them.
WINDOW, ENOUGH = 1000, 32
# Futures that are drawn; the worst of them counts.
DRAWS = 6


class OutputLengths:
    """Only those that ended by themselves teach anything."""

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

    def draw(self, longer_than_K: Lengths, most_K: Lengths) -> Lengths:
        """A length for each, one of those that are longer than what has been made already; `most` if there is none."""
        if not self._is_sorted:
            self._sorted, self._is_sorted = np.sort(np.array(self._recent, dtype=np.int64)), True
        known = len(self._sorted)
        first_K = np.searchsorted(self._sorted, longer_than_K, side="right")
        chosen_K = first_K + (self._random.random(len(first_K)) * (known - first_K)).astype(np.int64)
        drawn_K = np.where(first_K < known, self._sorted[np.minimum(chosen_K, known - 1)], most_K)
        lengths: Lengths = np.minimum(drawn_K, most_K)
        return lengths

    def mean(self, longer_than_K: Lengths, most_K: Lengths) -> Lengths:
        """Of those that are longer than what has been made already, and at most `most`: nothing is drawn."""
        recent = np.sort(np.array(self._recent, dtype=np.int64))
        sums = np.append(np.cumsum(recent[::-1])[::-1], 0)
        first_K = np.searchsorted(recent, longer_than_K, side="right")
        means_K = -(-sums[first_K] // np.maximum(len(recent) - first_K, 1))
        lengths: Lengths = np.minimum(np.where(first_K < len(recent), means_K, most_K), most_K)
        return lengths


class Futures:
    """The guesses for those that run, a row for each, DRAWS wide: a request brings its own, or gets some when they are
    asked for."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self._totals = np.zeros((64, DRAWS), dtype=np.int64)
        self._free: list[int] = list(range(64))

    def guess(self, request: Running) -> Lengths:
        """For one that waits; remembered until it has made more than that."""
        made = len(request.output_ids)
        if not len(request.expected) or int(request.expected.min()) <= made:
            request.expected = self._lengths.draw(_repeated(made), _repeated(request.request.max_new_tokens))
        return request.expected

    def join(self, request: Running) -> None:
        if not self._free:
            rows = len(self._totals)
            self._totals = np.vstack([self._totals, np.zeros_like(self._totals)])
            self._free = list(range(rows, 2 * rows))
        request.seat = self._free.pop()
        self._totals[request.seat] = request.expected if len(request.expected) else 0

    def leave(self, request: Running) -> None:
        request.expected = self._totals[request.seat].copy()
        self._free.append(request.seat)

    def totals(self, requests: Sequence[Running]) -> Lengths:
        """N × DRAWS. Guesses that have been outlived are drawn anew."""
        count = len(requests)
        seats_N = np.fromiter((r.seat for r in requests), np.int64, count)
        made_N = np.fromiter((len(r.output_ids) for r in requests), np.int64, count)
        totals_ND = self._totals[seats_N]
        outlived: npt.NDArray[np.bool_] = totals_ND <= made_N[:, None]
        if outlived.any():
            which_K = np.nonzero(outlived)[0]
            most_K = np.array([requests[i].request.max_new_tokens for i in which_K.tolist()], dtype=np.int64)
            totals_ND[outlived] = self._lengths.draw(made_N[which_K], most_K)
            self._totals[seats_N] = totals_ND
        return totals_ND


def _repeated(value: int) -> Lengths:
    return np.full(DRAWS, value, dtype=np.int64)
