"""Fronts, engines and a load in simulated time: arrivals, news as often as fronts ask for them, moves, and the loss of
engines."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from text_generation_benchmark.replicas.chats import ChatLoad, Chats, ChatTurn
from text_generation_benchmark.replicas.front import HASHER, NAMESPACE, Policy, SimulatedFront
from text_generation_benchmark.simulation.cost import SimulatedModel
from text_generation_benchmark.simulation.stepped import Arrival, SteppedEngine, StepProgress, play_arrivals
from text_generation_benchmark.simulation.trace import Floats
from text_generation_router.fleet.cache_news import BLOCK_TOKENS, EVERY_MS, CacheLog, next_pace_ms
from text_generation_router.fleet.choice import GAIN_S, EngineLoad, Move, QueuedRequest, plan_moves
from text_generation_router.scheduling.request import GenerationRequest, Limits, Share

TICK_S = EVERY_MS / 1000  # between two news of an engine, if there are few engines
NOTICE_S = 3.0  # seconds after which fronts notice that an engine is lost
# With at most this many engines, each is advanced to the time of each arrival, so that fronts know of ended requests
# at once. Otherwise they know at the next tick.
FEW = 8
SHARE = Share()


@dataclass(frozen=True, slots=True)
class ReplicaLoss:
    """Engines `first` … `end` - 1 are lost at `at_s` and back, with empty caches, at `back_s`."""

    at_s: float
    back_s: float
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated."""

    load: ChatLoad
    arrivals_s: Floats
    model: SimulatedModel
    limits: Limits
    policy: Policy
    num_engines: int = 4
    num_fronts: int = 1
    losses: Sequence[ReplicaLoss] = ()
    moves: bool = True
    seed: int = 0


@dataclass(slots=True, eq=False)
class Sent:
    """A request of a front, on its way."""

    turn: ChatTurn
    front: SimulatedFront
    arrival_s: float
    engine: int = -1  # below 0: no engine had a place for it
    made: int = 0  # output tokens made on engines that are lost
    has_moved: bool = False
    progress: StepProgress = field(default_factory=StepProgress)


class Replica:
    """An engine, its cache's news and its books: of one life."""

    def __init__(self, plan: FleetPlan) -> None:
        self.is_draining = False
        self.wasted_rows = 0
        self.ended: list[int] = []  # requests that have ended since the last look
        self.step_s = 0.0  # mean of the last steps
        self.log = CacheLog(HASHER)
        self.engine = SteppedEngine(plan.model.cost, plan.limits, self, cache_observer=self.log.observer)

    def note_step(self, starts_s: float, seconds: float, held: int) -> None:
        self.step_s += (seconds - self.step_s) / 16

    def note_end(self, index: int, progress: StepProgress) -> None:
        self.ended.append(index)

    @property
    def load(self) -> EngineLoad:
        scheduler = self.engine.scheduler
        running, waiting = scheduler.active.running, len(scheduler.queue)
        computing = sum(request.num_uncomputed for request in running.values())
        wait_s = scheduler.steps_until_start() * self.step_s if waiting else 0.0
        load = EngineLoad(len(running), waiting, scheduler.queue.num_tokens, computing, wait_s)
        return replace(load, is_draining=True) if self.is_draining else load


class Deployment:
    """One simulation. `run` may be called once. `first_engines`: how many engines there are from the start, all by
    default. `on_tick` is called every TICK_S, and may start, drain and stop engines."""

    def __init__(
        self, plan: FleetPlan, first_engines: int | None = None, on_tick: Callable[[float], None] = lambda now_s: None
    ) -> None:
        self.plan = plan
        max_blocks = 2 * plan.limits.capacity // BLOCK_TOKENS
        self.fronts = [
            SimulatedFront(plan.policy, plan.num_engines, max_blocks, i * plan.num_engines // plan.num_fronts)
            for i in range(plan.num_fronts)
        ]
        self.replicas: list[Replica | None] = [None] * plan.num_engines
        self.sent: dict[int, Sent] = {}  # requests that have not ended, by index
        self.done: list[Sent] = []
        self.num_moves = self.num_resumed = 0
        self.prompt_tokens = self.cached_tokens = 0
        # Messages of engines to one front, and the hashes in those of caches.
        self.num_loads = self.num_caches = self.num_hashes = 0
        self._num_ticks = 0
        self._chats = Chats(plan.load, plan.seed)
        self._indexes = itertools.count(1)
        # What happens when, latest first: a lost engine, its notice, its return.
        self._events = sorted(
            (
                (at_s, what, loss)
                for loss in plan.losses
                for what, at_s in enumerate((loss.at_s, min(loss.at_s + NOTICE_S, loss.back_s), loss.back_s))
            ),
            key=lambda event: event[:2],
            reverse=True,
        )
        self._on_tick = on_tick
        for engine in range(plan.num_engines if first_engines is None else first_engines):
            self.start(engine)

    def run(self) -> None:
        play_arrivals(self.plan.arrivals_s, self._arrive, TICK_S, self._tick, lambda: bool(self.sent))
        for replica in filter(None, self.replicas):
            replica.engine.advance(inf)
            self._count(replica)

    # What clients saw, once all requests have ended.

    @property
    def first_token_s(self) -> Floats:
        """Seconds from each request to its first token, HTTP included."""
        return np.array([sent.progress.first_s - sent.arrival_s for sent in self.done]) + self.plan.model.overhead_s

    @property
    def longest_gap_s(self) -> Floats:
        return np.array([sent.progress.longest_gap_s for sent in self.done])

    @property
    def end_s(self) -> float:
        return max(sent.progress.last_s for sent in self.done)

    @property
    def tokens_per_s(self) -> float:
        return sum(sent.turn.output_tokens for sent in self.done) / self.end_s

    @property
    def cached(self) -> float:
        """The part of all prompt tokens that caches had."""
        return self.cached_tokens / self.prompt_tokens

    def _arrive(self, number: int, at_s: float) -> None:
        self._happen(at_s)
        if self.plan.num_engines <= FEW:
            self._collect(at_s)
        front = self.fronts[number % len(self.fronts)]
        self._submit(next(self._indexes), Sent(self._chats.next(), front, at_s), at_s)

    def _submit(self, index: int, sent: Sent, now_s: float) -> None:
        text = sent.turn.with_output(sent.made)
        self.sent[index] = sent
        engine = sent.front.choose(text.array, now_s)
        sent.engine = -1 if engine is None else engine
        if engine is not None:
            self._give(index, sent, text.tuple, now_s)

    def _give(self, index: int, sent: Sent, ids: tuple[int, ...], now_s: float) -> None:
        replica = self.replicas[sent.engine]
        if replica is None:
            return  # the front has not noticed the loss yet
        replica.engine.advance(now_s)
        left = sent.turn.max_new_tokens - sent.made
        request = GenerationRequest(ids, left, share=SHARE, namespace=NAMESPACE)
        arrival = Arrival(now_s, index, request, sent.turn.output_tokens - sent.made, sent.progress)
        replica.engine.submit(arrival)

    def _tick(self, now_s: float) -> None:
        self._happen(now_s)
        self._collect(now_s)
        self._on_tick(now_s)
        self._num_ticks += 1
        every = next_pace_ms(EVERY_MS, self.plan.num_engines) // EVERY_MS  # ticks between two news of an engine
        for engine, replica in enumerate(self.replicas):
            if replica is None or (engine + self._num_ticks) % every:
                continue
            load, news = replica.load, replica.log.take()
            for front in self.fronts:
                front.take_report(engine, load, news)
            self.num_loads += 1
            self.num_caches += len(news)
            self.num_hashes += sum(len(each.added) + len(each.removed) for each in news)
        for index in [index for index, sent in self.sent.items() if sent.engine < 0]:
            self._submit(next(self._indexes), self.sent.pop(index), now_s)
        for front in self.fronts:
            front.tick(now_s)
            if self.plan.moves and self.plan.policy is Policy.SCORE:
                self._move(front, now_s)

    def _collect(self, now_s: float) -> None:
        """Advances all engines, and notes which requests have ended."""
        for replica in filter(None, self.replicas):
            replica.engine.advance(now_s)
            self._take_ended(replica)

    def _take_ended(self, replica: Replica) -> None:
        for index in replica.ended:
            sent = self.sent.pop(index)
            sent.front.leave(sent.engine)
            self.done.append(sent)
            self._chats.answered(sent.turn)
        replica.ended.clear()

    def _move(self, front: SimulatedFront, now_s: float) -> None:
        loads = {engine: load for engine in front.choice.open if (load := front.choice.reported(engine)) is not None}
        if all(load.wait_s < GAIN_S for load in loads.values()):
            return
        queued = [
            QueuedRequest(index, sent.engine, len(sent.turn.prompt), sent.has_moved)
            for index, sent in self.sent.items()
            if sent.front is front and sent.progress.first_s < 0
        ]
        for move in plan_moves(queued, loads):
            self._withdraw(move, now_s)

    def _withdraw(self, move: Move, now_s: float) -> None:
        replica, sent = self.replicas[move.source], self.sent[move.index]
        if replica is None or (arrival := replica.engine.withdraw(move.index)) is None:
            return
        self.num_moves += 1
        front, text = sent.front, sent.turn.with_output(sent.made)
        front.leave(move.source)
        del self.sent[move.index]
        index = next(self._indexes)
        self.sent[index] = sent
        sent.engine, sent.has_moved = move.target, True
        front.send(move.target, text.array, [], now_s)
        self._give(index, sent, arrival.request.input_ids, now_s)

    # Engines that come, that leave, and that are lost.

    def start(self, engine: int) -> None:
        replica = self.replicas[engine] = Replica(self.plan)
        for front in self.fronts:
            front.join(engine, replica.log.snapshot())

    def stop(self, engine: int) -> None:
        """Ends an engine that has no requests."""
        replica = self.replicas[engine]
        assert replica is not None and not any(sent.engine == engine for sent in self.sent.values())
        self._count(replica)
        self.replicas[engine] = None
        for front in self.fronts:
            front.lose(engine)

    def _happen(self, now_s: float) -> None:
        while self._events and self._events[-1][0] <= now_s:
            at_s, what, loss = self._events.pop()
            for engine in range(loss.first, loss.end):
                if what == 0:
                    self._lose(engine, at_s)
                elif what == 1:
                    for front in self.fronts:
                        front.lose(engine)
                else:
                    self.start(engine)
            if what == 1:
                self._resume(loss, now_s)

    def _lose(self, engine: int, now_s: float) -> None:
        replica = self.replicas[engine]
        assert replica is not None
        replica.engine.advance(now_s)
        self._take_ended(replica)
        for arrival, running in replica.engine.unfinished():
            self.sent[arrival.index].made += len(running.output_ids) if running is not None else 0
        self._count(replica)
        self.replicas[engine] = None

    def _resume(self, loss: ReplicaLoss, now_s: float) -> None:
        """Submits all requests of the lost engines again, oldest first."""
        for index in [index for index, sent in self.sent.items() if loss.first <= sent.engine < loss.end]:
            sent = self.sent.pop(index)
            self.num_resumed += 1
            self._submit(next(self._indexes), sent, now_s)

    def _count(self, replica: Replica) -> None:
        counters = replica.engine.scheduler.counters
        self.cached_tokens += counters.prefix_hit_tokens
        self.prompt_tokens += counters.prefix_hit_tokens + counters.prefilled_tokens
