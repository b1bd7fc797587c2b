from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.scheduling.blame import Blame
from text_generation_router.scheduling.lines import MAX_PASSED, SPARE_ENTRIES, FairTurns, Priorities
from text_generation_router.scheduling.queue import MAX_IDLE_TENANTS, Queue
from text_generation_router.scheduling.request import NEW, GenerationRequest, Past, Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.tenant import Account


class Waiting:
    """A queue to test. `cached`: number of cached tokens by request id."""

    def __init__(self, priority_between_tenants: bool = False) -> None:
        self.cached: dict[int, int] = {}
        self.queue = Queue(priority_between_tenants)
        self.last_id = 0

    def add(self, owner: str = "", priority: int = 0, length: int = 10, tenant: str = "", past: Past = NEW) -> Running:
        self.last_id += 1
        asked = GenerationRequest((1,) * length, 5, share=Share(owner, tenant), priority=priority)
        request = Running(self.last_id, asked, past, -past.age_s)
        request.blame = Blame.of(past, (0.0, self.last_id - 1))
        self.queue.append(request)
        return request

    def cached_length(self, request: Running) -> int:
        return self.cached.get(request.id, 0)

    def take(self) -> Running:
        request = next(self.queue.candidates(set(), self.cached_length))
        self.queue.join(request, computed=request.num_tokens)
        return request


def test_first_come_first_served() -> None:
    waiting = Waiting()
    added = [waiting.add() for _ in range(5)]
    assert [waiting.take() for _ in range(5)] == added and len(waiting.queue) == waiting.queue.num_tokens == 0


def test_among_the_first_window_requests_the_longest_cached_prefix_goes_first() -> None:
    waiting = Waiting()
    added = [waiting.add() for _ in range(40)]
    waiting.cached = {added[3].id: 4, added[7].id: 8, added[39].id: 9}
    assert [waiting.take() for _ in range(3)] == [added[7], added[3], added[0]]


@pytest.mark.parametrize("between_tenants", [False, True])
def test_a_worse_priority_is_overtaken_at_most_max_passed_times(between_tenants: bool) -> None:
    waiting = Waiting(between_tenants)
    unlucky = waiting.add(priority=1)
    taken = []
    while unlucky not in taken:
        waiting.add()
        taken.append(waiting.take())
    assert len(taken) == MAX_PASSED + 1


def test_overtakings_are_counted_from_a_prioritys_own_last_join() -> None:
    waiting = Waiting()
    unlucky = [waiting.add(priority=1) for _ in range(2)]
    taken = []
    while unlucky[1] not in taken:
        waiting.add()
        taken.append(waiting.take())
    assert [taken.index(request) for request in unlucky] == [MAX_PASSED, 2 * MAX_PASSED + 1]


def test_a_request_without_cached_prefix_is_overtaken_at_most_max_passed_times() -> None:
    waiting = Waiting()
    unlucky = waiting.add()
    taken = []
    while unlucky not in taken:
        waiting.cached[waiting.add().id] = 5
        taken.append(waiting.take())
    assert len(taken) == MAX_PASSED + 1


def test_older_requests_go_first_whenever_they_were_submitted() -> None:
    waiting = Waiting()
    added = [waiting.add(past=Past(age_s=age_s)) for age_s in (0, 5, 2, 5, 0, 9)]
    taken = [waiting.take() for _ in range(6)]
    assert [added.index(request) for request in taken] == [5, 1, 3, 2, 0, 4]


def test_requests_that_ran_on_another_engine_go_first_in_their_tenant_and_before_no_other() -> None:
    waiting = Waiting()
    fresh = waiting.add("a", priority=-1)
    ran = [waiting.add("a", past=Past((1,), age_s, has_run=True)) for age_s in (1, 2)]
    counted = waiting.add("a", past=Past(age_s=9, has_run=True, suspicions=2, counts=1))
    others = [waiting.add("b") for _ in range(4)]
    taken = [waiting.take() for _ in range(8)]
    assert [r for r in taken if r not in others] == [ran[1], ran[0], counted, fresh]
    assert taken.index(others[0]) <= 1 and taken.index(others[1]) <= 3, "the other owner has its turns"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 500)), max_size=20), st.randoms(use_true_random=False))
def test_what_other_engines_served_counts_once_however_often_it_is_told(
    told: list[tuple[str, int]], random: Random
) -> None:
    def counters(told: list[tuple[str, int]]) -> list[float]:
        waiting = Waiting()
        owners = [waiting.add(owner).tenant.owner for owner in "ab"]
        for owner, tokens in told:
            waiting.add(owner, past=Past(served_elsewhere=tokens))
        return [owner.served + owner.uncounted for owner in owners]

    repeated = [*told, *told[::2]]
    random.shuffle(repeated)
    assert counters(repeated) == counters(told) == [max((t for o, t in told if o == name), default=0) for name in "ab"]


def test_the_owner_that_other_engines_served_less_goes_first() -> None:
    waiting = Waiting()
    for owner, elsewhere in (("little", 10), ("much", 1000)):
        for _ in range(3):
            waiting.add(owner, past=Past(served_elsewhere=elsewhere))
    assert [waiting.take().request.share.owner for _ in range(4)] == ["little"] * 3 + ["much"]


def test_a_tenant_that_is_new_here_is_not_charged_again_for_what_the_others_had() -> None:
    """After an engine begins again, every tenant comes with what it was served elsewhere."""
    waiting = Waiting()
    waiting.add("a", past=Past(served_elsewhere=900))
    waiting.take()
    assert waiting.add("b", past=Past(served_elsewhere=900)).tenant.owner.served == 910


LEAD = 1000
told_tokens = st.integers(0, 2**53).map(float)


@given(
    tenants=st.booleans(),
    before=told_tokens,
    others=st.lists(st.tuples(st.sampled_from("bcd"), st.integers(1, 200), told_tokens), min_size=1, max_size=30),
    told=st.lists(told_tokens, max_size=30),
)
def test_a_request_waits_for_a_limited_service_of_others_whatever_is_told_of_other_engines(
    tenants: bool, before: float, others: list[tuple[str, int, float]], told: list[float]
) -> None:
    """Owners, or tenants of one owner, flood the queue beside one request. Further requests come with any numbers."""
    waiting = Waiting()
    waiting.queue.limit_lead(LEAD)

    def add(name: str, length: int, elsewhere: float) -> Running:
        owner, tenant = ("", name) if tenants else (name, "")
        return waiting.add(owner, length=length, tenant=tenant, past=Past(served_elsewhere=elsewhere))

    name, length, _ = others[0]
    add(name, length, 0)
    waiting.take()  # the first account of all has no other one to be compared with
    request, served = add("a", 10, before), Counter[str]()
    for number in range(10_000):
        name, length, elsewhere = others[number % len(others)]
        add(name, length, elsewhere)
        if number < len(told):
            add("a", 10, told[number])
        if (taken := waiting.take()) is request:
            break
        share = taken.request.share
        served[share.tenant if tenants else share.owner] += taken.num_tokens
    assert taken is request and max(served.values(), default=0) <= LEAD + 200


def test_what_other_engines_serve_meanwhile_counts_when_the_next_request_joins() -> None:
    waiting = Waiting()
    waiting.queue.limit_lead(LEAD)
    for owner in "aabbb":
        waiting.add(owner)
    waiting.add("a", past=Past(served_elsewhere=300))
    assert [waiting.take().request.share.owner for _ in range(4)] == ["a", "b", "b", "b"], "without it: a, b, a, b"
    account = waiting.queue.account(Share("a"))
    assert account is not None and (account.served, account.owner.served, account.total) == (310, 310, 10)


def test_lower_priorities_go_first() -> None:
    waiting = Waiting()
    added = [waiting.add(priority=priority) for priority in (5, 0, -3)]
    assert [waiting.take() for _ in range(3)] == added[::-1]


def test_a_priority_does_not_increase_a_tenants_share() -> None:
    """A priority orders only the requests of one tenant."""
    waiting = Waiting()
    for i in range(40):
        waiting.add("pushes", priority=-5 - i)
    modest = [waiting.add("modest") for _ in range(5)]
    taken = [waiting.take() for _ in range(10)]
    assert [request for request in taken if request in modest] == modest
    assert [r.request.priority for r in taken if r not in modest] == [-44, -43, -42, -41, -40]


def test_with_priority_between_tenants_priorities_go_before_shares() -> None:
    waiting = Waiting(priority_between_tenants=True)
    urgent = [waiting.add("pushes", priority=-1) for _ in range(3)]
    waiting.add("modest")
    assert [waiting.take() for _ in range(3)] == urgent


def test_a_request_that_has_run_goes_first_and_while_it_waits_no_new_one_joins() -> None:
    waiting = Waiting()
    early, late, fresh = (waiting.add() for _ in range(3))
    for request in (late, early):
        waiting.queue.join(request, 10)
        waiting.queue.put_back(request)
    assert list(waiting.queue.candidates({early.id, late.id}, waiting.cached_length)) == []
    early.paused = True
    assert next(waiting.queue.candidates(set(), waiting.cached_length)) is late
    late.paused = True
    assert next(waiting.queue.candidates(set(), waiting.cached_length)) is fresh


def test_owners_are_served_the_same_number_of_tokens() -> None:
    waiting = Waiting()
    for _ in range(60):
        waiting.add("many")
    for _ in range(10):
        waiting.add("few", length=20)
    taken = [waiting.take().request.share.owner for _ in range(30)]
    assert taken.count("few") == 10 and taken.index("few") <= 1


def test_owners_have_equal_shares_and_so_do_the_tenants_of_an_owner() -> None:
    waiting = Waiting()
    for i in range(60):
        waiting.add("many names", tenant=f"name {i % 20}")
        waiting.add("one name")
        waiting.add("two names", tenant="x" if i % 10 else "y")
    taken = [waiting.take().request.share for _ in range(30)]
    assert set(Counter(share.owner for share in taken).values()) == {10}
    assert len({share.tenant for share in taken if share.owner == "many names"}) == 10
    assert Counter(share.tenant for share in taken if share.owner == "two names") == {"x": 5, "y": 5}


def test_tenants_of_the_same_name_under_two_owners_are_distinct() -> None:
    waiting = Waiting()
    first, second = waiting.add("a", tenant="x"), waiting.add("b", tenant="x")
    assert first.tenant is not second.tenant and first.tenant.owner is not second.tenant.owner


def test_output_tokens_count_as_served() -> None:
    waiting = Waiting()
    for tenant in "abab":
        waiting.add(tenant)
    first = waiting.take()
    first.tenant.serve_output(100)
    assert [waiting.take().request.share.owner for _ in range(3)] == ["b", "b", "a"]


def test_an_idle_owner_earns_no_credit() -> None:
    waiting = Waiting()
    waiting.add("late")
    waiting.take()
    for _ in range(20):
        waiting.add("busy")
        waiting.take()
    for _ in range(4):
        waiting.add("busy")
        waiting.add("late")
    taken = [waiting.take().request.share.owner for _ in range(8)]
    assert taken.count("late") == 4 and taken[:4].count("late") <= 3


def served_most_then_least(waiting: Waiting) -> None:
    """Lets two owners wait that have been served 1000 and 100 tokens. The owner that joined last was served 10
    tokens."""
    most, least, joined = (waiting.add(name, priority) for name, priority in (("most", 0), ("least", 1), ("joined", 0)))
    waiting.queue.join(joined, 10)
    most.tenant.serve_prompt(1000)
    least.tenant.serve_prompt(100)


def test_a_new_owner_is_lifted_to_the_lowest_waiting_owner_of_all_priorities() -> None:
    waiting = Waiting(priority_between_tenants=True)
    served_most_then_least(waiting)
    new = waiting.add("new", priority=0)
    assert new.tenant.owner.served == 100 and waiting.take() is new, "the other owner of its priority was served more"


def test_a_new_owner_earns_no_credit_after_a_step_that_could_start_no_request() -> None:
    waiting = Waiting()
    served_most_then_least(waiting)
    skipped: set[int] = set()
    for request in waiting.queue.candidates(skipped, waiting.cached_length):
        skipped.add(request.id)
    assert len(skipped) == 2 and waiting.add("new").tenant.owner.served == 100


def test_idle_tenants_beyond_the_limit_are_forgotten() -> None:
    waiting = Waiting()
    stays = waiting.add("stays")
    for i in range(MAX_IDLE_TENANTS + 10):
        waiting.queue.remove(waiting.add(f"passing {i}"))
    assert len(waiting.queue._accounts.owners) <= MAX_IDLE_TENANTS and waiting.take() is stays


@pytest.mark.parametrize("begun", [False, True])
def test_a_tenant_with_a_request_is_never_forgotten(begun: bool) -> None:
    waiting = Waiting()
    request = waiting.add(tenant="stays")
    if begun:
        assert waiting.take() is request
    request.tenant.serve_output(1000)
    for i in range(MAX_IDLE_TENANTS + 10):
        waiting.queue.remove(waiting.add(tenant=f"passes {i}"))
    assert waiting.add(tenant="stays").tenant is request.tenant


def test_an_owner_is_owed_a_place_by_an_owner_with_over_twice_its_running_requests() -> None:
    waiting = Waiting()
    first, second = waiting.add("one"), waiting.add("one")
    assert waiting.queue.owed(1) is None
    assert waiting.queue.owed(2) is first
    waiting.queue.join(first, 10)
    assert waiting.queue.owed(3) is None
    assert waiting.queue.owed(4) is second


def test_among_owners_owed_a_place_the_one_with_fewest_running_requests_is_first() -> None:
    waiting = Waiting()
    waiting.queue.join(waiting.add("some"), 10)
    waiting.add("some")
    none = waiting.add("none")
    assert waiting.queue.owed(100) is none


def test_an_owner_owed_a_place_comes_before_a_crowded_out_tenant() -> None:
    waiting = Waiting()
    for _ in range(3):
        waiting.queue.join(waiting.add("many", tenant="x"), 10)
    crowded = waiting.add("many", tenant="y")
    assert waiting.queue.owed(3) is crowded
    alone = waiting.add("other")
    assert waiting.queue.owed(3) is alone
    waiting.queue.join(alone, 10)
    waiting.queue.join(crowded, 10)
    waiting.add("other", tenant="z")
    assert waiting.queue.owed(3) is None  # tenant "" of the owner has only one running request


def _best(rivals: list[Running], chosen: Running, rank: Callable[[Running], Any]) -> list[Running]:
    """Asserts that no rival ranks better than `chosen`. Returns the rivals with the same rank as `chosen`."""
    assert rank(chosen) == min(map(rank, rivals))
    return [r for r in rivals if rank(r) == rank(chosen)]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 2), st.integers(1, 9), st.booleans()),
        max_size=60,
    ),
    st.booleans(),
)
def test_the_next_request_is_the_one_that_the_plain_rule_gives(
    steps: list[tuple[str, str, int, int, bool]], between: bool
) -> None:
    """The plain rule: the best priority if it counts between tenants, then the owner that was served the fewest tokens,
    then its tenant that was served the fewest, then the better priority, then arrival."""
    waiting = Waiting(between)
    running: list[Running] = []
    for owner, tenant, priority, length, adds in steps:
        if adds:
            waiting.add(owner, priority, length, tenant)
        elif len(waiting.queue):
            chosen = next(waiting.queue.candidates(set(), waiting.cached_length))
            rivals = list(waiting.queue.waiting())
            by_class = _best(rivals, chosen, lambda r: r.request.priority * between)
            by_owner = _best(by_class, chosen, lambda r: r.tenant.owner.served)
            own = [r for r in by_owner if r.tenant.owner is chosen.tenant.owner]
            by_tenant = _best(own, chosen, lambda r: r.tenant.served)
            own = [r for r in by_tenant if r.tenant is chosen.tenant]
            assert _best(own, chosen, lambda r: (r.request.priority, r.id)) == [chosen]
            request = waiting.take()
            assert request is chosen
            running.append(request)
        elif running:
            request = running.pop(priority % len(running))
            request.tenant.serve_output(length)
            waiting.queue.stop(request)
    for request in list(waiting.queue.waiting()):
        waiting.queue.remove(request)
    assert not len(waiting.queue) and waiting.queue.num_tokens == 0 and not len(waiting.queue._classes)


class Counted:
    """A member of FairTurns. The class counts how often the `account` of any member is read."""

    looks = 0

    def __init__(self) -> None:
        self._account = Account(0.0)

    @property
    def account(self) -> Account:
        Counted.looks += 1
        return self._account


@pytest.mark.parametrize("members", [10, 10_000])
def test_a_turn_costs_the_same_among_few_and_among_many(members: int) -> None:
    turns: FairTurns[Counted] = FairTurns()
    for i in range(members):
        turns.add(str(i), Counted())
    Counted.looks = 0
    for _ in range(1_000):
        first = turns.first()
        assert first is not None
        first._account.served += 1
    assert Counted.looks <= 10 * 1_000


@pytest.mark.parametrize("members", [1, 1_000])
def test_members_that_leave_are_dropped_from_the_heap(members: int) -> None:
    turns: FairTurns[Counted] = FairTurns()
    for i in range(members):
        turns.add(f"stays {i}", Counted())
    for i in range(10_000):
        turns.add(str(i), Counted())
        assert len(turns._heap) <= 2 * len(turns) + SPARE_ENTRIES
        turns.remove(str(i))
    assert len(turns) == members


def test_a_priority_without_requests_forgets_how_often_it_was_overtaken() -> None:
    lines: Priorities[str] = Priorities()
    lines.get(0, lambda: "best")
    lines.get(1, lambda: "worse")
    for _ in range(MAX_PASSED):
        lines.note_joined(0)
    assert lines.in_turn() == ["worse", "best"]
    lines.remove(1)
    lines.get(1, lambda: "new")
    assert lines.in_turn() == ["best", "new"]


def test_an_owner_that_floods_the_queue_does_not_shut_others_out() -> None:
    waiting = Waiting()
    queue = waiting.queue
    for _ in range(10):
        waiting.add("floods", length=10)
    assert not queue.has_room(Share("floods"), 1, 100) and queue.has_room(Share("other"), 60, 100)
    for _ in range(4):
        waiting.add("other", length=10)
    assert queue.has_room(Share("other"), 10, 100)  # the equal part of an owner is 50 of 100 tokens
    assert not queue.has_room(Share("other"), 11, 100)
    assert queue.has_room(Share("third"), 1000, 100)  # an owner may always have one waiting request, however long


def test_the_part_of_an_owner_is_divided_among_its_tenants() -> None:
    waiting = Waiting()
    queue = waiting.queue
    for _ in range(6):
        waiting.add("floods", length=10)
    for _ in range(4):
        waiting.add("owner", length=10, tenant="greedy")
    assert queue.has_room(Share("owner", "greedy"), 10, 100) and not queue.has_room(Share("owner", "greedy"), 11, 100)
    assert queue.has_room(Share("owner", "modest"), 10, 100)
    waiting.add("owner", length=10, tenant="modest")
    assert not queue.has_room(Share("owner", "greedy"), 10, 100)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 30)), max_size=30))
def test_waiting_tokens_are_counted_by_owner_and_tenant(added: list[tuple[str, str, int]]) -> None:
    waiting = Waiting()
    requests = [waiting.add(owner, length=length, tenant=tenant) for owner, tenant, length in added]
    for request in requests[::2]:
        waiting.queue.remove(request)
    left = requests[1::2]
    for request in requests:
        tenant, owner = request.tenant, request.tenant.owner
        assert tenant.waiting_tokens == sum(r.num_tokens for r in left if r.tenant is tenant)
        assert owner.waiting_tokens == sum(r.num_tokens for r in left if r.tenant.owner is owner)
        assert owner.num_tenants_waiting == len({r.tenant for r in left if r.tenant.owner is owner})
    assert waiting.queue.num_tenants_waiting == len({r.tenant for r in left})
