"""Decides whether a request may start: only if the slots are expected to last until all running requests have ended.

The estimate is the future peak of held slots: each request takes one slot a step, and gives all its slots back when it
ends. The peak lies at the end of some request.
"""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.scheduling.look_ahead import Stay
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.running import Lengths, Running

# Guesses the final output lengths of requests, in tokens, by sampling the lengths of recent outputs.

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


# Fraction of the slots that is kept free when lengths are sampled, because real outputs may be longer.
RESERVE = 0.05
# Number of steps for which a forecast is reused.
GOOD_STEPS = 16


class AdmissionControl:
    def __init__(self, mode: AdmissionMode, seed: int = 0) -> None:
        self.mode = mode
        self._lengths = OutputLengths(seed)
        self._futures = Futures(self._lengths)

    def learn(self, length: int) -> None:
        """Adds the length of a complete output, in tokens, to the recent output lengths."""
        self._lengths.add(length)

    @property
    def uses_history(self) -> bool:
        return self.mode is AdmissionMode.PAST_FUTURE and self._lengths.are_enough

    def expect(self, request: Running) -> Lengths:
        """Expected final output lengths of a waiting request, in tokens: one for each future."""
        if self.uses_history:
            return self._futures.guess(request)
        return np.array([request.request.max_new_tokens], dtype=np.int64)

    def join(self, request: Running) -> None:
        self._futures.join(request)

    def leave(self, request: Running) -> None:
        self._futures.leave(request)

    def totals(self, requests: Sequence[Running]) -> Lengths:
        """Expected final output lengths of running requests, in tokens: one row per request, one column per future."""
        if self.uses_history:
            return self._futures.totals(requests)
        return np.array([[r.request.max_new_tokens] for r in requests], dtype=np.int64).reshape(-1, 1)

    def stays(self, requests: Sequence[Running]) -> list[Stay]:
        """The slots and steps that each request still needs if its output has the mean length of recent outputs. While
        too few outputs are known: if it has its greatest length.
        """
        made_N = np.array([len(r.output_ids) for r in requests], dtype=np.int64)
        max_N = np.array([r.request.max_new_tokens for r in requests], dtype=np.int64)
        totals_N = self._lengths.mean(made_N, max_N) if self._lengths.are_enough else max_N
        kept_N = totals_N if self.uses_history else max_N
        return [
            Stay(
                r.num_uncomputed if r.holding is not None else r.num_tokens,
                total - len(r.output_ids),
                len(r.request.input_ids) + kept - 1,
            )
            for r, total, kept in zip(requests, totals_N.tolist(), kept_N.tolist(), strict=True)
        ]


class Forecast:
    """The future peak of held slots, for N requests in D sampled futures.

    Without new requests the peak only falls, so a forecast is reused for GOOD_STEPS steps: a request that fits on top
    of it joins without a new forecast.
    """

    def __init__(self, admission: AdmissionControl, memory: Memory) -> None:
        self.missing = 0  # number of slots that the last refused request lacked
        self._admission = admission
        self._memory = memory
        # Upper bound on slots ever held, from the last exact forecast, and the step until which it may be reused.
        self._bound: int | None = None
        self._good_until = 0

    def admits(
        self, candidate: Running, running: Collection[Running], prefilling: Collection[Running], now: int, budget: int
    ) -> bool:
        """Whether the slots suffice if `candidate`, which holds its cached prefix, starts in step `now`. If so, the
        forecast includes it from now on. `running`: all running requests; `prefilling`: the running requests whose
        prompts are not computed yet. `budget`: number of prompt tokens that a step can at least compute.
        """
        if self._memory.num_available < candidate.num_uncomputed:
            self.missing = candidate.num_uncomputed - self._memory.num_available
            return False
        return self._fits_on_top(candidate, prefilling, now, budget) or self._fits(candidate, running, now, budget)

    def _fits_on_top(self, candidate: Running, prefilling: Collection[Running], now: int, budget: int) -> bool:
        """Whether `candidate` fits on top of the last forecast. It adds at most the slots it holds, and one slot for
        each of its steps. All prompts must be computed before this step, so that no request runs longer than forecast.
        """
        uncomputed = sum(r.num_uncomputed for r in prefilling) + candidate.num_uncomputed
        if self._bound is None or now >= self._good_until or uncomputed > budget:
            return False
        if self._memory.shares_with_one_other(candidate):
            return False
        growth = int(self._admission.expect(candidate).max()) - candidate.num_sent
        bound = self._bound + candidate.num_uncomputed + self._memory.num_exclusive(candidate) + growth + 1
        if bound > self._limit:
            return False
        self._bound = bound
        return True

    def _fits(self, candidate: Running, running: Collection[Running], now: int, budget: int) -> bool:
        highest = self._highest(candidate, running, budget)
        self.missing = highest - self._limit
        self._bound, self._good_until = (highest, now + GOOD_STEPS) if self.missing <= 0 else (None, 0)
        return self.missing <= 0

    @property
    def _limit(self) -> int:
        capacity = self._memory.capacity
        return capacity - int(capacity * RESERVE) if self._admission.uses_history else capacity

    def _highest(self, candidate: Running, running: Collection[Running], budget: int) -> int:
        members = [r for r in running if not r.paused]
        # Slots that paused requests may still take. A paused request may go on at any time, so it counts as if it held
        # its greatest number of slots for ever.
        resting = sum(r.max_slots - len(r.slots) for r in running if r.paused)
        totals_ND = np.vstack([self._admission.totals(members), self._admission.expect(candidate)])
        members.append(candidate)
        is_prefilling_N = np.fromiter((r.prefilled < r.prefill_to for r in members), np.bool_, len(members))
        sent_N = np.fromiter((r.num_sent for r in members), np.int64, len(members))
        # Slots still to take, one with each decode step. A prompt's last chunk makes a token without a decode step.
        growth_DN = np.maximum(totals_ND.T - sent_N - is_prefilling_N, 0)
        held_N = np.array(self._memory.exclusives(members), dtype=np.int64)
        # Slots counted as held for ever: shared slots, slots of leaving requests, and the growth of paused requests.
        apart = self._memory.num_held - int(held_N.sum()) + resting
        held_N[-1] += candidate.num_uncomputed  # the candidate's prompt counts as held in full
        everything = int(held_N.sum()) + int(growth_DN.sum(axis=1).max())
        if self._admission.mode is AdmissionMode.RESERVE:
            return apart + everything
        uncomputed = sum(members[i].num_uncomputed for i in np.flatnonzero(is_prefilling_N).tolist())
        left_DN = growth_DN + 1 + -(-uncomputed // budget) * is_prefilling_N
        return apart + min(everything, peak(held_N, left_DN))


def peak(held_N: Lengths, left_DN: Lengths) -> int:
    """The most slots that N requests ever hold together, in the worst of D futures. Each request grows by one slot a
    step and stays for `left` steps.

    The Efficient Router's formula (LightLLM): with `left` in descending order, max over i of
    left_i × i + held_1 + … + held_i.
    """
    # `left` and `held` are packed into one integer: several times faster than `argsort` and two gathers.
    both_DN = np.sort((left_DN << 32) | held_N, axis=1)[:, ::-1]
    left_DN, held_DN = both_DN >> 32, np.cumsum(both_DN & 0xFFFFFFFF, axis=1)
    return int((left_DN * np.arange(1, len(held_N) + 1) + held_DN).max())
