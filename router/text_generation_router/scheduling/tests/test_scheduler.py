from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.scheduling.admission import AdmissionMode
from text_generation_router.scheduling.futures import ENOUGH
from text_generation_router.scheduling.limits import Limits
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.share import Share
from text_generation_router.scheduling.step import ClearStep, FilterStep, ForwardStep, Step

CAPACITY = 64


def make_request(length: int, new: int, first: int = 0) -> GenerationRequest:
    return GenerationRequest(tuple(range(first, first + length)), new)


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
    assert scheduler.num_held == 0 and scheduler.is_idle


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
    scheduler.add(make_request(40, 1, first=100))
    chunks = [step for step in run_to_end(scheduler) if isinstance(step, ForwardStep) and step.chunks]
    assert [(c.start, c.end, c.last) for step in chunks for c in step.chunks] == [
        (0, 16, False),
        (16, 32, False),
        (32, 40, True),
    ]
    assert all(step.decode_ids == (short.id,) for step in chunks)


def test_where_all_is_reserved_a_request_waits_until_everything_it_may_need_is_free() -> None:
    scheduler = make_scheduler(admission=AdmissionMode.RESERVE)
    first = scheduler.add(make_request(8, 41))
    second = scheduler.add(make_request(8, 10, first=100))
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
    assert scheduler.num_held == 0


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


def test_steps_with_chunks_count_too_for_who_waits_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(capacity=2000, waiting_served_ratio=1.2, max_waiting_tokens=5)
    for i in range(3):
        scheduler.add(make_request(2, 90, first=10 * i))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    for i in range(4):
        scheduler.add(make_request(200, 5, first=1000 * (i + 1)))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    short = scheduler.add(make_request(2, 5, first=900))
    assert steps_until(scheduler, short) <= 6


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
    assert given_up == [running] and scheduler.num_held == 0


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
    assert len(other.output_ids) == 6 and len(paused.output_ids) == 1 and scheduler.num_held == 4
    paused.paused = False
    run_to_end(scheduler)
    assert len(paused.output_ids) == 6 and scheduler.num_held == 0


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
    assert scheduler.num_reserved == 0 and scheduler.num_held == 0
    (first, *_) = run_to_end(scheduler)
    assert first.number == 1 and len(small.output_ids) == 6 and large.ended


def test_a_long_prompt_does_not_keep_short_ones_from_starting() -> None:
    scheduler = make_scheduler(capacity=2000, max_batch_prefill_tokens=64)
    long = scheduler.add(make_request(1000, 1))
    answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    short = [scheduler.add(make_request(10, 1, first=2000 + 10 * i)) for i in range(3)]
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    assert {c.request_id for c in step.chunks if c.last} == {request.id for request in short}
    assert [c.end - c.start for c in step.chunks if c.request_id == long.id] == [64 - 30]


def test_requests_with_the_same_beginning_wait_for_the_one_that_computes_it() -> None:
    scheduler = make_scheduler(capacity=4000, max_rows=40, max_batch_prefill_tokens=100)
    for i in range(32):
        scheduler.add(GenerationRequest((*range(500), 1000 + i), 2))
    run_to_end(scheduler)
    assert scheduler.counters.prefilled_tokens == 500 + 32


def outlive_history(scheduler: Scheduler) -> None:
    """Outputs have been short so far."""
    for _ in range(ENOUGH):
        scheduler._admission.learn(1)


def test_who_has_least_to_lose_makes_room_and_goes_on_where_it_stood() -> None:
    scheduler = make_scheduler()
    outlive_history(scheduler)
    large, small = scheduler.add(make_request(20, 30)), scheduler.add(make_request(8, 30, first=100))
    run_to_end(scheduler)
    counters = scheduler.counters
    assert len(large.output_ids) == len(small.output_ids) == 30
    assert counters.preemptions == 1 and small.most_computed > 8
    # What it had said was still in the cache, but for what the other one took of it.
    assert counters.recomputed_tokens < small.most_computed


def test_while_somebody_waits_to_go_on_nobody_else_joins() -> None:
    scheduler = make_scheduler()
    outlive_history(scheduler)
    first = [scheduler.add(make_request(length, 30, first)) for length, first in ((20, 0), (8, 100))]
    newcomer: Running | None = None
    while step := scheduler.next_step():
        if isinstance(step, ForwardStep) and newcomer is not None and newcomer.id in step.request_ids:
            break
        answer(scheduler, step)
        if scheduler.counters.preemptions and newcomer is None:
            newcomer = scheduler.add(make_request(1, 1, first=200))
    assert newcomer is not None and all(request.ended or request.num_sent > 8 for request in first)


def steps_until(scheduler: Scheduler, request: Running) -> int:
    """How many steps come before its first one."""
    for steps in range(10):
        step = scheduler.next_step()
        answer(scheduler, step)  # type: ignore[arg-type]
        if isinstance(step, ForwardStep) and request.id in step.request_ids:
            return steps
    raise AssertionError("it does not begin")


def test_a_tenant_with_nothing_running_gets_a_row_at_once() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=4)
    many = [scheduler.add(replace(make_request(2, 60, 10 * i), share=Share("many"))) for i in range(50)]
    for _ in range(6):
        answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    one = scheduler.add(replace(make_request(2, 5, first=900), share=Share("one")))
    steps = steps_until(scheduler, one)
    assert steps <= 2, "one filter, then its prompt"
    run_to_end(scheduler)
    assert all(len(request.output_ids) == 60 for request in many) and scheduler.counters.preemptions == 1


def test_a_tenant_with_nothing_running_gets_memory_at_once() -> None:
    scheduler = make_scheduler(admission=AdmissionMode.RESERVE, max_rows=8)
    many = [scheduler.add(replace(make_request(2, 15, 10 * i), share=Share("many"))) for i in range(12)]
    for _ in range(6):
        answer(scheduler, scheduler.next_step())  # type: ignore[arg-type]
    one = scheduler.add(replace(make_request(10, 20, first=900), share=Share("one")))
    steps = steps_until(scheduler, one)
    assert steps <= 4
    run_to_end(scheduler)
    assert all(len(request.output_ids) == 15 for request in many) and len(one.output_ids) == 20


def test_nothing_of_a_request_that_was_not_finite_stays() -> None:
    scheduler = make_scheduler()
    good = scheduler.add(make_request(20, 2))
    run_to_end(scheduler)
    bad = scheduler.add(GenerationRequest((*range(10), *range(50, 80)), 5))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    scheduler.answered(step.number)
    assert bad.cached_tokens == 10 and scheduler.cache.num_tokens > 21
    step = scheduler.next_step()
    scheduler.end(bad, step.number, finished=False, is_good=False)  # type: ignore[union-attr]
    scheduler.answered(step.number)  # type: ignore[union-attr]
    assert scheduler.cache.num_tokens == 21 and good.ended and scheduler.books() is None


def test_a_request_that_was_cancelled_in_its_prompt_leaves_only_what_was_confirmed() -> None:
    scheduler = make_scheduler()
    gone = scheduler.add(make_request(40, 5))
    first, second = scheduler.next_step(), scheduler.next_step()
    answer(scheduler, first)  # type: ignore[arg-type]
    scheduler.end(gone, first.number, finished=False)  # type: ignore[union-attr]
    assert scheduler.cache.num_tokens == 16
    scheduler.answered(second.number)  # type: ignore[union-attr]
    assert scheduler.cache.num_tokens == 32 and scheduler.num_held == 0


@given(st.integers(0, 2**32), st.sampled_from(AdmissionMode))
def test_a_jump_is_many_steps(seed: int, mode: AdmissionMode) -> None:
    """The same requests come to the same schedulers at the same steps; one jumps whenever nothing can change."""
    assert play(seed, mode, jumps=True) == play(seed, mode, jumps=False)


def play(seed: int, mode: AdmissionMode, jumps: bool) -> tuple[object, ...]:
    """Two steps in flight; requests end at lengths that only they know."""
    random = np.random.default_rng(seed)
    arrivals = sorted((int(t), int(n), int(o)) for t, n, o in random.integers((0, 1, 1), (150, 40, 20), size=(25, 3)))
    scheduler = make_scheduler(capacity=100, max_rows=5, admission=mode)
    lengths: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    in_flight: deque[Step] = deque()
    now = 0

    def answer_oldest() -> None:
        step = in_flight.popleft()
        if isinstance(step, ForwardStep):
            for request_id in sampled(step):
                request = scheduler.confirm(request_id, request_id)
                if request and len(request.output_ids) == lengths[request_id]:
                    scheduler.end(request, step.number)
                    ends.append((now, request_id))
        scheduler.answered(step.number)

    while arrivals or not scheduler.is_idle or in_flight:
        while arrivals and arrivals[0][0] <= now:
            _, length, made = arrivals.pop(0)
            lengths[scheduler.add(make_request(length, 20, first=length * 7)).id] = made
        while len(in_flight) < 2 and (step := scheduler.next_step()):
            in_flight.append(step)
        if jumps and len(in_flight) == 2 and (steps := jumpable(scheduler, lengths, arrivals, now)):
            answer_oldest()
            scheduler.jump(steps, lambda request: request.id)
            in_flight = deque(replace(step, number=step.number + steps) for step in in_flight)
            now += steps + 1
        elif in_flight:
            answer_oldest()
            now += 1
        else:
            now = arrivals[0][0]
    return ends, scheduler.counters, scheduler.slots.num_free, scheduler.cache.num_tokens


def jumpable(scheduler: Scheduler, lengths: dict[int, int], arrivals: list[tuple[int, int, int]], now: int) -> int:
    """As many steps as nothing happens in; asked when two are in flight, of which the first will have been answered."""
    quiet = scheduler.quiet_steps()
    if not quiet:
        return 0
    until_end = min(lengths[r.id] - len(r.output_ids) for r in scheduler._running.values()) - 2
    until_arrival = arrivals[0][0] - now - 1 if arrivals else quiet
    return max(0, min(quiet, until_end, until_arrival))
