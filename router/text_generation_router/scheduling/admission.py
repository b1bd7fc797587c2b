"""Whether a request may start: only when the memory is expected to last for all that run, to their ends.

The estimate is the peak of the future: requests shrink the memory by a token a step each, and give theirs back when
they end. Sorted by how long they stay, the most that is ever held is at one of the ends.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum

import numpy as np

from text_generation_router.scheduling.futures import Futures, OutputLengths
from text_generation_router.scheduling.look_ahead import Stay
from text_generation_router.scheduling.memory import Memory
from text_generation_router.scheduling.running import Lengths, Running

# Share of the slots that is not given away on the strength of draws.
RESERVE = 0.05
# For so many steps a forecast is good enough.
GOOD_STEPS = 16


class AdmissionMode(StrEnum):
    RESERVE = "reserve"  # everything a request may ever need is there when it starts
    PEAK = "peak"  # the peak of the future, in which every request makes all the tokens it may
    PAST_FUTURE = "past-future"  # the same, with lengths as recent outputs had them


class AdmissionControl:
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

    def stays(self, requests: Sequence[Running]) -> list[Stay]:
        """What they need to their ends: as long as recent outputs are on average, if enough are known, else as long as
        they may become."""
        made_N = np.array([len(r.output_ids) for r in requests], dtype=np.int64)
        most_N = np.array([r.request.max_new_tokens for r in requests], dtype=np.int64)
        totals_N = self._lengths.mean(made_N, most_N) if self._lengths.are_enough else most_N
        kept_N = totals_N if self.uses_history else most_N
        return [
            Stay(
                r.num_uncomputed if r.holding is not None else r.num_tokens,
                total - len(r.output_ids),
                len(r.request.input_ids) + kept - 1,
            )
            for r, total, kept in zip(requests, totals_N.tolist(), kept_N.tolist(), strict=True)
        ]


class Forecast:
    """The most that will ever be held, if nobody else joins; D futures, N requests.

    It can only become less by itself, so an exact one is good for a while: who is small enough to fit on top of it
    joins without another.
    """

    def __init__(self, admission: AdmissionControl, memory: Memory, budget: int) -> None:
        self.missing = 0  # slots that the last one who was turned away would have needed
        self._admission = admission
        self._memory = memory
        self._budget = budget
        self._bound: int | None = None  # nothing above it is to be expected, and
        self._good_until = 0  # so long, in steps

    def admits(
        self, candidate: Running, running: Collection[Running], prefilling: Collection[Running], now: int
    ) -> bool:
        """Whether memory lasts if it starts now, holding what the cache has of it: `running` are all that run already,
        `prefilling` those of them whose prompts are under way, `now` is the number of the step. If so, it is counted
        from now on."""
        if self._memory.num_available < candidate.num_uncomputed:
            self.missing = candidate.num_uncomputed - self._memory.num_available
            return False
        return self._fits_on_top(candidate, prefilling, now) or self._fits(candidate, running, now)

    def _fits_on_top(self, candidate: Running, prefilling: Collection[Running], now: int) -> bool:
        """It adds to a peak at most what it holds, and a slot for each of its steps; as long as all prompts are done in
        this one, so that it makes nobody stay longer than was foreseen."""
        uncomputed = sum(r.num_uncomputed for r in prefilling) + candidate.num_uncomputed
        if self._bound is None or now >= self._good_until or uncomputed > self._budget:
            return False
        if self._memory.holds_what_one_held(candidate):
            return False
        growth = int(self._admission.expect(candidate).max()) - candidate.num_sent
        bound = self._bound + candidate.num_uncomputed + self._memory.num_exclusive(candidate) + growth + 1
        if bound > self._limit:
            return False
        self._bound = bound
        return True

    def _fits(self, candidate: Running, running: Collection[Running], now: int) -> bool:
        highest = self._highest(candidate, running)
        self.missing = highest - self._limit
        self._bound, self._good_until = (highest, now + GOOD_STEPS) if self.missing <= 0 else (None, 0)
        return self.missing <= 0

    @property
    def _limit(self) -> int:
        capacity = self._memory.capacity
        return capacity - int(capacity * RESERVE) if self._admission.uses_history else capacity

    def _highest(self, candidate: Running, running: Collection[Running]) -> int:
        members = [r for r in running if not r.paused]
        # Nobody knows when those who pause will go on, or leave.
        resting = sum(r.most_slots - len(r.slots) for r in running if r.paused)
        totals_ND = np.vstack([self._admission.totals(members), self._admission.expect(candidate)])
        members.append(candidate)
        is_prefilling_N = np.fromiter((r.prefilled < r.prefill_to for r in members), np.bool_, len(members))
        sent_N = np.fromiter((r.num_sent for r in members), np.int64, len(members))
        # Slots to take, one with each decode step. The last chunk of a prompt makes a token as well.
        growth_DN = np.maximum(totals_ND.T - sent_N - is_prefilling_N, 0)
        held_N = np.array(self._memory.exclusives(members), dtype=np.int64)
        apart = self._memory.num_held - int(held_N.sum()) + resting  # shared, or of those who are leaving
        held_N[-1] += candidate.num_uncomputed  # its prompt counts as held in full
        everything = int(held_N.sum()) + int(growth_DN.sum(axis=1).max())
        if self._admission.mode is AdmissionMode.RESERVE:
            return apart + everything
        uncomputed = sum(members[i].num_uncomputed for i in np.flatnonzero(is_prefilling_N).tolist())
        left_DN = growth_DN + 1 + -(-uncomputed // self._budget) * is_prefilling_N
        return apart + min(everything, peak(held_N, left_DN))


def peak(held_N: Lengths, left_DN: Lengths) -> int:
    """The most that is ever held, in the worst of D futures: everybody grows by one a step and stays for `left` steps.

    The Efficient Router's formula (LightLLM): with `left` in descending order, max over i of
    left_i × i + held_1 + … + held_i.
    """
    # Sorted as one number each, which is several times faster than an order and two gathers.
    both_DN = np.sort((left_DN << 32) | held_N, axis=1)[:, ::-1]
    left_DN, held_DN = both_DN >> 32, np.cumsum(both_DN & 0xFFFFFFFF, axis=1)
    return int((left_DN * np.arange(1, len(held_N) + 1) + held_DN).max())
