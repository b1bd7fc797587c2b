"""A state machine: requests arrive, pause, end and are cancelled while up to two steps are in flight, steps fail and
shards die. A model of a shard checks that every step finds exactly the keys it needs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling import costs
from text_generation_router.scheduling.adapter_slots import AdapterRoom
from text_generation_router.scheduling.blame import MAX_COUNTS, MAX_LOSSES
from text_generation_router.scheduling.costs import StepWork
from text_generation_router.scheduling.memory.computed import ComputedHistory
from text_generation_router.scheduling.request import GenerationRequest, Limits, Past, Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import (
    AdapterStep,
    Applied,
    ClearStep,
    FilterStep,
    ForwardStep,
    Step,
    StepAnswer,
)
from text_generation_router.scheduling.tests.shard_model import ShardModel, logprobs_after, next_token

CAPACITY, MAX_ROWS, BUDGET = 64, 6, 16
ONE_TENANT = [Share("a")]
TWO_OWNERS = [Share("a"), Share("b")]
TWO_TENANTS = [Share("a", "x"), Share("a", "y")]
MIXED = [Share("a", "x"), Share("a", "y"), Share("b", "x"), Share("c")]


@dataclass
class Record:
    """Losses that met a request since its last progress, counted independently of the scheduler."""

    losses: int = 0
    alone: int = 0
    furthest: int = 0  # end of the furthest confirmed chunk, in tokens

    def clear(self) -> None:
        self.losses = self.alone = 0


@dataclass
class RandomCosts:
    """Steps cost anything: a budget of prompt tokens may be the largest in one step and the smallest in the next."""

    random: Random

    def seconds(self, work: StepWork) -> float | None:
        return self.random.choice([None, 1.0, 1.0 + self.random.random() * work.prompt_tokens])

    def learn(self, work: StepWork, seconds: float) -> None:
        assert seconds == work.rows + work.prompt_tokens


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(AdmissionMode),
        prefix_caching=st.booleans(),
        ratio=st.sampled_from([0.0, 0.3, 1.2]),
        learned=st.booleans(),
        shares=st.sampled_from([ONE_TENANT, TWO_OWNERS, TWO_TENANTS, MIXED]),
        priority_between_tenants=st.booleans(),
        end_tokens=st.sampled_from([frozenset(), frozenset({1})]),
        slowdown=st.sampled_from([0.0, 1.0, 4.0]),
        adapters=st.sampled_from([0, 0, 2, 3, 5]),
        deaths=st.sets(st.integers(1, 60), max_size=5),
        random=st.randoms(use_true_random=False),
    )
    def begin(
        self,
        mode: AdmissionMode,
        prefix_caching: bool,
        ratio: float,
        learned: bool,
        shares: list[Share],
        priority_between_tenants: bool,
        end_tokens: frozenset[int],
        slowdown: float,
        adapters: int,
        deaths: set[int],
        random: Random,
    ) -> None:
        """`deaths`: numbers of answers in whose place the engine dies."""
        self.deaths, self.num_answers = deaths, 0
        self.patch = patch.object(costs, "FEWEST_TOKENS", 1)
        self.patch.start()
        self.limits = Limits(
            CAPACITY,
            MAX_ROWS,
            BUDGET,
            SchedulingFlags(
                waiting_served_ratio=ratio,
                max_waiting_tokens=5,
                admission=mode,
                prefix_caching=prefix_caching,
                priority_between_tenants=priority_between_tenants,
                max_prefill_slowdown=slowdown,
            ),
        )
        self.end_tokens = end_tokens
        self.costs = RandomCosts(random)
        self.scheduler = Scheduler(self.limits, end_tokens=end_tokens, costs=self.costs)
        names = tuple(f"adapter{number}" for number in range(adapters))
        self.room = AdapterRoom(names, 2, 2, resident=names[:2])
        self.unready: list[str] = []  # adapters that the shard reads
        self.mode = mode
        if learned:
            # Admission learns lengths that are too short. Real outputs are longer, so that slots run out.
            for length in range(1, 41):
                self.scheduler._admission.learn(length % 5 + 1)
        self.begin_epoch()
        self.alive: dict[int, Running] = {}
        self.deadly: set[int] = set()  # ids of requests that kill the shards in each step that carries one of them
        self.records: dict[int, Record] = {}
        self.in_flight: list[Step] = []
        self.shares = shares
        # Whether preemptions are possible that admission cannot foresee.
        self.disturbed = len(shares) > 1 or self.room.is_short

    def begin_epoch(
        self, successor: ShardModel | None = None, computed: Sequence[ComputedHistory] | None = None
    ) -> None:
        """`successor`: the shard, if it has the keys and the adapters of the one before. Otherwise slots are empty,
        but at the start. `computed`: what it tells of its keys to a new engine."""
        is_kept = successor is not None and computed is None
        if successor is not None:
            slots = tuple(successor.adapters.get(slot, "") for slot in range(2))
            self.room = replace(self.room, resident=slots if self.room.is_short else self.room.known)
        facts = dict(adapters=self.room, has_kept_cache=is_kept, computed=computed or ())
        assert self.scheduler.begin_epoch(CAPACITY, self.end_tokens, **facts) == []  # type: ignore[arg-type]
        self.unready.clear()
        self.shard = successor or ShardModel(MAX_ROWS, has_slots=self.room.is_short)
        self.shard.adapters = {slot: name for slot, name in enumerate(self.room.resident) if name}
        if self.room.is_short:
            self.room = replace(self.room, resident=())

    @rule(
        length=st.integers(1, 40),
        new=st.integers(0, 20),
        twos=st.integers(0, 3),
        whose=st.integers(0, 3),
        priority=st.integers(0, 1),
        namespace=st.sampled_from(["", "", "salt"]),
        kills=st.integers(0, 9),
        top_n=st.sampled_from([None, None, 0, 2]),
        made=st.sampled_from([0, 0, 0, 1, 5]),
        losses=st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 0), (2, 2)]),
        age_s=st.integers(0, 3),
        unready=st.booleans(),
        adapter=st.integers(0, 9),
    )
    def add(
        self,
        length: int,
        new: int,
        twos: int,
        whose: int,
        priority: int,
        namespace: str,
        kills: int,
        top_n: int | None,
        made: int,
        losses: tuple[int, int],
        age_s: int,
        unready: bool,
        adapter: int,
    ) -> None:
        """`top_n`: most likely tokens with each log-probability of the prompt; None: no log-probabilities. `made`:
        number of tokens that another engine has made. `losses`: what counts against the request until now."""
        if length + new - 1 <= CAPACITY:
            ids = [1] * (length - min(length, twos)) + [2] * min(length, twos)
            share = self.shares[whose % len(self.shares)]
            digest = self.room.known[adapter] if adapter < len(self.room.known) else ""
            request = GenerationRequest(
                tuple(ids),
                new,
                share=share,
                priority=priority,
                namespace=(namespace, digest),
                prompt_logprobs=top_n,
                adapter=digest,
            )
            past = Past(tuple(self.first_tokens(ids, min(made, new - 1))), age_s, made > 0, *losses)
            add = self.scheduler.add_unready if unready else self.scheduler.add
            running = add(request, past)
            self.alive[running.id] = running
            self.records[running.id] = Record(sum(losses), losses[1])
            self.disturbed |= running.blame.runs_alone
            if kills == 0:
                self.deadly.add(running.id)

    def first_tokens(self, ids: list[int], most: int) -> list[int]:
        """The first tokens of the text after `ids`, before a token that ends it."""
        history = list(ids)
        while len(history) < len(ids) + most and (token := next_token(history)) not in self.end_tokens:
            history.append(token)
        return history[len(ids) :]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        self.scheduler.cancel(request.id)

    @precondition(lambda self: self.scheduler._unready)
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        self.scheduler.make_ready(data.draw(st.sampled_from(sorted(self.scheduler._unready))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end_late(self, data: st.DataObject) -> None:
        """A stop string is found after more tokens were made, whatever has become of the request meanwhile."""
        request = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        self.scheduler.end(request.id, data.draw(st.integers(0, len(request.output_ids))))
        assert request.ended

    @invariant()
    def the_queue_counts_its_tokens(self) -> None:
        queue = self.scheduler.queue
        assert queue.num_tokens == sum(request.num_tokens for request in queue.waiting())

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def decide(self) -> None:
        step = self.scheduler.next_step()
        self.unready += self.scheduler.adapters.take_unready()
        if step is not None:
            self.in_flight.append(step)
        if isinstance(step, ForwardStep):
            assert sum(chunk.end - chunk.start for chunk in step.chunks) <= BUDGET
            assert not {i for i in step.request_ids if i in self.alive and self.alive[i].paused} & set(step.decode_ids)
            self.suspects_run_alone()

    @precondition(lambda self: self.unready)
    @rule(data=st.data())
    def adapter_is_read(self, data: st.DataObject) -> None:
        self.scheduler.adapters.note_ready(self.unready.pop(data.draw(st.integers(0, len(self.unready) - 1))))

    def suspects_run_alone(self) -> None:
        aboard = self.aboard(self.in_flight)
        alone = [i for i in aboard if i in self.alive and self.alive[i].blame.runs_alone]
        assert len(aboard) == 1 or not alone, "what happens to a suspect now might be the work of another"

    @staticmethod
    def aboard(steps: list[Step]) -> set[int]:
        return {i for step in steps if isinstance(step, ForwardStep) for i in step.request_ids}

    @precondition(lambda self: self.in_flight)
    @rule(eos=st.integers(0, 9), poisoned=st.integers(0, 19))
    def answer(self, eos: int, poisoned: int) -> None:
        if self.someone_dies(is_kept=eos % 2 == 0):
            return
        step = self.in_flight.pop(0)
        tokens = self.shard.run(step)
        failures = dict.fromkeys(list(tokens)[poisoned : poisoned + 1], "its logits are not finite")
        seconds = 0
        if isinstance(step, ForwardStep):
            seconds = len(step.decode_ids) + sum(chunk.end - chunk.start for chunk in step.chunks)
        made = StepAnswer(
            number=step.number,
            request_ids=list(tokens),
            token_ids=list(tokens.values()),
            total_ns=seconds * 10**9,
            failures=failures,
            prompt_logprobs=self.shard.prompts,
        )
        applied = self.apply(step, made)
        for request_id in applied.computed:
            request = self.alive.pop(request_id)
            assert request.ended and not request.request.max_new_tokens
            self.prompt_is_known(request)
        for request_id, reason in applied.failed.items():
            assert reason == failures[request_id]
            del self.alive[request_id]
        for place, (request_id, taken) in enumerate(zip(tokens, applied.taken, strict=True)):
            if request_id not in self.alive:
                assert not taken
                continue
            request = self.alive[request_id]
            assert taken == (tokens[request_id],) == (request.output_ids[-1],)
            self.prompt_is_known(request)
            self.records[request_id].clear()
            count, is_end = len(request.output_ids), taken[0] in self.end_tokens
            assert count <= request.request.max_new_tokens
            assert (request_id in applied.ended) == (is_end or count == request.request.max_new_tokens)
            if place == eos or request_id in applied.ended:
                self.end(request)
        for chunk in step.chunks if isinstance(step, ForwardStep) else ():
            record = self.records[chunk.request_id]
            if chunk.end > record.furthest:
                record.furthest = chunk.end
                record.clear()

    def someone_dies(self, is_kept: bool) -> bool:
        """Whether the engine or the shards have died in place of an answer."""
        self.num_answers += 1
        if self.num_answers in self.deaths:
            self.engine_dies(num_run=self.num_answers % 3)
            return True
        if self.aboard(self.in_flight[:1]) & self.deadly:
            self.shards_die(is_kept)
            return True
        return False

    def apply(self, step: Step, made: StepAnswer) -> Applied:
        applied = self.scheduler.apply(made)
        if isinstance(step, AdapterStep):
            self.scheduler.note_adapter(step.adapter)
        return applied

    @staticmethod
    def prompt_is_known(request: Running) -> None:
        """Each log-probability that the request wants of its prompt was given exactly once, in order."""
        ids, top_n = request.request.input_ids, request.request.prompt_logprobs
        assert (request.prompt_logprobs is None) == (top_n is None)
        if request.prompt_logprobs is not None and top_n is not None and len(ids) > 1:
            found, expected = request.prompt_logprobs.joined(), logprobs_after(ids, 0, len(ids) - 1, top_n)
            assert found.logprobs_P.tolist() == expected.logprobs_P.tolist()
            assert found.top_ids_PK.tolist() == expected.top_ids_PK.tolist()

    def end(self, request: Running) -> None:
        """Ends a request whose text is complete. The scheduler may have ended it already, by its length or its last
        token."""
        del self.alive[request.id]
        self.scheduler.end(request.id, len(request.output_ids))
        assert request.ended
        history = list(request.request.input_ids)
        for token in request.output_ids:
            assert token == next_token(history), "a text is not what it would have been alone"
            history.append(token)

    @precondition(lambda self: self.in_flight and isinstance(self.in_flight[0], ForwardStep))
    @rule()
    def fail(self) -> None:
        failed = self.in_flight.pop(0)
        assert isinstance(failed, ForwardStep)
        self.in_flight.clear()
        self.shard.fail(failed)
        self.lose([failed])
        self.in_flight.append(self.scheduler.clear())
        assert isinstance(self.in_flight[0], ClearStep)

    @rule(is_kept=st.booleans())
    def shards_die(self, is_kept: bool) -> None:
        """Begins a new epoch. The cause may be any step in flight, or something outside the shards. `is_kept`: the next
        shards have the keys of these."""
        unanswered, self.in_flight = self.in_flight, []
        self.lose(unanswered)
        self.begin_epoch(self.shard.successor(unanswered) if is_kept else None)

    @precondition(lambda self: self.shard.rows)
    @rule(num_run=st.integers(0, 2))
    def engine_dies(self, num_run: int) -> None:
        """The shard lives on, has run `num_run` of the steps in flight, and tells the next engine what it has computed.
        Fronts know the tokens of answered steps, and send all requests again."""
        for step in self.in_flight[:num_run]:
            self.shard.run(step)
        self.in_flight.clear()
        alive, unready, deadly = self.alive, self.scheduler._unready, self.deadly
        self.alive, self.records, self.deadly, self.disturbed = {}, {}, set(), True
        self.scheduler = Scheduler(self.limits, end_tokens=self.end_tokens, costs=self.costs)
        self.begin_epoch(self.shard, self.shard.computed())
        for request in alive.values():
            losses = request.blame.suspicions, request.blame.counts
            past = Past(tuple(request.output_ids), 0.0, request.has_begun, *losses)
            add = self.scheduler.add_unready if request.id in unready else self.scheduler.add
            running = add(request.request, past)
            running.paused = request.paused
            self.alive[running.id], self.records[running.id] = running, Record(sum(losses), losses[1])
            if request.id in deadly:
                self.deadly.add(running.id)

    def lose(self, unanswered: list[Step]) -> None:
        self.disturbed = True
        aboard = self.aboard(unanswered)
        for request_id in aboard:
            self.records[request_id].losses += 1
            self.records[request_id].alone += len(aboard) == 1
        for request in self.scheduler.put_back([step for step in unanswered if isinstance(step, ForwardStep)]):
            del self.alive[request.id]
            record = self.records[request.id]
            assert record.losses >= MAX_LOSSES and record.alone >= MAX_COUNTS, "it ends over what may be others' doing"
        for request_id in self.deadly & self.alive.keys():
            assert self.records[request_id].losses < MAX_LOSSES, "it goes on killing"

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: st.DataObject, paused: bool) -> None:
        self.alive[data.draw(st.sampled_from(sorted(self.alive)))].paused = paused
        self.disturbed |= paused

    @invariant()
    def the_books_are_right(self) -> None:
        scheduler = self.scheduler
        assert scheduler.books() is None
        owned = scheduler.memory.slots.num_used - scheduler.memory.cache.num_tokens
        held = [r for r in [*scheduler.active.running.values(), *scheduler.active.leaving] if r.holding]
        private = [slot for r in held if r.holding for slot in r.holding.private.tolist()]
        assert len(private) == len(set(private)) == owned
        assert len(scheduler.active.running) <= MAX_ROWS

    @invariant()
    def the_accounts_are_right(self) -> None:
        """The accounts of owners and tenants equal the counts of running and waiting requests."""
        running, waiting = (
            Counter(r.request.share for r in requests)
            for requests in (self.scheduler.active.running.values(), self.scheduler.queue.waiting())
        )
        for name, owner in self.scheduler.queue._accounts.owners.items():
            for tenant_name, tenant in owner.tenants.items():
                share = Share(name, tenant_name)
                assert (tenant.num_running, tenant.num_waiting) == (running[share], waiting[share])
            tenants = owner.tenants.values()
            assert owner.num_running == sum(tenant.num_running for tenant in tenants)
            assert owner.num_waiting == sum(tenant.num_waiting for tenant in tenants)
            assert owner.num_tenants_running == sum(tenant.num_running > 0 for tenant in tenants)
        assert self.scheduler.queue.num_tenants_running == len(running)

    @invariant()
    def what_was_promised_is_kept(self) -> None:
        """If admission counts each request at its greatest length, it never has to preempt a request."""
        if not self.disturbed and self.mode is not AdmissionMode.PAST_FUTURE:
            assert self.scheduler.counters.preemptions == 0

    def teardown(self) -> None:
        """At the end no request is paused, and all requests end, even requests that kill the shards in each of their
        steps."""
        if not hasattr(self, "scheduler"):
            return
        self.patch.stop()
        for request in self.alive.values():
            request.paused = False
            self.scheduler.make_ready(request.id)
        for _ in range(20_000):
            step = self.scheduler.next_step() if len(self.in_flight) < 2 else None
            self.unready += self.scheduler.adapters.take_unready()
            if step is not None:
                self.in_flight.append(step)
            elif self.unready:
                self.scheduler.adapters.note_ready(self.unready.pop())
            elif self.in_flight:
                self.answer(99, 99)
            else:
                break
        assert not self.alive, "a request waits for ever"
        assert self.scheduler.is_idle and self.scheduler.memory.num_held == 0
        assert not self.shard.rows and self.scheduler.books() is None
        assert isinstance(self.scheduler.next_step(), FilterStep | None)


TestSchedulerMachine = SchedulerMachine.TestCase
