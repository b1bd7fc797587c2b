import pytest

from text_generation_router.scheduling.admission import AdmissionMode
from text_generation_router.scheduling.limits import Limits
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
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
