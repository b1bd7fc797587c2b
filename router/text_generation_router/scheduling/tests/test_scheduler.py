import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from text_generation_common.errors import NOT_FINITE
from text_generation_common.flags.declaration import with_flags
from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.scheduling.admission import ENOUGH
from text_generation_router.scheduling.blame import MAX_LOSSES, MAX_SUSPICIONS, reaches
from text_generation_router.scheduling.joining import FEWEST_TOKENS
from text_generation_router.scheduling.lines import WINDOW
from text_generation_router.scheduling.memory.prefix_cache import slots_to
from text_generation_router.scheduling.request import EndReason, GenerationRequest, Limits, Past, Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ClearStep, FilterStep, ForwardStep, Step, StepAnswer
from text_generation_router.scheduling.tests.answers import answer
from text_generation_router.scheduling.tests.shard_model import ShardModel

CAPACITY = 64
END_TOKEN = 999


def make_request(length: int, new: int, first: int = 0) -> GenerationRequest:
    return GenerationRequest(tuple(range(first, first + length)), new)


def make_scheduler(end_tokens: frozenset[int] = frozenset(), **limits: object) -> Scheduler:
    return Scheduler(with_flags(Limits(CAPACITY, 8, 16), **limits), end_tokens=end_tokens)


def run_to_end(scheduler: Scheduler) -> list[Step]:
    """Runs until no step is left to send. Answers every step at once with token 0."""
    steps = []
    while step := scheduler.next_step():
        steps.append(step)
        answer(scheduler, step)
    return steps


def test_a_request_is_prefilled_once_and_decoded_to_its_limit() -> None:
    scheduler = make_scheduler()
    running = scheduler.add(make_request(5, 3))
    first, *others, last = run_to_end(scheduler)
    assert isinstance(first, ForwardStep) and [c.end for c in first.chunks] == [5]
    assert [step.decode_ids for step in others if isinstance(step, ForwardStep)] == [(1,), (1,)]
    assert isinstance(last, FilterStep) and last.keep == ()
    assert running.output_ids == [0, 0, 0]
    assert scheduler.memory.num_held == 0 and scheduler.is_idle


def test_two_steps_may_be_in_flight_and_no_row_runs_past_its_limit() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(5, 2))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    assert second.decode_ids == (1,)
    assert scheduler.next_step() is None


def test_slots_of_a_request_cancelled_in_the_first_step_are_held_until_it_answers() -> None:
    scheduler = make_scheduler()
    gone = scheduler.add(make_request(5, 9))
    first = scheduler.next_step()
    scheduler.cancel(gone.id)
    assert scheduler.memory.num_held == 5
    assert answer(scheduler, first).freed == [gone.id] and scheduler.memory.num_held == 0


def test_a_request_that_ends_before_its_first_step_on_new_shards_frees_its_slots() -> None:
    """The last step of the request ran on the old shards, and its number is larger than the step numbers of the new
    shards."""
    scheduler = make_scheduler()
    long, short = scheduler.add(make_request(40, 5)), scheduler.add(make_request(2, 5, first=100))
    sent = [scheduler.next_step() for _ in range(3)]
    assert short.last_step and long.last_step
    assert scheduler.put_back([step for step in sent if isinstance(step, ForwardStep)]) == []
    scheduler.begin_epoch(CAPACITY)
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep) and step.request_ids == (long.id,) and short.holding is not None
    held = scheduler.memory.num_held
    scheduler.cancel(short.id)
    assert short.holding is None and scheduler.memory.num_held < held


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    scheduler = make_scheduler()
    short = scheduler.add(make_request(2, 20))
    answer(scheduler, scheduler.next_step())
    scheduler.add(make_request(40, 1, first=100))
    chunks = [step for step in run_to_end(scheduler) if isinstance(step, ForwardStep) and step.chunks]
    assert [(c.start, c.end, c.last) for step in chunks for c in step.chunks] == [
        (0, 16, False),
        (16, 32, False),
        (32, 40, True),
    ]
    assert all(step.decode_ids == (short.id,) for step in chunks)


def test_in_reserve_mode_a_request_waits_until_all_slots_it_may_need_are_free() -> None:
    scheduler = make_scheduler(admission=AdmissionMode.RESERVE)
    first = scheduler.add(make_request(8, 41))
    second = scheduler.add(make_request(8, 10, first=100))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    assert [c.request_id for c in step.chunks] == [first.id]
    answer(scheduler, step)
    scheduler.end(first.id, 1)
    assert isinstance(scheduler.next_step(), FilterStep)
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    assert [c.request_id for c in step.chunks] == [second.id]


@pytest.mark.parametrize(("length", "joins"), [(10, True), (11, False)])
def test_a_prompt_may_take_exactly_the_slots_that_are_left(length: int, joins: bool) -> None:
    scheduler = make_scheduler(capacity=20)
    scheduler.add(make_request(8, 3))
    for _ in range(3):
        last = scheduler.next_step()
    assert scheduler.memory.num_available == 10
    newcomer = scheduler.add(make_request(length, 1, first=100))
    scheduler.next_step()
    assert newcomer.has_begun is joins and last is not None


def test_a_scheduler_without_requests_remembers_no_prefix_lookups() -> None:
    scheduler = make_scheduler(max_rows=2, max_batch_prefill_tokens=64)
    requests = [scheduler.add(make_request(4, 4, first=10 * i)) for i in range(6)]
    answer(scheduler, scheduler.next_step())
    scheduler.cancel(requests[-1].id)
    run_to_end(scheduler)
    assert scheduler.is_idle and not scheduler.memory._remembered


def test_slots_are_freed_only_when_the_last_step_that_uses_them_has_answered() -> None:
    scheduler = make_scheduler()
    running = scheduler.add(make_request(4, 10))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert answer(scheduler, first).taken == [(0,)]
    scheduler.end(running.id, 1)
    assert scheduler.memory.slots.num_used == 5
    wasted = answer(scheduler, second)
    assert (wasted.taken, wasted.freed) == ([()], [running.id])
    assert scheduler.memory.num_held == 0


def test_a_text_that_ends_before_its_newest_token_keeps_only_the_tokens_before() -> None:
    scheduler = make_scheduler()
    running = scheduler.add(make_request(4, 10))
    steps = [scheduler.next_step() for _ in range(3)]
    for step, token in zip(steps, (5, 6), strict=False):
        assert answer(scheduler, step, lambda request_id, token=token: token).taken == [(token,)]
    assert running.history.tolist()[-2:] == [5, 6]
    scheduler.end(running.id, 1)
    assert running.output_ids == [5] and running.history.tolist() == [*running.request.input_ids, 5]
    answer(scheduler, steps[2])
    assert scheduler.memory.num_held == 0 and scheduler.books() is None


@pytest.mark.parametrize("tokens", [(), (5, 6), (5, 6, 7, 8)])
def test_an_answer_without_exactly_one_token_for_a_row_is_a_bug(tokens: tuple[int, ...]) -> None:
    """Slots and sent tokens are counted one for each row and step: more tokens than that would have no slots."""
    scheduler = make_scheduler()
    request = scheduler.add(make_request(4, 10))
    step = scheduler.next_step()
    assert step is not None
    with pytest.raises(AssertionError, match="one token and one slot for each row"):
        scheduler.apply(StepAnswer(step.number, [request.id], tokens))
    assert request.output_ids == []


def test_an_answer_says_what_to_publish_what_ended_and_what_is_free() -> None:
    scheduler = make_scheduler(frozenset({END_TOKEN}))
    short, long, ignores = (
        scheduler.add(replace(make_request(4, new, first), ignore_eos=ignore))
        for new, first, ignore in ((1, 0, False), (9, 20, False), (9, 40, True))
    )
    first, second = scheduler.next_step(), scheduler.next_step()
    applied = answer(scheduler, first, lambda request_id: END_TOKEN)
    assert applied.taken == [(END_TOKEN,)] * 3
    assert applied.ended == {short.id: EndReason.LENGTH, long.id: EndReason.EOS_TOKEN}, "length before end token"
    assert applied.freed == [short.id], "the second step carries the other request"
    applied = answer(scheduler, second)
    assert applied.taken == [(), (0,)] and not applied.ended and applied.freed == [long.id]
    assert ignores.output_ids == [END_TOKEN, 0]


@pytest.mark.parametrize(("ratio", "joins"), [(0.3, True), (1.2, False)])
def test_waiting_requests_join_running_ones_only_when_there_are_enough(ratio: float, joins: bool) -> None:
    scheduler = make_scheduler(waiting_served_ratio=ratio, max_waiting_tokens=5)
    for _ in range(3):
        scheduler.add(make_request(2, 15))
    answer(scheduler, scheduler.next_step())
    scheduler.add(make_request(2, 1))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep) and bool(step.chunks) is joins
    assert step.concat_reason == ("backpressure" if joins else None)


def test_decode_steps_with_chunks_count_as_waiting_steps() -> None:
    scheduler = make_scheduler(capacity=2000, waiting_served_ratio=1.2, max_waiting_tokens=5)
    for i in range(3):
        scheduler.add(make_request(2, 90, first=10 * i))
    answer(scheduler, scheduler.next_step())
    for i in range(4):
        scheduler.add(make_request(200, 5, first=1000 * (i + 1)))
    answer(scheduler, scheduler.next_step())
    short = scheduler.add(make_request(2, 5, first=900))
    assert steps_until(scheduler, short) <= 6


def test_after_max_waiting_tokens_steps_any_request_may_join() -> None:
    scheduler = make_scheduler(waiting_served_ratio=1.2, max_waiting_tokens=5)
    for _ in range(3):
        scheduler.add(make_request(2, 15))
    answer(scheduler, scheduler.next_step())
    scheduler.add(make_request(2, 1))
    reasons = [step.concat_reason for step in run_to_end(scheduler) if isinstance(step, ForwardStep)]
    assert reasons[:6] == [None] * 5 + ["wait_exceeded"]


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


@pytest.mark.parametrize("are_early", [False, True], ids=["when its engine works", "before its engine works"])
def test_streams_of_an_engine_that_has_died_go_on_before_an_older_prompt(are_early: bool) -> None:
    scheduler, shard = Scheduler(Limits(9000, 100, 40)), ShardModel(100)
    old = scheduler.add(make_request(2000, 5, first=5000))
    streams = [scheduler.add(make_request(2, 90, first=10 * number)) for number in range(WINDOW + 3)]
    while not all(stream.output_ids for stream in streams):
        step = scheduler.next_step()
        assert step is not None
        tokens = shard.run(step)
        scheduler.apply(StepAnswer(step.number, [*tokens], [*tokens.values()]))
    successor, computed = Scheduler(Limits(9000, 100, 40)), shard.computed()
    if not are_early:
        successor.begin_epoch(9000, computed=computed)
    again = [
        successor.add(each.request, Past(tuple(each.output_ids), age_s=9.0 - each.id / 100, has_run=True), now_s=10.0)
        for each in (old, *streams)
    ]
    if are_early:
        successor.begin_epoch(9000, computed=computed)
    first, second = successor.next_step(), successor.next_step()
    assert isinstance(first, ForwardStep) and isinstance(second, ForwardStep)
    due = [(chunk.request_id, chunk.end - chunk.start) for chunk in first.chunks]
    assert due == [(each.id, 1) for each in again[1:]]
    assert [chunk.request_id for chunk in second.chunks] == [again[0].id] and second.chunks[0].start == old.prefilled


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


def test_streams_that_a_loss_has_stopped_do_not_wait_until_they_are_many() -> None:
    """Otherwise requests join when enough of them wait, or after `max_waiting_tokens` decode steps."""
    scheduler = make_scheduler(capacity=4000, max_rows=40, max_batch_prefill_tokens=64)
    streams = [scheduler.add(make_request(60, 90, first=100 * i)) for i in range(24)]
    while not all(stream.output_ids for stream in streams):
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


def test_a_paused_request_gets_no_steps_and_keeps_its_slots() -> None:
    scheduler = make_scheduler()
    paused, other = scheduler.add(make_request(4, 6)), scheduler.add(make_request(4, 6))
    answer(scheduler, scheduler.next_step())
    paused.paused = True
    run_to_end(scheduler)
    assert len(other.output_ids) == 6 and len(paused.output_ids) == 1 and scheduler.memory.num_held == 4
    paused.paused = False
    run_to_end(scheduler)
    assert len(paused.output_ids) == 6 and scheduler.memory.num_held == 0


def test_paused_requests_do_not_keep_others_from_joining() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=32, max_batch_prefill_tokens=64)
    readers = [scheduler.add(make_request(2, 20)) for _ in range(12)]
    answer(scheduler, scheduler.next_step())
    for reader in readers:
        reader.paused = True
    for _ in range(2):
        newcomer = scheduler.add(make_request(2, 3))
        run_to_end(scheduler)
        assert len(newcomer.output_ids) == 3


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


def test_a_long_prompt_does_not_keep_short_ones_from_starting() -> None:
    scheduler = make_scheduler(capacity=2000, max_batch_prefill_tokens=64)
    long = scheduler.add(make_request(1000, 1))
    answer(scheduler, scheduler.next_step())
    short = [scheduler.add(make_request(10, 1, first=2000 + 10 * i)) for i in range(3)]
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep)
    assert {c.request_id for c in step.chunks if c.last} == {request.id for request in short}
    assert [c.end - c.start for c in step.chunks if c.request_id == long.id] == [64 - 30]


def test_requests_with_the_same_prefix_wait_for_the_one_that_computes_it() -> None:
    scheduler = make_scheduler(capacity=4000, max_rows=40, max_batch_prefill_tokens=100)
    for i in range(32):
        scheduler.add(GenerationRequest((*range(500), 1000 + i), 2))
    run_to_end(scheduler)
    assert scheduler.counters.prefilled_tokens == 500 + 32


def outlive_history(scheduler: Scheduler) -> None:
    """Lets admission learn that outputs have one token. Longer outputs then run out of slots."""
    for _ in range(ENOUGH):
        scheduler._admission.learn(1)


def test_the_request_with_fewest_slots_is_preempted_and_resumes_from_the_cache() -> None:
    scheduler = make_scheduler()
    outlive_history(scheduler)
    large, small = scheduler.add(make_request(20, 30)), scheduler.add(make_request(8, 30, first=100))
    run_to_end(scheduler)
    counters = scheduler.counters
    assert len(large.output_ids) == len(small.output_ids) == 30
    assert counters.preemptions == 1 and small.max_computed > 8
    # The cache still had the tokens of `small`, except the tokens that were evicted for the other request.
    assert counters.recomputed_tokens < small.max_computed


def test_no_request_is_preempted_while_an_ending_one_will_free_enough_slots() -> None:
    scheduler = make_scheduler(capacity=20, prefix_caching=False)
    outlive_history(scheduler)
    ending, needs_room = scheduler.add(make_request(8, 3)), scheduler.add(make_request(8, 11, first=100))
    for _ in range(2):
        answer(scheduler, scheduler.next_step())
    last = scheduler.next_step()
    assert ending.is_ending and scheduler.memory.slots.num_free == 0
    assert scheduler.next_step() is None
    answer(scheduler, last)
    run_to_end(scheduler)
    assert len(needs_room.output_ids) == 11 and scheduler.counters.preemptions == 0


def test_of_two_requests_with_equal_slots_the_newer_is_preempted() -> None:
    scheduler = make_scheduler(capacity=30, prefix_caching=False)
    outlive_history(scheduler)
    older, newer = scheduler.add(make_request(8, 20)), scheduler.add(make_request(8, 20, first=100))
    run_to_end(scheduler)
    assert scheduler.counters.preemptions == 1 and newer.max_computed and not older.num_sent_at_start
    assert len(older.output_ids) == len(newer.output_ids) == 20


def test_a_slot_that_was_given_away_before_its_row_was_dropped_is_not_taken_over_by_another_engine() -> None:
    scheduler, shard = make_scheduler(capacity=30), ShardModel(8)
    outlive_history(scheduler)
    requests = [scheduler.add(make_request(8, 20, first)) for first in (0, 100)]
    while step := scheduler.next_step():
        tokens = shard.run(step)
        if scheduler.counters.preemptions:
            break
        scheduler.apply(StepAnswer(step.number, [*tokens], [*tokens.values()]))
    computed = shard.computed()
    claimed = [slot for history in computed for slot in history.slots.tolist()]
    assert len(set(claimed)) < len(claimed) <= sum(request.num_tokens for request in requests)
    successor = make_scheduler(capacity=30)
    successor.begin_epoch(30, computed=computed)
    cache = successor.memory.cache
    for node in cache.nodes():
        ids = np.concatenate([above.ids for above in [*node.path()][::-1]]).tolist()
        assert [shard.keys[slot] for slot in slots_to(node).tolist()] == [("", *ids[: n + 1]) for n in range(len(ids))]
    assert cache.num_tokens == len(set(claimed)) - 1 and successor.books() is None


def test_while_a_preempted_request_waits_no_new_one_joins() -> None:
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
    """Number of steps before the first step of `request`."""
    for steps in range(10):
        step = scheduler.next_step()
        answer(scheduler, step)
        if isinstance(step, ForwardStep) and request.id in step.request_ids:
            return steps
    raise AssertionError("it does not begin")


def test_a_tenant_with_nothing_running_gets_a_row_at_once() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=4)
    many = [scheduler.add(replace(make_request(2, 60, 10 * i), share=Share("many"))) for i in range(50)]
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    one = scheduler.add(replace(make_request(2, 5, first=900), share=Share("one")))
    steps = steps_until(scheduler, one)
    assert steps <= 2, "one filter, then its prompt"
    run_to_end(scheduler)
    assert all(len(request.output_ids) == 60 for request in many) and scheduler.counters.preemptions == 1


def busy(max_rows: int, *shares: Share, max_waiting_tokens: int = 1000) -> Scheduler:
    """A scheduler in which each share runs a long request, and none waits. By TGI's rule alone, the next request joins
    after `max_waiting_tokens` decode steps."""
    scheduler = make_scheduler(
        capacity=1000, max_rows=max_rows, waiting_served_ratio=100, max_waiting_tokens=max_waiting_tokens
    )
    for i, share in enumerate(shares):
        scheduler.add(replace(make_request(2, 60, 10 * i), share=share))
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    return scheduler


def add_for(scheduler: Scheduler, share: Share, new: int = 5) -> Running:
    return scheduler.add(replace(make_request(2, new, first=900), share=share))


@pytest.mark.parametrize(("max_rows", "steps"), [(8, 0), (4, 1)])
def test_an_owner_with_nothing_running_is_exempt_from_the_joining_rule(max_rows: int, steps: int) -> None:
    scheduler = busy(max_rows, *[Share("many")] * 4)
    assert steps_until(scheduler, add_for(scheduler, Share("one"))) == steps
    assert scheduler.counters.preemptions == steps, "one where no row is free"


def test_a_crowded_out_tenant_is_exempt_from_the_joining_rule() -> None:
    scheduler = busy(8, *[Share("owner", "many")] * 4)
    assert steps_until(scheduler, add_for(scheduler, Share("owner", "one"))) == 0


def test_an_owner_with_few_running_requests_gets_places_one_by_one() -> None:
    scheduler, _ = full_house(Share("many"), max_rows=16)
    for _ in range(10):
        add_for(scheduler, Share("few"), new=60)
    most = 0
    for _ in range(40):
        answer(scheduler, scheduler.next_step())
        few = sum(r.request.share == Share("few") for r in scheduler.active.running.values())
        assert few >= most, "places go one way"
        most = few
    assert few == scheduler.counters.preemptions == 5, "of 16: the other owner keeps 11"


@pytest.mark.parametrize("shares", [[Share(str(i)) for i in range(4)], [Share(str(i % 4)) for i in range(8)]])
def test_without_a_crowding_owner_the_joining_rule_holds_for_a_new_owner(shares: list[Share]) -> None:
    scheduler = busy(16, *shares)
    new = add_for(scheduler, Share("new"))
    for _ in range(20):
        answer(scheduler, scheduler.next_step())
    assert not new.has_begun


def test_owners_that_get_a_place_at_once_do_not_restart_the_others_wait() -> None:
    scheduler = busy(5, *[Share("many")] * 4, max_waiting_tokens=12)
    waits = add_for(scheduler, Share("many"))
    for i in range(5):
        one = add_for(scheduler, Share(f"one {i}"))
        for _ in range(9):
            answer(scheduler, scheduler.next_step())
        assert one.ended
    assert waits.has_begun


def test_a_tenant_with_nothing_running_gets_memory_at_once() -> None:
    scheduler = make_scheduler(admission=AdmissionMode.RESERVE, max_rows=8)
    many = [scheduler.add(replace(make_request(2, 15, 10 * i), share=Share("many"))) for i in range(12)]
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    one = scheduler.add(replace(make_request(10, 20, first=900), share=Share("one")))
    steps = steps_until(scheduler, one)
    assert steps <= 4
    run_to_end(scheduler)
    assert all(len(request.output_ids) == 15 for request in many) and len(one.output_ids) == 20


def full_house(*shares: Share, max_rows: int = 4) -> tuple[Scheduler, list[Running]]:
    """A scheduler whose rows all run long requests of `shares`, in turn. More such requests wait, and a few tokens are
    made."""
    scheduler = make_scheduler(capacity=1000, max_rows=max_rows)
    texts = [scheduler.add(replace(make_request(2, 60, 10 * i), share=shares[i % len(shares)])) for i in range(20)]
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    return scheduler, texts


def test_a_better_priority_does_not_keep_rows_from_other_tenants() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=4)
    for i in range(20):
        scheduler.add(replace(make_request(2, 60, 10 * i), share=Share("pushes"), priority=-5))
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    one = scheduler.add(replace(make_request(2, 5, first=900), share=Share("one")))
    assert steps_until(scheduler, one) <= 2


def test_a_row_is_owed_to_another_owner_only_after_a_few_tokens_of_the_request_that_has_it() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=4)
    for i in range(4):
        scheduler.add(replace(make_request(2, 60, 10 * i), share=Share("many")))
    answer(scheduler, scheduler.next_step())
    add_for(scheduler, Share("one"))
    while not scheduler.counters.preemptions:
        made = [request.num_sent for request in scheduler.active.running.values()]
        answer(scheduler, scheduler.next_step())
    assert made == [FEWEST_TOKENS] * 4


def test_an_ending_request_is_not_preempted_for_another_owner() -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=4)
    for i in range(4):
        scheduler.add(replace(make_request(2, 6, 10 * i), share=Share("many")))
    for _ in range(5):
        answer(scheduler, scheduler.next_step())
    last = scheduler.next_step()
    one = add_for(scheduler, Share("one"))
    assert scheduler.next_step() is None and scheduler.counters.preemptions == 0
    answer(scheduler, last)
    run_to_end(scheduler)
    assert len(one.output_ids) == 5 and scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("priority", "preemptions"), [(1, 0), (0, 1), (-1, 1)])
def test_where_priorities_count_between_tenants_no_request_is_preempted_for_a_worse_priority(
    priority: int, preemptions: int
) -> None:
    scheduler = make_scheduler(capacity=1000, max_rows=4, priority_between_tenants=True)
    for i in range(4):
        scheduler.add(replace(make_request(2, 60, 10 * i), share=Share("many")))
    for _ in range(6):
        answer(scheduler, scheduler.next_step())
    scheduler.add(replace(make_request(2, 5, first=900), share=Share("one"), priority=priority))
    for _ in range(20):
        answer(scheduler, scheduler.next_step())
    assert scheduler.counters.preemptions == preemptions


def test_an_owner_of_many_tenants_gives_up_a_row_to_another_owner() -> None:
    scheduler, _ = full_house(*(Share("many", str(i)) for i in range(4)))
    one = scheduler.add(replace(make_request(2, 5, first=900), share=Share("one")))
    assert steps_until(scheduler, one) <= 2 and scheduler.counters.preemptions == 1


def test_a_crowded_out_tenant_gets_a_row_from_its_own_owner_only() -> None:
    scheduler, _ = full_house(Share("a", "x"), Share("b"))
    crowded = scheduler.add(replace(make_request(2, 5, first=900), share=Share("a", "y")))
    assert steps_until(scheduler, crowded) <= 2 and scheduler.counters.preemptions == 1
    running = [r.request.share for r in scheduler.active.running.values()]
    assert running.count(Share("b")) == 2 and running.count(Share("a", "x")) == 1
    scheduler, _ = full_house(Share("a", "x"), Share("b"), max_rows=2)
    scheduler.add(replace(make_request(2, 5, first=900), share=Share("a", "y")))
    for _ in range(20):
        answer(scheduler, scheduler.next_step())
    assert scheduler.counters.preemptions == 0  # `a` has a row already, and a tenant is owed no place by another owner


def test_tokens_of_a_request_with_non_finite_logits_leave_the_cache() -> None:
    scheduler = make_scheduler()
    good = scheduler.add(make_request(20, 2))
    run_to_end(scheduler)
    bad = scheduler.add(GenerationRequest((*range(10), *range(50, 80)), 5))
    step = scheduler.next_step()
    answer(scheduler, step)
    assert bad.cached_tokens == 10 and scheduler.memory.cache.num_tokens > 21
    assert answer(scheduler, scheduler.next_step(), failures={bad.id: NOT_FINITE}).failed == {bad.id: NOT_FINITE}
    assert scheduler.memory.cache.num_tokens == 21 and good.ended and scheduler.books() is None


def test_tokens_of_a_non_finite_request_are_not_matched_while_its_last_step_is_in_flight() -> None:
    scheduler = make_scheduler()
    bad = scheduler.add(make_request(12, 5))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert answer(scheduler, first, failures={bad.id: NOT_FINITE}).failed == {bad.id: NOT_FINITE}
    twin = scheduler.add(make_request(12, 2))
    while not twin.has_begun:
        scheduler.next_step()
    assert twin.cached_tokens == 0 and second is not None


def test_chunks_cached_before_a_request_turned_out_non_finite_are_not_matched() -> None:
    """The request's first chunks are in the cache, and locked by it, when its last chunk has non-finite logits."""
    scheduler = make_scheduler(capacity=200)
    bad = scheduler.add(make_request(40, 5))
    for _ in range(2):
        answer(scheduler, scheduler.next_step())
    last, behind = scheduler.next_step(), scheduler.next_step()
    assert scheduler.memory.cache.match((), np.arange(40, dtype=np.int32)) == 32
    assert answer(scheduler, last, failures={bad.id: NOT_FINITE}).failed == {bad.id: NOT_FINITE}
    assert bad.holding is not None and scheduler.memory.cache.match((), np.arange(40, dtype=np.int32)) == 0
    twin = scheduler.add(make_request(40, 2))
    answer(scheduler, behind)
    run_to_end(scheduler)
    assert twin.cached_tokens == 0 and len(twin.output_ids) == 2 and scheduler.books() is None


def test_tokens_computed_on_top_of_a_non_finite_request_are_not_matched() -> None:
    scheduler = make_scheduler(capacity=300, waiting_served_ratio=0)
    scheduler.add(make_request(10, 1))
    run_to_end(scheduler)
    bad = scheduler.add(GenerationRequest((*range(10), *range(500, 520)), 5))
    for _ in range(2):
        answer(scheduler, scheduler.next_step())
    heir = scheduler.add(GenerationRequest((*range(10), *range(500, 520), 7, 8, 9), 3))
    step = scheduler.next_step()
    while not heir.has_begun:
        answer(scheduler, step)
        step = scheduler.next_step()
    assert heir.cached_tokens > 20
    assert answer(scheduler, step, failures={bad.id: NOT_FINITE}).failed == {bad.id: NOT_FINITE}
    run_to_end(scheduler)
    assert heir.ended and scheduler.books() is None
    whole = np.array([*range(10), *range(500, 520), 7, 8, 9], dtype=np.int32)
    assert scheduler.memory.cache.match((), whole) == 10, "what was there before is good"


def test_a_request_cancelled_in_its_prompt_leaves_only_confirmed_tokens_in_the_cache() -> None:
    scheduler = make_scheduler()
    gone = scheduler.add(make_request(40, 5))
    first, second = scheduler.next_step(), scheduler.next_step()
    answer(scheduler, first)
    scheduler.cancel(gone.id)
    assert scheduler.memory.cache.num_tokens == 16
    third = scheduler.next_step()
    assert isinstance(third, FilterStep) and not third.keep, "the prompt's third chunk is not computed"
    answer(scheduler, second)
    assert scheduler.memory.cache.num_tokens == 32 and scheduler.memory.num_held == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("last", "reason"), [(7, EndReason.COMPLETE), (99, EndReason.EOS_TOKEN)])
def test_a_request_ends_with_its_grammar_whatever_else_it_asked_for(
    ignore_eos: bool, last: int, reason: EndReason
) -> None:
    """Also where the last token is the last that the request may have: the text is whole. The end token is told apart,
    because the text is without it."""
    scheduler = make_scheduler()
    scheduler.begin_epoch(100, frozenset({99}))
    made = {
        most: scheduler.add(GenerationRequest((1, 2, 3 + most), most, ignore_eos=ignore_eos, stop_token_ids=stops))
        for most, stops in [(2, frozenset[int]()), (9, frozenset[int]()), (10, frozenset({42}))]
    }
    free = scheduler.add(make_request(4, 9))
    assert not answer(scheduler, scheduler.next_step()).ended
    step, in_flight = scheduler.next_step(), scheduler.next_step()
    ids = [request.id for request in made.values()]
    applied = answer(scheduler, step, lambda i: last if i in ids else 5, complete=ids)
    assert applied.ended == dict.fromkeys(ids, reason)
    assert answer(scheduler, in_flight).taken.count(()) == 2, "the rows of which step 3 made another token"
    assert [request.output_ids for request in made.values()] == [[0, last]] * 3 and free.output_ids == [0, 5, 0]


def test_a_failed_request_of_a_step_leaves_the_others_as_they_are() -> None:
    scheduler = make_scheduler()
    bad, good = scheduler.add(make_request(4, 9)), scheduler.add(make_request(5, 9, first=50))
    applied = answer(scheduler, scheduler.next_step(), failures={bad.id: "too complex"}, complete=[bad.id])
    assert applied.failed == {bad.id: "too complex"} and not applied.ended
    assert (bad.output_ids, good.output_ids) == ([], [0])


def test_an_unready_request_is_not_queued_until_it_is_ready() -> None:
    scheduler = make_scheduler()
    late, first = scheduler.add_unready(make_request(4, 2)), scheduler.add(make_request(5, 2, first=50))
    step = scheduler.next_step()
    assert isinstance(step, ForwardStep) and step.request_ids == (first.id,)
    scheduler.make_ready(late.id)
    scheduler.make_ready(late.id)
    assert [request.id for request in scheduler.queue.waiting()] == [late.id]
    answer(scheduler, step)
    run_to_end(scheduler)
    assert len(late.output_ids) == len(first.output_ids) == 2


def test_an_unready_request_can_end() -> None:
    scheduler = make_scheduler()
    cancelled, large = scheduler.add_unready(make_request(4, 2)), scheduler.add_unready(make_request(50, 2))
    scheduler.cancel(cancelled.id)
    assert scheduler.begin_epoch(20) == [large]
    for request in (cancelled, large):
        scheduler.make_ready(request.id)
    assert scheduler.next_step() is None and scheduler.is_idle
