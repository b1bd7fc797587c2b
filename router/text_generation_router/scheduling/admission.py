"""Whether a request may start: only when the memory is expected to last for all that run, to their ends.

The estimate is the peak of the future: requests shrink the memory by a token a step each, and give theirs back when
they end. Sorted by how long they stay, the most that is ever held is at one of the ends.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from text_generation_router.scheduling.memory import Memory
from text_generation_router.scheduling.running import Lengths, Running

# Lengths of outputs that are remembered, and how many it takes to believe them.
WINDOW, ENOUGH = 1000, 32
# Futures that are drawn; the worst of them counts.
DRAWS = 8
# Share of the slots that is not given away on the strength of draws.
RESERVE = 0.05


class AdmissionMode(StrEnum):
    RESERVE = "reserve"  # everything a request may ever need is there when it starts
    PEAK = "peak"  # the peak of the future, in which every request makes all the tokens it may
    PAST_FUTURE = "past-future"  # the same, with lengths as recent outputs had them


class OutputLengths:
    """How long recent outputs became; only those that ended by themselves teach anything."""

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

    def draw(self, longer_than: int, most: int) -> Lengths:
        """DRAWS lengths, from the recent ones that are longer than what has been made already."""
        if not self._is_sorted:
            self._sorted, self._is_sorted = np.sort(np.array(self._recent, dtype=np.int64)), True
        first = int(np.searchsorted(self._sorted, longer_than, side="right"))
        if first == len(self._sorted):
            return np.full(DRAWS, most, dtype=np.int64)
        chosen = self._sorted[self._random.integers(first, len(self._sorted), DRAWS)]
        return np.minimum(chosen, most)


class Admission:
    def __init__(self, mode: AdmissionMode, seed: int = 0) -> None:
        self.mode = mode
        self._lengths = OutputLengths(seed)

    def learn(self, length: int) -> None:
        """An output has ended by itself, so long."""
        self._lengths.add(length)

    @property
    def uses_history(self) -> bool:
        return self.mode is AdmissionMode.PAST_FUTURE and self._lengths.are_enough

    def expect(self, request: Running) -> Lengths:
        """How many tokens it will have made: DRAWS guesses. One that has been outlived is drawn anew."""
        made, most = len(request.output_ids), request.request.max_new_tokens
        if not self.uses_history:
            return np.full(DRAWS, most, dtype=np.int64)
        if made < request.least_expected:
            return request.expected
        expected = request.expected
        drawn = self._lengths.draw(made, most)
        request.expected = np.where(expected <= made, drawn, expected) if len(expected) else drawn
        request.least_expected = int(request.expected.min())
        return request.expected


class Estimate:
    """The futures of those that run; D draws, N requests. Made once a step, grows with those that join in it."""

    def __init__(self, admission: Admission, running: Sequence[Running], memory: Memory, budget: int) -> None:
        self._admission = admission
        self._memory = memory
        self._budget = budget
        self._members = [r for r in running if not r.paused]
        # Nobody knows when those who pause will go on, or leave.
        self._resting = sum(r.most_slots - len(r.slots) for r in running if r.paused)
        self._held_N = self._held(self._members)
        self._growth_DN = self._growth(self._members)
        self._is_prefilling_N = np.array([r.is_prefilling for r in self._members], dtype=np.bool_)
        self._uncomputed = sum(r.num_uncomputed for r in self._members)

    def admits(self, candidate: Running) -> bool:
        """Whether memory lasts if it starts now, holding what the cache has of it. If so, it counts from now on.

        If not, this estimate is of no use any more.
        """
        memory, wanted = self._memory, candidate.num_uncomputed
        if memory.holds_what_one_held(candidate):
            self._held_N = self._held(self._members)
        self._members.append(candidate)
        held_N = np.append(self._held_N, memory.num_exclusive(candidate))
        apart = memory.num_held - int(held_N.sum()) + self._resting  # shared, or of those who are leaving
        held_N[-1] += wanted  # its prompt counts as held in full
        self._held_N = held_N
        self._growth_DN = np.hstack([self._growth_DN, self._growth([candidate])])
        self._is_prefilling_N = np.append(self._is_prefilling_N, True)
        self._uncomputed += wanted
        return memory.num_available >= wanted and apart + self._peak() <= self._limit

    @property
    def _limit(self) -> int:
        capacity = self._memory.capacity
        return capacity - int(capacity * RESERVE) if self._admission.uses_history else capacity

    def _held(self, requests: Sequence[Running]) -> Lengths:
        return np.array([self._memory.num_exclusive(r) for r in requests], dtype=np.int64)

    def _growth(self, requests: Sequence[Running]) -> Lengths:
        """Slots they are still to take, each with a decode step. The last chunk of a prompt makes a token as well."""
        totals_ND = np.array([self._admission.expect(r) for r in requests], dtype=np.int64).reshape(-1, DRAWS)
        sent_N = np.array([r.num_sent + r.is_prefilling for r in requests], dtype=np.int64)
        growth_DN: Lengths = np.maximum(totals_ND.T - sent_N, 0)
        return growth_DN

    def _peak(self) -> int:
        everything = int(self._held_N.sum()) + int(self._growth_DN.sum(axis=1).max())
        if self._admission.mode is AdmissionMode.RESERVE:
            return everything
        chunks = -(-self._uncomputed // self._budget)
        left_DN = self._growth_DN + 1 + chunks * self._is_prefilling_N
        return min(everything, peak(self._held_N, left_DN))


def peak(held_N: Lengths, left_DN: Lengths) -> int:
    """The most that is ever held, in the worst of D futures: everybody grows by one a step and stays for `left` steps.

    The Efficient Router's formula (LightLLM): with `left` in descending order, max over i of
    left_i × i + held_1 + … + held_i.
    """
    order = np.argsort(-left_DN, axis=1)
    left = np.take_along_axis(left_DN, order, axis=1)
    held = np.cumsum(held_N[order], axis=1)
    return int((left * np.arange(1, len(held_N) + 1) + held).max())
