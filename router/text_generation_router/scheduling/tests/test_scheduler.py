from dataclasses import replace

import numpy as np
import pytest

from text_generation_common.errors import NOT_FINITE
from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.scheduling.admission import ENOUGH
from text_generation_router.scheduling.memory.prefix_cache import slots_to
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import FilterStep, ForwardStep, StepAnswer
from text_generation_router.scheduling.tests.answers import (
    CAPACITY,
    answer,
    make_request,
    make_scheduler,
    run_to_end,
    steps_until,
)
from text_generation_router.scheduling.tests.shard_model import ShardModel

END_TOKEN = 999


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
