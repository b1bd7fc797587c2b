"""Places in the running batch that an owner or tenant owes to another one."""

from dataclasses import replace

import pytest

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.scheduling.joining import FEWEST_TOKENS
from text_generation_router.scheduling.request import Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.tests.answers import (
    answer,
    make_request,
    make_scheduler,
    run_to_end,
    steps_until,
)


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
