"""Engines that run a trace from its first arrival to its last token, one or several in parallel processes, and the
outcome: the times of every request, the use of memory, and wasted work."""

import gc
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from math import inf
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from text_generation_benchmark.simulation.cost import StepCost
from text_generation_benchmark.simulation.stepped import Arrival, SteppedEngine, StepProgress, play_arrivals
from text_generation_benchmark.simulation.trace import Floats, RequestMaker, Trace
from text_generation_router.scheduling.request import Limits
from text_generation_router.scheduling.scheduler import SchedulerCounters


@dataclass(slots=True, eq=False)
class Outcome:
    """What is recorded of one engine while it runs a trace. Times are seconds on the trace's clock, without the
    overhead of HTTP; arrays have one element per request."""

    trace: Trace
    slots: int
    bucket_s: float
    first_s: Floats = field(init=False)  # time at which the first token was made
    last_s: Floats = field(init=False)
    longest_gap_s: Floats = field(init=False)  # longest time between two tokens
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    end_s: float = 0.0  # time at which the last step ended
    held_slot_s: list[float] = field(default_factory=list)  # slots held by requests × seconds, by bucket of time
    max_held: int = 0
    steps: int = 0
    wasted_rows: int = 0  # number of rows decoded after their request had ended

    def __post_init__(self) -> None:
        self.first_s, self.last_s, self.longest_gap_s = np.zeros((3, len(self.trace)))

    def note_step(self, starts_s: float, seconds: float, held: int) -> None:
        """Counts the whole step for the bucket in which it starts."""
        self.steps += 1
        self.end_s = starts_s + seconds
        bucket = int(starts_s / self.bucket_s)
        while bucket >= len(self.held_slot_s):
            self.held_slot_s.append(0.0)
        self.held_slot_s[bucket] += held * seconds
        if held > self.max_held:
            self.max_held = held

    def note_end(self, index: int, progress: StepProgress) -> None:
        self.first_s[index], self.last_s[index] = progress.first_s, progress.last_s
        self.longest_gap_s[index] = progress.longest_gap_s


@dataclass(frozen=True, slots=True)
class Targets:
    """Limits in seconds. A request is good if its first token and every gap between its tokens stay within them."""

    first_token_s: float
    gap_s: float

    def __str__(self) -> str:
        return f"Good: first token within {self.first_token_s:g} s, no gap above {self.gap_s:g} s."

    def met(self, first_token_s: Floats, longest_gap_s: Floats) -> npt.NDArray[np.bool_]:
        return (first_token_s <= self.first_token_s) & (longest_gap_s <= self.gap_s)


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
    max_kv_use: float
    kv_use_over_time: Floats  # mean share of the slots held by requests, in each bucket of time
    counters: SchedulerCounters
    wasted_rows: int
    steps: int


def summarize(
    outcomes: Sequence[Outcome], duration_s: float, bucket_s: float, overhead_s: float, targets: Targets
) -> ClusterSummary:
    """`duration_s`: seconds during which requests arrive."""
    first_s, last_s, longest = (
        np.concatenate([getattr(outcome, column) for outcome in outcomes])
        for column in ("first_s", "last_s", "longest_gap_s")
    )
    tokens = np.concatenate([outcome.trace.output_tokens for outcome in outcomes])
    first_token_s = first_s - np.concatenate([outcome.trace.arrival_s for outcome in outcomes]) + overhead_s
    end_s = max(outcome.end_s for outcome in outcomes)
    several = tokens > 1
    over_time = _held(outcomes) / (sum(outcome.slots for outcome in outcomes) * bucket_s)
    counts = [[getattr(each.counters, count.name) for each in outcomes] for count in fields(SchedulerCounters)]
    return ClusterSummary(
        output_tokens_per_s=float(tokens.sum()) / end_s,
        requests_per_s=len(tokens) / end_s,
        goodput=float(targets.met(first_token_s, longest).sum()) / duration_s,
        first_token_s=np.sort(first_token_s),
        mean_gap_s=np.sort((last_s - first_s)[several] / (tokens[several] - 1)),
        longest_gap_s=np.sort(longest[several]),
        kv_use=float(over_time.sum()) * bucket_s / end_s,
        max_kv_use=max(outcome.max_held / outcome.slots for outcome in outcomes),
        kv_use_over_time=over_time,
        counters=SchedulerCounters(*map(sum, counts)),
        wasted_rows=sum(outcome.wasted_rows for outcome in outcomes),
        steps=sum(outcome.steps for outcome in outcomes),
    )


def _held(outcomes: Sequence[Outcome]) -> Floats:
    held = np.zeros(max(len(outcome.held_slot_s) for outcome in outcomes))
    for outcome in outcomes:
        held[: len(outcome.held_slot_s)] += outcome.held_slot_s
    return held


class SimulatedEngine(SteppedEngine):
    """Runs a trace to its end, once. `jumps=False` decides every step; the outcome is the same."""

    def __init__(self, trace: Trace, cost: StepCost, limits: Limits, bucket_s: float, jumps: bool = True) -> None:
        self._outcome = Outcome(trace, limits.capacity, bucket_s)
        self._requests, self._output_tokens = RequestMaker(trace), trace.output_tokens.tolist()
        super().__init__(cost, limits, self._outcome, jumps)
        self._outcome.counters = self.scheduler.counters

    def run(self) -> Outcome:
        """Runs the trace to its end. ValueError for a request that does not fit into the slots even alone."""
        play_arrivals(self._outcome.trace.arrival_s, self._arrive)
        self.advance(inf)
        assert self.scheduler.is_idle and not self._live, "some requests never ended"
        return self._outcome

    def _arrive(self, index: int, arrival_s: float) -> None:
        self.advance(arrival_s)
        request = self._requests.make(index)
        needed = len(request.input_ids) + request.max_new_tokens
        if needed > self._limits.capacity:
            raise ValueError(
                f"request {index + 1} of an engine's trace may need {needed} token slots, and there are"
                f" {self._limits.capacity}: a router would refuse it, so leave it out"
            )
        self.submit(Arrival(arrival_s, index, request, self._output_tokens[index]))


def simulate(
    trace: Trace, cost: StepCost, limits: Mapping[str, Limits], engines: int, bucket_s: float
) -> dict[str, list[Outcome]]:
    """The outcomes of all engines, by name of the limits. Requests are dealt to the engines in turn. Engines do not
    affect each other, so each can be simulated alone."""
    tasks = [(trace.dealt(i, engines), cost, each, bucket_s) for each in limits.values() for i in range(engines)]
    workers = min(os.cpu_count() or 1, len(tasks))
    if workers == 1:
        outcomes = [_run(*task) for task in tasks]
    else:
        # The simulation makes no reference cycles, and looking for them takes time.
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=gc.disable) as pool:
            outcomes = list(pool.map(_run, *zip(*tasks, strict=True)))
    return {name: outcomes[i * engines : (i + 1) * engines] for i, name in enumerate(limits)}


def _run(trace: Trace, cost: StepCost, limits: Limits, bucket_s: float) -> Outcome:
    return SimulatedEngine(trace, cost, limits, bucket_s).run()
