"""What a loss of the shards, or of an engine, does to the order of requests, and which request it ends."""

import random
from collections import deque
from collections.abc import Callable

import pytest

from text_generation_router.scheduling.blame import MAX_LOSSES, MAX_SUSPICIONS, reaches
from text_generation_router.scheduling.lines import WINDOW
from text_generation_router.scheduling.request import GenerationRequest, Limits, Past
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ClearStep, ForwardStep, Step, StepAnswer
from text_generation_router.scheduling.tests.answers import (
    answer,
    make_request,
    make_scheduler,
    run_to_end,
)
from text_generation_router.scheduling.tests.shard_model import ShardModel


def lose(scheduler: Scheduler, *unanswered: Step) -> list[Running]:
    """Lets the shards die, or a step fail, while `unanswered` are in flight."""
    given_up = scheduler.put_back([step for step in unanswered if isinstance(step, ForwardStep)])
    scheduler.clear()
    return given_up


def test_after_a_loss_a_request_starts_again_from_its_confirmed_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(4, 10))
    answer(scheduler, scheduler.next_step())
    failed = scheduler.next_step()
    assert isinstance(failed, ForwardStep)
    given_up, clear = scheduler.put_back([failed]), scheduler.clear()
    assert isinstance(clear, ClearStep) and clear.number == failed.number + 1 and not given_up
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    (chunk,) = step.chunks
    assert chunk.first is not None and chunk.first.ids == (0, 1, 2, 3, 0) and chunk.first.prompt_length == 4


def test_after_a_loss_that_left_the_keys_all_streams_go_on_before_an_older_prompt() -> None:
    scheduler = Scheduler(Limits(9000, 100, 40))
    old = scheduler.add(make_request(2000, 5, first=5000))
    streams = [scheduler.add(make_request(2, 90, first=10 * number)) for number in range(WINDOW + 3)]
    while not all(stream.output_ids for stream in streams):
        answer(scheduler, scheduler.next_step())
    assert old.prefilled and not old.output_ids
    assert scheduler.put_back([lost for _ in range(2) if isinstance(lost := scheduler.next_step(), ForwardStep)]) == []
    scheduler.begin_epoch(9000, has_kept_cache=True)
    made = len(streams[0].output_ids)
    first, second = scheduler.next_step(), scheduler.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    assert [(chunk.request_id, chunk.end - chunk.start) for chunk in first.chunks] == [(each.id, 1) for each in streams]
    # Now the prompt goes on as before, after what was confirmed.
    assert [chunk.request_id for chunk in second.chunks] == [old.id] and second.chunks[0].start > 0
    assert set(second.decode_ids) == {stream.id for stream in streams}
    answer(scheduler, first)
    assert len(streams[0].output_ids) == made + 1
    # A later loss that leaves no keys: all go on by age.
    for is_kept in (True, False):
        scheduler.put_back([])
        scheduler.begin_epoch(9000, has_kept_cache=is_kept)
    third = scheduler.next_step()
    assert isinstance(third, ForwardStep) and third.chunks[0].request_id == old.id


@pytest.mark.parametrize("when", ["when its engine works", "before its engine works", "one before the others"])
def test_streams_of_an_engine_that_has_died_go_on_before_an_older_prompt(when: str) -> None:
    scheduler, shard = Scheduler(Limits(9000, 100, 40)), ShardModel(100)
    old = scheduler.add(make_request(2000, 5, first=5000))
    streams = [scheduler.add(make_request(2, 90, first=10 * number)) for number in range(WINDOW + 3)]
    while not all(stream.output_ids for stream in streams):
        step = scheduler.next_step()
        assert step is not None
        tokens = shard.run(step)
        scheduler.apply(StepAnswer(step.number, [*tokens], [*tokens.values()]))
    successor, computed = Scheduler(Limits(9000, 100, 40)), shard.computed()

    def go_on(each: Running) -> Running:
        past = Past(tuple(each.output_ids), age_s=9.0 - each.id / 100, has_run=True)
        return successor.add(each.request, past, now_s=10.0)

    if when != "before its engine works":
        successor.begin_epoch(9000, computed=computed)
    ahead = [go_on(stream) for stream in streams[: when == "one before the others"]]
    if ahead:
        step = successor.next_step()
        assert isinstance(step, ForwardStep) and step.request_ids == (ahead[0].id,)
    prompt, *others = [go_on(each) for each in (old, *streams[len(ahead) :])]
    if when == "before its engine works":
        successor.begin_epoch(9000, computed=computed)
    first, second = successor.next_step(), successor.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    assert first.decode_ids == tuple(each.id for each in ahead)
    assert [(chunk.request_id, chunk.end - chunk.start) for chunk in first.chunks] == [(each.id, 1) for each in others]
    assert [chunk.request_id for chunk in second.chunks] == [prompt.id] and second.chunks[0].start == old.prefilled


def test_streams_that_go_on_after_a_loss_keep_to_the_limit_of_a_step() -> None:
    scheduler = Scheduler(Limits(2000, 100, 16))
    streams = [scheduler.add(make_request(2, 20, first=10 * number)) for number in range(20)]
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    assert scheduler.put_back([lost for _ in range(2) if isinstance(lost := scheduler.next_step(), ForwardStep)]) == []
    scheduler.begin_epoch(2000, has_kept_cache=True)
    first, second = scheduler.next_step(), scheduler.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    assert [chunk.request_id for chunk in first.chunks] == [stream.id for stream in streams[:16]]
    assert [chunk.request_id for chunk in second.chunks] == [stream.id for stream in streams[16:]]


def test_a_request_that_is_always_alone_ends_at_the_fifth_loss_in_a_row() -> None:
    scheduler = make_scheduler()
    only = scheduler.add(make_request(4, 10))
    answer(scheduler, scheduler.next_step())
    for _ in range(MAX_LOSSES - 1):
        assert lose(scheduler, scheduler.next_step()) == []  # type: ignore[arg-type]
    assert lose(scheduler, scheduler.next_step()) == [only]  # type: ignore[arg-type]
    assert scheduler.memory.num_held == 0 and scheduler.is_idle


def test_a_token_between_losses_clears_the_losses_before_it() -> None:
    scheduler = make_scheduler()
    only = scheduler.add(make_request(4, 30))
    for _ in range(25):
        for _ in range(MAX_LOSSES - 1):
            assert lose(scheduler, scheduler.next_step()) == []  # type: ignore[arg-type]
        answer(scheduler, scheduler.next_step())
    assert len(only.output_ids) == 25


def serve_beside(scheduler: Scheduler, bad: Running, kills: Callable[[ForwardStep], bool]) -> list[int]:
    """Runs all requests to their ends with two steps in flight. A step for which `kills` returns true causes a loss of
    all unanswered steps. Returns the number of requests in the unanswered steps of each loss."""
    losses: list[int] = []
    in_flight: deque[Step] = deque()
    while not bad.ended or not scheduler.is_idle:
        while len(in_flight) < 2 and (step := scheduler.next_step()):
            in_flight.append(step)
        step = in_flight[0]
        if isinstance(step, ForwardStep) and kills(step):
            losses.append(len({i for s in in_flight if isinstance(s, ForwardStep) for i in s.request_ids}))
            given_up = lose(scheduler, *in_flight)
            assert given_up in ([], [bad])
            in_flight.clear()
        else:
            answer(scheduler, in_flight.popleft())
    return losses


@pytest.mark.parametrize(("rows", "neighbours"), [(40, 32), (4, 32), (40, 1), (40, 0)])
def test_a_deadly_request_ends_after_two_losses_beside_others_and_three_alone(rows: int, neighbours: int) -> None:
    scheduler = make_scheduler(capacity=2000, max_rows=rows, max_batch_prefill_tokens=64)
    others = [scheduler.add(make_request(4 + i, 12, first=10 * i)) for i in range(neighbours)]
    for _ in range(3):
        if step := scheduler.next_step():
            answer(scheduler, step)
    bad = scheduler.add(make_request(6, 5, first=900))
    losses = serve_beside(scheduler, bad, lambda step: bad.id in step.request_ids)
    assert len(losses) == MAX_LOSSES and losses[2:] == [1, 1, 1]
    assert all(len(request.output_ids) == 12 for request in others) and bad.output_ids == []


def test_a_request_whose_second_chunk_kills_its_shards_is_ended() -> None:
    """Every replay confirms the first chunk again, but only the first confirmation is progress."""
    scheduler = make_scheduler(capacity=2000, max_rows=40, max_batch_prefill_tokens=64)
    others = [scheduler.add(make_request(4 + i, 60, first=10 * i)) for i in range(8)]
    bad = scheduler.add(make_request(100, 5, first=900))

    def kills(step: ForwardStep) -> bool:
        return any(chunk.request_id == bad.id and chunk.start <= 80 < chunk.end for chunk in step.chunks)

    losses = serve_beside(scheduler, bad, kills)
    assert losses[-3:] == [1, 1, 1] and len(losses) <= MAX_LOSSES + 2, "two more while its chunks still have other ends"
    assert all(len(request.output_ids) == 60 for request in others)


def test_a_long_prompt_with_a_new_chunk_between_losses_is_never_ended() -> None:
    scheduler = make_scheduler(capacity=2000, max_batch_prefill_tokens=16)
    long = scheduler.add(make_request(16 * 40, 3))
    for reached in range(1, 40):
        for _ in range(reached):
            answer(scheduler, scheduler.next_step())
        assert lose(scheduler, scheduler.next_step()) == []  # type: ignore[arg-type]
        scheduler.begin_epoch(2000)
    run_to_end(scheduler)
    assert len(long.output_ids) == 3


def test_losses_in_replayed_chunks_do_not_count() -> None:
    scheduler = make_scheduler(capacity=2000, max_batch_prefill_tokens=16)
    long = scheduler.add(make_request(16 * 10, 3))
    for _ in range(9):
        answer(scheduler, scheduler.next_step())
    for step_lost in (0, 1, 2, 3) * 10:
        assert lose(scheduler, *[scheduler.next_step() for _ in range(1)]) == []  # type: ignore[misc]
        scheduler.begin_epoch(2000)
        for _ in range(step_lost):
            answer(scheduler, scheduler.next_step())
    run_to_end(scheduler)
    assert len(long.output_ids) == 3


def test_every_request_ends_while_shards_keep_dying_and_others_keep_coming() -> None:
    """The shards die before all running requests have been replayed. Without moving requests back, the last of them
    would never be computed."""
    scheduler = make_scheduler(capacity=20_000, max_rows=64, max_batch_prefill_tokens=32)
    epochs_left: dict[int, int] = {}
    aboard: list[Running] = []
    chance = random.Random(1)
    for epoch in range(300):
        while len(aboard) < 24:
            aboard.append(scheduler.add(make_request(chance.choice([20, 20, 100]), 12, first=1000 * len(epochs_left))))
            epochs_left[aboard[-1].id] = epoch + 30
        for _ in range(chance.randint(4, 24)):
            answer(scheduler, scheduler.next_step())
        lose(scheduler, scheduler.next_step())  # type: ignore[arg-type]
        scheduler.begin_epoch(20_000)
        aboard = [request for request in aboard if not request.ended]
        assert all(epoch < epochs_left[request.id] for request in aboard)


def test_streams_that_wait_since_an_earlier_loss_are_computed_first() -> None:
    scheduler = make_scheduler(capacity=2000, max_rows=40, max_batch_prefill_tokens=64)
    streams = [scheduler.add(make_request(60, 50, first=100 * i)) for i in range(6)]
    while not all(stream.output_ids for stream in streams):
        answer(scheduler, scheduler.next_step())
    order: list[int] = []
    for num_answered in (2, 0, 6):
        lose(scheduler)
        scheduler.begin_epoch(2000)
        for _ in range(num_answered):
            step = scheduler.next_step()
            order += [chunk.request_id for chunk in step.chunks if chunk.last]  # type: ignore[union-attr]
            answer(scheduler, step)
    assert order == [1, 2, 3, 4, 5, 6, 1, 2] and scheduler.counters.preemptions == 0


def test_a_stream_that_takes_longer_than_shards_live_does_not_stop_the_others() -> None:
    scheduler = make_scheduler(capacity=2000, max_rows=40, max_batch_prefill_tokens=16)
    long = scheduler.add(make_request(16 * 40, 90, first=5000))
    while not long.output_ids:
        answer(scheduler, scheduler.next_step())
    others = [scheduler.add(make_request(12, 12, first=100 * i)) for i in range(4)]
    for _ in range(8 * len(others)):
        lose(scheduler, scheduler.next_step())  # type: ignore[arg-type]
        scheduler.begin_epoch(2000)
        for _ in range(12):
            answer(scheduler, scheduler.next_step())
    assert all(other.ended for other in others) and not long.ended
    run_to_end(scheduler)
    assert len(long.output_ids) == 90


def test_requests_that_a_loss_has_stopped_do_not_wait_until_they_are_many() -> None:
    """Otherwise requests join when enough of them wait, or after `max_waiting_tokens` decode steps."""
    scheduler = make_scheduler(capacity=4000, max_rows=40, max_batch_prefill_tokens=64)
    streams = [scheduler.add(make_request(60, 90, first=100 * i)) for i in range(24)]
    while not all(stream.output_ids for stream in streams):
        answer(scheduler, scheduler.next_step())
    prompt = scheduler.add(make_request(400, 5, first=9000))
    while not prompt.prefilled:
        answer(scheduler, scheduler.next_step())
    lose(scheduler)
    scheduler.begin_epoch(4000)
    while len(scheduler.queue):
        step = scheduler.next_step()
        assert isinstance(step, ForwardStep) and step.chunks
        answer(scheduler, step)


def suspects_of(scheduler: Scheduler, *requests: GenerationRequest) -> list[Running]:
    """Requests that have met MAX_SUSPICIONS losses together, and therefore have to run alone."""
    suspects = [scheduler.add(request) for request in requests]
    for _ in range(MAX_SUSPICIONS):
        steps: list[ForwardStep] = []
        while {suspect.id for suspect in suspects} - reaches(steps).keys():
            steps.append(scheduler.next_step())  # type: ignore[arg-type]
        assert lose(scheduler, *steps) == []
    return suspects


def test_the_next_suspect_starts_right_after_the_first_token_of_the_last_one() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=16, max_batch_prefill_tokens=64)
    suspects_of(scheduler, *[make_request(4, 30)] * 16)
    steps = []
    while len(scheduler.queue):
        steps.append(scheduler.next_step())
        answer(scheduler, steps[-1])
    assert len(steps) == 16 and all(isinstance(step, ForwardStep) and len(step.chunks) == 1 for step in steps)


def test_a_suspect_runs_alone_from_its_first_chunk_to_its_first_token() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=8, max_batch_prefill_tokens=16)
    suspect, *_ = suspects_of(scheduler, make_request(40, 9), make_request(4, 9))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    assert {*first.request_ids, *second.request_ids} == {suspect.id}
    answer(scheduler, first)
    third = scheduler.next_step()
    assert isinstance(third, ForwardStep) and third.chunks[0].last
    answer(scheduler, second)
    assert scheduler.next_step() is None, "neither its second token nor another suspect"
    answer(scheduler, third)
    assert isinstance(fourth := scheduler.next_step(), ForwardStep) and fourth.request_ids != (suspect.id,)


def test_after_a_loss_alone_a_suspect_goes_after_the_others() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=8, max_batch_prefill_tokens=16)
    first, second, third = suspects_of(scheduler, *[make_request(4, 9, 10 * i) for i in range(3)])
    order = []
    for _ in range(6):
        step = scheduler.next_step()
        assert isinstance(step, ForwardStep)
        order += step.request_ids
        lose(scheduler, step)
    assert order == [first.id, second.id, third.id] * 2


def test_suspects_running_alone_do_not_starve_new_requests() -> None:
    scheduler = make_scheduler(capacity=4000, max_rows=64, max_batch_prefill_tokens=16)
    suspects = suspects_of(scheduler, *[make_request(40, 5, 100 * i) for i in range(12)])
    newcomers, steps = [], 0
    while not scheduler.is_idle:
        steps += 1
        if len(newcomers) < 40:
            newcomers.append(scheduler.add(make_request(4, 5, 5000 + 10 * steps)))
        answer(scheduler, scheduler.next_step())
        if steps == 12 * 3 + 2:
            assert all(request.output_ids for request in suspects) and newcomers[0].has_begun
    assert all(len(request.output_ids) == 5 for request in [*suspects, *newcomers])


def test_a_suspect_shares_no_step_when_its_prompt_takes_several_steps() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=8, max_batch_prefill_tokens=16)
    suspects = suspects_of(scheduler, *[make_request(length, 3, 100 * length) for length in (40, 4, 20)])
    innocent = scheduler.add(make_request(4, 3))
    prefills = [step for step in run_to_end(scheduler) if isinstance(step, ForwardStep) and step.chunks]
    assert all(len(step.request_ids) == 1 for step in prefills if step.chunks[0].request_id != innocent.id)
    assert all(len(request.output_ids) == 3 for request in [*suspects, innocent])


def test_a_new_epoch_starts_with_empty_slots_and_ends_requests_that_cannot_fit() -> None:
    scheduler = make_scheduler()
    large, small = scheduler.add(make_request(20, 20)), scheduler.add(make_request(4, 6))
    answer(scheduler, scheduler.next_step())
    assert scheduler.put_back(()) == [] and scheduler.begin_epoch(20) == [large]
    assert scheduler.active.num_reserved == 0 and scheduler.memory.num_held == 0
    (first, *_) = run_to_end(scheduler)
    assert first.number == 1 and len(small.output_ids) == 6 and large.ended
