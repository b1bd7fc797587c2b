"""The outcome of a simulation: the times of every request, the use of memory, and wasted work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_benchmark.simulation.stepped import StepProgress
from text_generation_benchmark.simulation.trace import Floats, Ints, Trace
from text_generation_router.scheduling.scheduler import SchedulerCounters


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of all requests, as arrays with one element per request; seconds on the trace's clock, without the overhead
    of HTTP.
    """

    arrival_s: Floats
    first_s: Floats  # time at which the first token was made
    last_s: Floats
    longest_gap_s: Floats  # longest time between two tokens
    output_tokens: Ints


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one engine."""

    times: RequestTimes
    slots: int
    end_s: float  # time at which the last step ended
    held_slot_s: Floats  # number of slots held by requests × seconds, in each bucket of time
    most_held: int
    steps: int
    prefilled_tokens: int
    prefix_hit_tokens: int
    recomputed_tokens: int  # number of tokens computed again after preemptions
    wasted_rows: int  # number of rows decoded after their request had ended
    preemptions: int


class Books:
    """Records the outcome of an engine while it runs."""

    def __init__(self, trace: Trace, bucket_s: float) -> None:
        self.wasted_rows = 0
        self._trace = trace
        self._first_s, self._last_s, self._longest_gap_s = ([0.0] * len(trace) for _ in range(3))
        self._bucket_s = bucket_s
        self._held_slot_s: list[float] = [0.0]
        self._most_held = 0
        self._steps = 0
        self._end_s = 0.0

    def note_step(self, starts_s: float, seconds: float, held: int) -> None:
        """Counts the whole step for the bucket in which it starts."""
        self._steps += 1
        self._end_s = starts_s + seconds
        bucket = int(starts_s / self._bucket_s)
        while bucket >= len(self._held_slot_s):
            self._held_slot_s.append(0.0)
        self._held_slot_s[bucket] += held * seconds
        if held > self._most_held:
            self._most_held = held

    def note_end(self, index: int, progress: StepProgress) -> None:
        self._first_s[index], self._last_s[index] = progress.first_s, progress.last_s
        self._longest_gap_s[index] = progress.longest_gap_s

    def outcome(self, slots: int, counters: SchedulerCounters) -> Outcome:
        first_s, last_s, longest_gap_s = map(np.array, (self._first_s, self._last_s, self._longest_gap_s))
        return Outcome(
            RequestTimes(self._trace.arrival_s, first_s, last_s, longest_gap_s, self._trace.output_tokens),
            slots=slots,
            end_s=self._end_s,
            held_slot_s=np.array(self._held_slot_s),
            most_held=self._most_held,
            steps=self._steps,
            prefilled_tokens=counters.prefilled_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            wasted_rows=self.wasted_rows,
            preemptions=counters.preemptions,
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """Limits in seconds. A request is good if its first token and every gap between its tokens stay within them."""

    first_token_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """The outcomes of all engines together."""

    output_tokens_per_s: float
    requests_per_s: float
    goodput: float  # good requests per second of the time in which requests arrived
    first_token_s: Floats  # seconds until the first token of every request, HTTP included, sorted
    mean_gap_s: Floats  # mean seconds between the tokens of each request with two tokens or more, sorted
    longest_gap_s: Floats
    kv_use: float  # mean share of the slots held by requests
    most_kv_use: float
    kv_use_over_time: Floats  # mean share of the slots held by requests, in each bucket of time
    preemptions: int
    recomputed_tokens: int
    wasted_rows: int
    prefilled_tokens: int
    prefix_hit_tokens: int
    steps: int


def summarize(
    outcomes: Sequence[Outcome], duration_s: float, bucket_s: float, overhead_s: float, targets: Targets
) -> ClusterSummary:
    """`duration_s`: seconds during which requests arrive."""
    arrival_s, first_s, last_s, longest, tokens = (
        np.concatenate([getattr(outcome.times, column) for outcome in outcomes])
        for column in ("arrival_s", "first_s", "last_s", "longest_gap_s", "output_tokens")
    )
    first_token_s = first_s - arrival_s + overhead_s
    is_good = (first_token_s <= targets.first_token_s) & (longest <= targets.gap_s)
    end_s = max(outcome.end_s for outcome in outcomes)
    several = tokens > 1
    slots = sum(outcome.slots for outcome in outcomes)
    over_time = _held(outcomes) / (slots * bucket_s)
    return ClusterSummary(
        output_tokens_per_s=float(tokens.sum()) / end_s,
        requests_per_s=len(tokens) / end_s,
        goodput=float(is_good.sum()) / duration_s,
        first_token_s=np.sort(first_token_s),
        mean_gap_s=np.sort((last_s - first_s)[several] / (tokens[several] - 1)),
        longest_gap_s=np.sort(longest[several]),
        kv_use=float(over_time.sum()) * bucket_s / end_s,
        most_kv_use=max(outcome.most_held / outcome.slots for outcome in outcomes),
        kv_use_over_time=over_time,
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        recomputed_tokens=sum(outcome.recomputed_tokens for outcome in outcomes),
        wasted_rows=sum(outcome.wasted_rows for outcome in outcomes),
        prefilled_tokens=sum(outcome.prefilled_tokens for outcome in outcomes),
        prefix_hit_tokens=sum(outcome.prefix_hit_tokens for outcome in outcomes),
        steps=sum(outcome.steps for outcome in outcomes),
    )


def percentile(ordered: Floats, percent: float) -> float:
    """Percentile of sorted values; 0 if there are no values."""
    return float(ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]) if len(ordered) else 0.0


def _held(outcomes: Sequence[Outcome]) -> Floats:
    held = np.zeros(max(len(outcome.held_slot_s) for outcome in outcomes))
    for outcome in outcomes:
        held[: len(outcome.held_slot_s)] += outcome.held_slot_s
    return held
