"""One engine in simulated time: the router's scheduler decides the steps, and a cost model says how long each takes.

Two steps are in flight, as in the router's engine: a step is decided when the step before it starts, without knowing
that step's tokens or the requests that arrive while it runs. While no request can arrive or end, steps are not decided
one by one: `quiet_steps` returns the number of such steps, and the engine jumps over them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from text_generation_benchmark.simulation.cost import StepCost
from text_generation_benchmark.simulation.trace import Floats
from text_generation_router.scheduling.costs import StepWork, keys_of
from text_generation_router.scheduling.jumps import jump, quiet_steps
from text_generation_router.scheduling.memory.observer import CacheObserver
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep, Step, StepAnswer

MAX_IN_FLIGHT = 2
# The id of every token but the last one of a request: only the number of tokens matters.
TOKEN = 7
END_TOKEN = 2
# A jump over fewer steps saves nothing.
FEWEST_STEPS = 2


@dataclass(slots=True, eq=False)
class StepProgress:
    """When the tokens of a request were made, on whatever engine; seconds of the simulation's clock."""

    first_s: float = -1.0  # below 0: no token is made yet
    last_s: float = -1.0
    longest_gap_s: float = 0.0

    def note_token(self, now_s: float) -> None:
        if self.first_s < 0:
            self.first_s = now_s
        elif now_s - self.last_s > self.longest_gap_s:
            self.longest_gap_s = now_s - self.last_s
        self.last_s = now_s


@dataclass(slots=True, eq=False)
class Arrival:
    """A request on its way into the queue."""

    at_s: float
    index: int  # the caller's name for the request
    request: GenerationRequest
    output_tokens: int  # number of output tokens after which the request ends
    progress: StepProgress = field(default_factory=StepProgress)


@dataclass(slots=True, eq=False)
class Live:
    """A request from its arrival until all its tokens are made and no step in flight has a row for it."""

    arrival: Arrival
    running: Running
    prompt_tokens: int

    @property
    def left(self) -> int:
        return self.arrival.output_tokens - len(self.running.output_ids)


@dataclass(slots=True, eq=False)
class InFlight:
    step: Step
    seconds: float | None = None  # seconds that the step takes; None until it runs


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """The scheduler of a simulation need not learn what steps cost."""

    cost: StepCost

    def seconds(self, work: StepWork) -> float:
        return self.cost.seconds(work.rows, work.keys, work.prompt_tokens, work.prompt_keys)

    def learn(self, work: StepWork, seconds: float) -> None:
        pass


class StepBooks(Protocol):
    """What is recorded of an engine."""

    wasted_rows: int

    def note_step(self, starts_s: float, seconds: float, held: int) -> None: ...

    def note_end(self, index: int, progress: StepProgress) -> None: ...


def play_arrivals(
    arrivals_s: Floats,
    arrive: Callable[[int, float], None],
    tick_s: float = inf,
    tick: Callable[[float], None] = lambda now_s: None,
    is_busy: Callable[[], bool] = lambda: False,
) -> None:
    """The events of a simulation, in order of time: `arrive` for each arrival, by its number, and `tick` every `tick_s`
    seconds, after the last arrival too as long as the simulation is busy. Either has to advance the engines."""
    next_tick_s = tick_s
    for number, at_s in enumerate(arrivals_s.tolist()):
        while next_tick_s <= at_s:
            tick(next_tick_s)
            next_tick_s += tick_s
        arrive(number, at_s)
    while is_busy():
        tick(next_tick_s)
        next_tick_s += tick_s


class SteppedEngine:
    """An engine that runs as far as it is told. `jumps=False` decides every step; the outcome is the same."""

    def __init__(
        self,
        cost: StepCost,
        limits: Limits,
        books: StepBooks,
        jumps: bool = True,
        cache_observer: CacheObserver | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            limits, end_tokens=frozenset({END_TOKEN}), costs=KnownCosts(cost), cache_observer=cache_observer
        )
        self._cost = cost
        self._limits = limits
        self._jumps = jumps
        self._arrivals: deque[Arrival] = deque()
        self._now = 0.0
        self._in_flight: deque[InFlight] = deque()
        self._num_forwards = 0  # number of forward steps in flight
        self._live: dict[int, Live] = {}
        # The requests with a row in the last step that ran, and the number of tokens that its rows attended to.
        self._aboard_ids: tuple[int, ...] = ()
        self._aboard: list[Live] = []
        self._kv_tokens = 0
        self._books = books

    def submit(self, arrival: Arrival) -> None:
        """Arrivals come in order of time. The engine has to be advanced to the arrival's time before."""
        self._arrivals.append(arrival)

    def advance(self, until_s: float) -> None:
        """Runs all steps that start before `until_s`. Requests that arrive then may still be submitted."""
        while True:
            self._take_arrivals()
            if self._now >= until_s:
                return
            if self._jumps and self._jump(until_s):
                continue
            self._decide()
            if self._in_flight:
                self._finish_oldest()
            elif self._arrivals and self._arrivals[0].at_s < until_s:
                self._now = self._arrivals[0].at_s
            else:
                return

    def unfinished(self) -> Iterator[tuple[Arrival, Running | None]]:
        """The requests that have not ended; None: still on its way into the queue."""
        for one in self._live.values():
            if not one.running.ended:
                yield one.arrival, one.running
        for arrival in self._arrivals:
            yield arrival, None

    def withdraw(self, index: int) -> Arrival | None:
        """Takes a request back. None: it has begun or ended."""
        for one in self._live.values():
            if one.arrival.index == index and not (one.running.ended or one.running.has_begun):
                self.scheduler.cancel(one.running.id)
                return self._live.pop(one.running.id).arrival
        return None

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0].at_s <= self._now:
            arrival = self._arrivals.popleft()
            running = self.scheduler.add(arrival.request)
            self._live[running.id] = Live(arrival, running, len(arrival.request.input_ids))

    def _decide(self) -> None:
        while self._num_forwards < MAX_IN_FLIGHT and (step := self.scheduler.next_step()):
            self._in_flight.append(InFlight(step))
            self._num_forwards += isinstance(step, ForwardStep)

    def _finish_oldest(self) -> None:
        """Advances the clock to the end of the oldest step in flight. A step that only drops rows takes no time."""
        sent = self._in_flight.popleft()
        step = sent.step
        if not isinstance(step, ForwardStep):
            self.scheduler.apply(StepAnswer(step.number))
            return
        self._num_forwards -= 1
        seconds = self._seconds(step) if sent.seconds is None else sent.seconds
        self._books.note_step(self._now, seconds, self.scheduler.memory.num_held)
        self._now += seconds
        self._take_tokens(step)

    def _seconds(self, step: ForwardStep) -> float:
        """Duration of a step that starts now, when all steps before it have answered."""
        rows = len(step.decode_ids)
        if step.decode_ids == self._aboard_ids:
            self._kv_tokens += rows
        else:
            self._aboard_ids = step.decode_ids
            self._aboard = [self._live[request_id] for request_id in step.decode_ids]
            self._kv_tokens = sum(one.prompt_tokens + len(one.running.output_ids) for one in self._aboard)
        if not step.chunks:
            return self._cost.seconds(rows, self._kv_tokens)
        prompt_tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        prompt_positions = sum(keys_of(chunk.start, chunk.end) for chunk in step.chunks)
        return self._cost.seconds(rows, self._kv_tokens, prompt_tokens, prompt_positions)

    def _take_tokens(self, step: ForwardStep) -> None:
        """Takes the tokens of the step that has just ended."""
        ids = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
        rows = [*self._aboard, *(self._live[request_id] for request_id in ids[len(self._aboard) :])]
        tokens = [END_TOKEN if one.left == 1 else TOKEN for one in rows]
        applied = self.scheduler.apply(StepAnswer(step.number, ids, tokens))
        for one, taken in zip(rows, applied.taken, strict=True):
            if taken:
                one.arrival.progress.note_token(self._now)
            else:
                self._books.wasted_rows += 1
        for request_id in applied.ended:
            arrival = self._live[request_id].arrival
            self._books.note_end(arrival.index, arrival.progress)
        for request_id in applied.freed:
            del self._live[request_id]

    def _jump(self, until_s: float) -> bool:
        """Jumps to the next time at which a step has to be decided, or to the first step that starts at `until_s` or
        later. Returns False if fewer than FEWEST_STEPS steps lie in between.

        A step is decided when the step before it starts. So before a jump, one step in flight is about to run. After
        it, one step is in flight too: the last step that is decided before a request arrives, and before which no
        request ends.
        """
        if len(self._in_flight) != 1:
            return False
        (sent,) = self._in_flight
        if not isinstance(sent.step, ForwardStep) or sent.step.chunks:
            return False
        if sent.seconds is None:
            sent.seconds = self._seconds(sent.step)
        seconds = sent.seconds
        arrival_s = min(until_s, self._arrivals[0].at_s if self._arrivals else inf)
        most = min(one.left for one in self._aboard) - 1
        if most < FEWEST_STEPS or arrival_s <= self._now + seconds:
            return False
        most = min(most, quiet_steps(self.scheduler))
        if most < FEWEST_STEPS:
            return False
        steps, sent.seconds = self._run_unseen(seconds, most, arrival_s)
        jump(self.scheduler, steps, lambda running: TOKEN)
        return True

    def _run_unseen(self, seconds: float, most: int, arrival_s: float) -> tuple[int, float]:
        """Runs at most `most` steps; the first takes `seconds`. Returns the number of steps run, and the seconds of the
        step after them.
        """
        rows, held = len(self._aboard), self.scheduler.memory.num_held
        steps, longest_s, first_s = 0, 0.0, self._now + seconds
        while steps < most and self._now < arrival_s:
            held += rows
            self._books.note_step(self._now, seconds, held)
            before_s, self._now = self._now, self._now + seconds
            if steps and self._now - before_s > longest_s:
                longest_s = self._now - before_s
            self._kv_tokens += rows
            seconds = self._cost.seconds(rows, self._kv_tokens)
            steps += 1
        for one in self._aboard:
            progress = one.arrival.progress
            progress.longest_gap_s = max(progress.longest_gap_s, first_s - progress.last_s, longest_s)
            progress.last_s = self._now
        return steps, seconds
