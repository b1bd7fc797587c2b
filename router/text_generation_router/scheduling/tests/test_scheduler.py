import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Limits, Scheduler
from text_generation_router.scheduling.step import ClearStep, FilterStep, ForwardStep, Step

CAPACITY = 64


def make_request(length: int, new: int) -> GenerationRequest:
    return GenerationRequest(tuple(range(length)), new)


def make_scheduler(**limits: object) -> Scheduler:
    defaults: dict[str, object] = {"capacity": CAPACITY, "max_rows": 8, "max_batch_prefill_tokens": 16}
    return Scheduler(Limits(**{**defaults, **limits}))  # type: ignore[arg-type]


def run_to_end(scheduler: Scheduler) -> list[Step]:
    """Answers every step at once with token 0."""
    steps = []
    while step := scheduler.next_step():
        steps.append(step)
        answer(scheduler, step)
    return steps


def answer(scheduler: Scheduler, step: Step) -> None:
    if isinstance(step, ForwardStep):
        for request_id in sampled(step):
            running = scheduler.confirm(request_id, 0)
            if running and len(running.output_ids) == running.request.max_new_tokens:
                scheduler.end(running, step.number)
    scheduler.answered(step.number)


def sampled(step: ForwardStep) -> list[int]:
    return [*step.decode_ids, *(c.request_id for c in step.chunks if c.last)]


def test_a_request_is_prefilled_once_and_decoded_to_its_limit() -> None:
    scheduler = make_scheduler()
    running = scheduler.add(make_request(5, 3))
    first, *others, last = run_to_end(scheduler)
    assert isinstance(first, ForwardStep) and [c.end for c in first.chunks] == [5]
    assert [step.decode_ids for step in others if isinstance(step, ForwardStep)] == [(1,), (1,)]
    assert isinstance(last, FilterStep) and last.keep == ()
    assert running.output_ids == [0, 0, 0]
    assert scheduler.slots.num_used == 0 and scheduler.is_idle


def test_two_steps_may_be_in_flight_and_no_row_runs_past_its_limit() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(5, 2))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    assert second.decode_ids == (1,)
    assert scheduler.next_step() is None


def test_long_prompts_come_in_chunks_while_others_go_on() -> None:
    scheduler = make_scheduler()
    short = scheduler.add(make_request(2, 20))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    scheduler.add(make_request(40, 1))
    chunks = [step for step in run_to_end(scheduler) if isinstance(step, ForwardStep) and step.chunks]
    assert [(c.start, c.end, c.last) for step in chunks for c in step.chunks] == [
        (0, 16, False),
        (16, 32, False),
        (32, 40, True),
    ]
    assert all(step.decode_ids == (short.id,) for step in chunks)


def test_a_request_waits_until_everything_it_may_need_is_free() -> None:
    scheduler = make_scheduler()
    first = scheduler.add(make_request(8, 40))
    second = scheduler.add(make_request(8, 10))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    assert [c.request_id for c in step.chunks] == [first.id]
    answer(scheduler, step)
    scheduler.end(first, step.number)
    assert isinstance(scheduler.next_step(), FilterStep)
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    assert [c.request_id for c in step.chunks] == [second.id]


def test_slots_return_only_when_the_last_step_that_holds_them_has_answered() -> None:
    scheduler = make_scheduler()
    running = scheduler.add(make_request(4, 10))
    first, second = scheduler.next_step(), scheduler.next_step()
    answer(scheduler, first)  # type: ignore[arg-type]
    scheduler.end(running, first.number)  # type: ignore[union-attr]
    assert scheduler.slots.num_used == 5
    assert scheduler.confirm(running.id, 7) is None
    scheduler.answered(second.number)  # type: ignore[union-attr]
    assert scheduler.slots.num_used == 0


@pytest.mark.parametrize(("ratio", "joins"), [(0.3, True), (1.2, False)])
def test_the_waiting_interrupt_the_running_only_when_there_are_enough(ratio: float, joins: bool) -> None:
    scheduler = make_scheduler(waiting_served_ratio=ratio, max_waiting_tokens=5)
    for _ in range(3):
        scheduler.add(make_request(2, 15))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    scheduler.add(make_request(2, 1))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep) and bool(step.chunks) is joins
    assert step.concat_reason == ("backpressure" if joins else None)


def test_after_max_waiting_tokens_anybody_may_join() -> None:
    scheduler = make_scheduler(waiting_served_ratio=1.2, max_waiting_tokens=5)
    for _ in range(3):
        scheduler.add(make_request(2, 15))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    scheduler.add(make_request(2, 1))
    reasons = [step.concat_reason for step in run_to_end(scheduler) if isinstance(step, ForwardStep)]
    assert reasons[:6] == [None] * 5 + ["wait_exceeded"]


def test_after_a_failed_step_everybody_starts_again_from_what_is_confirmed() -> None:
    scheduler = make_scheduler()
    running = scheduler.add(make_request(4, 10))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    failed = scheduler.next_step()
    assert isinstance(failed, ForwardStep)
    given_up, clear = scheduler.put_back(failed.request_ids), scheduler.clear()
    assert isinstance(clear, ClearStep) and clear.number == failed.number + 1 and not given_up
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    (chunk,) = step.chunks
    assert chunk.first is not None and chunk.first.ids == (0, 1, 2, 3, 0) and chunk.first.prompt_length == 4
    given_up = scheduler.put_back(step.request_ids)
    scheduler.clear()
    assert given_up == [running] and scheduler.slots.num_used == 0


def test_suspects_start_alone_so_that_a_second_failure_names_the_culprit() -> None:
    scheduler = make_scheduler()
    bad, good = scheduler.add(make_request(4, 3)), scheduler.add(make_request(4, 3))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    scheduler.put_back(step.request_ids)
    scheduler.clear()
    given_up: list[Running] = []
    while step := scheduler.next_step():
        if isinstance(step, ForwardStep) and bad.id in step.request_ids:
            given_up += scheduler.put_back(step.request_ids)
        else:
            answer(scheduler, step)
    assert given_up == [bad] and good.output_ids == [0, 0, 0]


def test_suspects_follow_each_other_without_waiting_for_others_to_decode() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=16, max_batch_prefill_tokens=64)
    for _ in range(16):
        scheduler.add(make_request(4, 30))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep) and len(step.chunks) == 16
    scheduler.put_back(step.request_ids)
    scheduler.clear()
    steps = []
    while scheduler.num_waiting:
        steps.append(scheduler.next_step())
        answer(scheduler, steps[-1])  # type: ignore[arg-type]
    assert len(steps) == 16 and all(isinstance(step, ForwardStep) and len(step.chunks) == 1 for step in steps)


def test_a_paused_request_is_left_out_and_keeps_its_slots() -> None:
    scheduler = make_scheduler()
    paused, other = scheduler.add(make_request(4, 6)), scheduler.add(make_request(4, 6))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    paused.paused = True
    run_to_end(scheduler)
    assert len(other.output_ids) == 6 and len(paused.output_ids) == 1 and scheduler.slots.num_used == 4
    paused.paused = False
    run_to_end(scheduler)
    assert len(paused.output_ids) == 6 and scheduler.slots.num_used == 0


def test_paused_requests_keep_nobody_from_joining() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=32, max_batch_prefill_tokens=64)
    readers = [scheduler.add(make_request(2, 20)) for _ in range(12)]
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    for reader in readers:
        reader.paused = True
    for _ in range(2):
        newcomer = scheduler.add(make_request(2, 3))
        run_to_end(scheduler)
        assert len(newcomer.output_ids) == 3


def test_a_suspect_shares_no_step_even_when_its_prompt_takes_several() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=8, max_batch_prefill_tokens=16)
    suspects = [scheduler.add(make_request(length, 3)) for length in (40, 4, 20)]
    while scheduler.num_waiting:
        answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    scheduler.put_back([request.id for request in suspects])
    innocent = scheduler.add(make_request(4, 3))
    prefills = [step for step in run_to_end(scheduler) if isinstance(step, ForwardStep) and step.chunks]
    assert all(len(step.request_ids) == 1 for step in prefills if step.chunks[0].request_id != innocent.id)
    assert all(len(request.output_ids) == 3 for request in [*suspects, innocent])


def test_a_new_generation_starts_with_empty_slots_and_gives_up_what_cannot_fit() -> None:
    scheduler = make_scheduler()
    large, small = scheduler.add(make_request(20, 20)), scheduler.add(make_request(4, 6))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    assert scheduler.put_back(()) == [] and scheduler.begin_generation(20) == [large]
    assert scheduler.num_reserved == 0 and scheduler.slots.num_used == 0
    (first, *_) = run_to_end(scheduler)
    assert first.number == 1 and len(small.output_ids) == 6 and large.ended


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and end while up to two steps are in flight; a model of the shard checks every step."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.alive: list[Running] = []
        self.in_flight: list[Step] = []
        self.answered = 0
        self.rows: dict[int, dict[int, int]] = {}  # request → position → slot, as the shard knows it

    @rule(length=st.integers(1, 40), new=st.integers(1, 20))
    def add(self, length: int, new: int) -> None:
        if length + new <= CAPACITY:
            self.alive.append(self.scheduler.add(make_request(length, new)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.scheduler.end(running, self.answered)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def decide(self) -> None:
        step = self.scheduler.next_step()
        if step is None:
            return
        self.in_flight.append(step)
        if isinstance(step, FilterStep):
            self.rows = {i: row for i, row in self.rows.items() if i in step.keep}
            assert set(step.keep) == set(self.rows)
        elif isinstance(step, ForwardStep):
            self.place(step)

    def place(self, step: ForwardStep) -> None:
        assert sum(c.end - c.start for c in step.chunks) <= 16
        for chunk in step.chunks:
            if chunk.first is not None:
                assert chunk.request_id not in self.rows
                self.rows[chunk.request_id] = dict(enumerate(chunk.first.slots.tolist()))
        for request_id, slot in zip(step.decode_ids, step.decode_slots.tolist(), strict=True):
            self.rows[request_id][len(self.rows[request_id])] = slot
        assert len(self.rows) <= 8

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        step = self.in_flight.pop(0)
        if isinstance(step, ForwardStep):
            for request_id in sampled(step):
                running = self.scheduler.confirm(request_id, 1)
                if running is None:
                    continue
                at_limit = len(running.output_ids) == running.request.max_new_tokens
                assert len(running.output_ids) <= running.request.max_new_tokens
                if at_limit or data.draw(st.integers(0, 9)) == 0:
                    self.alive.remove(running)
                    self.scheduler.end(running, step.number)
        self.answered = step.number
        self.scheduler.answered(step.number)

    @precondition(lambda self: self.in_flight and isinstance(self.in_flight[0], ForwardStep))
    @rule()
    def fail(self) -> None:
        failed = self.in_flight.pop(0)
        assert isinstance(failed, ForwardStep)
        self.in_flight.clear()
        given_up, clear = self.scheduler.put_back(failed.request_ids), self.scheduler.clear()
        assert isinstance(clear, ClearStep)
        self.rows.clear()
        self.answered = clear.number
        self.alive = [running for running in self.alive if running not in given_up]
        assert self.scheduler.slots.num_used == 0

    @precondition(lambda self: self.in_flight)
    @rule()
    def shards_die(self) -> None:
        """A new generation begins; the step that was running may be to blame."""
        aboard = self.in_flight[0].request_ids if isinstance(self.in_flight[0], ForwardStep) else ()
        self.in_flight.clear()
        given_up = self.scheduler.put_back(aboard)
        assert self.scheduler.begin_generation(CAPACITY) == []
        self.rows.clear()
        self.answered = 0
        self.alive = [running for running in self.alive if running not in given_up]

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: st.DataObject, paused: bool) -> None:
        self.alive[data.draw(st.integers(0, len(self.alive) - 1))].paused = paused

    @invariant()
    def no_slot_is_used_by_two_that_are_computed(self) -> None:
        held = [r for r in self.alive if r.num_slots]
        slots = np.concatenate([r.slots[: r.num_slots] for r in held]) if held else np.empty(0)
        assert len(set(slots.tolist())) == len(slots)
        for step in self.in_flight:
            if isinstance(step, ForwardStep):
                used = {slot for i in step.request_ids for slot in self.rows.get(i, {}).values()}
                assert all(self.scheduler.slots._holders[slot] for slot in used)

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        assert self.scheduler.num_reserved <= CAPACITY
        assert self.scheduler.slots.num_used <= self.scheduler.num_reserved

    def teardown(self) -> None:
        """Nobody starves, and in the end nothing is left."""
        for running in self.alive:
            running.paused = False
        for _ in range(2000):
            while len(self.in_flight) < 2 and (step := self.scheduler.next_step()):
                self.in_flight.append(step)
            if not self.in_flight:
                break
            step = self.in_flight.pop(0)
            answer(self.scheduler, step)
        assert self.scheduler.is_idle and self.scheduler.slots.num_used == 0 and self.scheduler.num_reserved == 0
        assert all(len(r.output_ids) == r.request.max_new_tokens for r in self.alive)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
