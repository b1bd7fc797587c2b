"""Whether a request may start: only when the memory is expected to last for all that run, to their ends.

The estimate is the peak of the future: requests shrink the memory by a token a step each, and give theirs back when
they end. Sorted by how long they stay, the most that is ever held is at one of the ends.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import numpy as np

from text_generation_router.scheduling.futures import Futures, OutputLengths
from text_generation_router.scheduling.memory import Memory
from text_generation_router.scheduling.running import Lengths, Running

# Share of the slots that is not given away on the strength of draws.
RESERVE = 0.05


class AdmissionMode(StrEnum):
    RESERVE = "reserve"  # everything a request may ever need is there when it starts
    PEAK = "peak"  # the peak of the future, in which every request makes all the tokens it may
    PAST_FUTURE = "past-future"  # the same, with lengths as recent outputs had them


class Admission:
    def __init__(self, mode: AdmissionMode, seed: int = 0) -> None:
        self.mode = mode
        self._lengths = OutputLengths(seed)
        self._futures = Futures(self._lengths)

    def learn(self, length: int) -> None:
        """An output has ended by itself, so long."""
        self._lengths.add(length)

    @property
    def uses_history(self) -> bool:
        return self.mode is AdmissionMode.PAST_FUTURE and self._lengths.are_enough

    def expect(self, request: Running) -> Lengths:
        """How many tokens one that waits will have made in the end."""
        if self.uses_history:
            return self._futures.guess(request)
        return np.array([request.request.max_new_tokens], dtype=np.int64)

    def join(self, request: Running) -> None:
        self._futures.join(request)

    def leave(self, request: Running) -> None:
        self._futures.leave(request)

    def totals(self, requests: Sequence[Running]) -> Lengths:
        """How many tokens those that run will have made in the end: a row for each, a column for each future."""
        if self.uses_history:
            return self._futures.totals(requests)
        return np.array([[r.request.max_new_tokens] for r in requests], dtype=np.int64).reshape(-1, 1)


class Estimate:
    """The futures of those that run; D draws, N requests. Made once a step, grows with those that join in it."""

    def __init__(self, admission: Admission, running: Iterable[Running], memory: Memory, budget: int) -> None:
        self._admission = admission
        self._memory = memory
        self._budget = budget
        self._members: list[Running] = []
        self._resting = 0  # nobody knows when those who pause will go on, or leave
        self._uncomputed = 0
        sent, prefilling = [], []
        for request in running:
            if request.paused:
                self._resting += request.most_slots - len(request.slots)
                continue
            if is_prefilling := request.prefilled < request.prefill_to:
                self._uncomputed += request.num_uncomputed
            self._members.append(request)
            prefilling.append(is_prefilling)
            # The last chunk of a prompt makes a token as well.
            sent.append(request.num_sent + is_prefilling)
        self._held_N = self._held(self._members)
        self._is_prefilling_N = np.array(prefilling, dtype=np.bool_)
        self._growth_DN = _growth(admission.totals(self._members), np.array(sent, dtype=np.int64))

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
        self._growth_DN = np.hstack(
            [self._growth_DN, _growth(self._admission.expect(candidate)[None], candidate.num_sent + 1)]
        )
        self._is_prefilling_N = np.append(self._is_prefilling_N, True)
        self._uncomputed += wanted
        return memory.num_available >= wanted and apart + self._peak() <= self._limit

    @property
    def _limit(self) -> int:
        capacity = self._memory.capacity
        return capacity - int(capacity * RESERVE) if self._admission.uses_history else capacity

    def _held(self, requests: Sequence[Running]) -> Lengths:
        return np.fromiter(map(self._memory.num_exclusive, requests), np.int64, len(requests))

    def _peak(self) -> int:
        everything = int(self._held_N.sum()) + int(self._growth_DN.sum(axis=1).max())
        if self._admission.mode is AdmissionMode.RESERVE:
            return everything
        chunks = -(-self._uncomputed // self._budget)
        left_DN = self._growth_DN + 1 + chunks * self._is_prefilling_N
        return min(everything, peak(self._held_N, left_DN))


def _growth(totals_ND: Lengths, sent: Lengths | int) -> Lengths:
    """Slots that requests are still to take, each with a decode step."""
    growth_DN: Lengths = np.maximum(totals_ND.T - sent, 0)
    return growth_DN


def peak(held_N: Lengths, left_DN: Lengths) -> int:
    """The most that is ever held, in the worst of D futures: everybody grows by one a step and stays for `left` steps.

    The Efficient Router's formula (LightLLM): with `left` in descending order, max over i of
    left_i × i + held_1 + … + held_i.
    """
    # Sorted as one number each, which is several times faster than an order and two gathers.
    both_DN = np.sort((left_DN << 32) | held_N, axis=1)[:, ::-1]
    left_DN, held_DN = both_DN >> 32, np.cumsum(both_DN & 0xFFFFFFFF, axis=1)
    return int((left_DN * np.arange(1, len(held_N) + 1) + held_DN).max())
