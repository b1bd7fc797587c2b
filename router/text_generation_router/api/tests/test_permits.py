"""Which request gets a permit when there are more requests than rows, and which request is refused instead."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from text_generation_router.api.common.permits import MAX_OUT, Permit, Permits
from text_generation_router.api.tests.conftest import Script
from text_generation_router.errors import InferenceError, OverloadedError
from text_generation_router.scheduling.request import Share

ERROR = {"error": "Model is overloaded", "error_type": "overloaded"}


@dataclass(eq=False)
class FakeGeneration:
    has_begun: bool = False
    refusals: list[InferenceError] = field(default_factory=list)

    def refuse(self, error: InferenceError) -> None:
        self.refusals.append(error)


class Pot:
    def __init__(self, capacity: int) -> None:
        self.elsewhere = 0
        self.permits = Permits(lambda: capacity, lambda: 3, lambda: self.elsewhere)

    def take(self, owner: str, tenant: str = "", has_begun: bool = False) -> tuple[Permit, FakeGeneration]:
        permit, generation = self.permits.take(Share(owner, tenant), 1), FakeGeneration(has_begun)
        permit.submitted([generation])
        return permit, generation

    def is_refused(self, owner: str, tenant: str = "") -> bool:
        try:
            self.take(owner, tenant)
        except OverloadedError as error:
            assert error.retry_after_s == 3
            return True
        return False


def test_one_tenant_alone_gets_all_permits_and_no_more():
    pot = Pot(8)
    for has_begun in (True, False) * 4:
        pot.take("a", has_begun=has_begun)
    assert pot.permits.left == 0 and pot.is_refused("a")
    with pytest.raises(OverloadedError):
        Pot(2).permits.take(Share("a"), 3)


def test_permits_that_other_processes_hold_are_not_given_out_again():
    pot = Pot(8)
    pot.elsewhere = 5
    for _ in range(3):
        pot.take("a", has_begun=True)
    assert pot.permits.left == 0 and pot.is_refused("a")
    assert not pot.is_refused("b"), "a tenant without a request gets one on top"
    assert pot.is_refused("b")
    pot.elsewhere = 0
    assert not pot.is_refused("a") and pot.permits.left == 3


def test_each_tenant_gets_one_request_at_a_time_where_other_processes_hold_all_permits():
    pot = Pot(4)
    pot.elsewhere = 4
    assert [pot.is_refused(owner) for owner in "aabbccdd"] == [False, True] * 4
    assert pot.is_refused("e"), "twice as many as there are is the most"


def test_a_newcomer_gets_the_place_of_the_newest_that_has_not_begun():
    pot = Pot(8)
    taken = [pot.take("greedy", has_begun=i < 4) for i in range(8)]
    pot.take("modest")
    assert [len(generation.refusals) for _, generation in taken] == [0] * 7 + [1]
    error = taken[-1][1].refusals[0]
    assert isinstance(error, OverloadedError) and error.retry_after_s == 3
    assert pot.permits.left == 0 and taken[-1][0].left == 0
    taken[-1][0].give_back(1)
    assert pot.permits.left == 0, "it has been given back already"


def test_where_all_have_begun_a_newcomer_is_let_in_on_top_and_no_request_is_refused():
    pot = Pot(8)
    taken = [pot.take("greedy", has_begun=True) for _ in range(8)]
    assert not pot.is_refused("modest") and pot.permits.left == -1
    assert pot.is_refused("greedy") and not any(generation.refusals for _, generation in taken)


def test_an_owner_with_its_share_loses_no_permit_and_gets_no_more():
    pot = Pot(8)
    greedy = [pot.take("greedy") for _ in range(6)]
    modest = [pot.take("modest") for _ in range(2)]
    for _ in range(2):
        modest.append(pot.take("modest"))
    assert pot.is_refused("modest") and pot.is_refused("greedy")
    assert [len(generation.refusals) for _, generation in greedy] == [0, 0, 0, 0, 1, 1]
    assert not any(generation.refusals for _, generation in modest)


def test_the_owner_most_above_its_share_loses_a_permit():
    pot = Pot(12)
    few, many = [pot.take("few") for _ in range(5)], [pot.take("many") for _ in range(7)]
    pot.take("new")
    assert not any(g.refusals for _, g in few) and [len(g.refusals) for _, g in many] == [0] * 6 + [1]


def test_the_tenants_of_an_owner_divide_its_share():
    pot = Pot(8)
    others = [pot.take("other") for _ in range(4)]
    greedy = [pot.take("a", "greedy") for _ in range(4)]
    for _ in range(2):
        pot.take("a", "modest")
    assert pot.is_refused("a", "modest")
    assert [len(g.refusals) for _, g in greedy] == [0, 0, 1, 1] and not any(g.refusals for _, g in others)


def test_names_of_tenants_get_an_owner_no_more_than_twice_its_share():
    pot = Pot(8)
    for i in range(8):
        pot.take("many names", f"name {i}", has_begun=True)
    let_in = sum(not pot.is_refused("many names", f"other name {i}") for i in range(100))
    assert let_in == 8
    assert not pot.is_refused("modest")


def test_many_owners_together_get_at_most_twice_the_capacity():
    pot = Pot(8)
    for i in range(8):
        pot.take(f"owner {i}", has_begun=True)
    assert sum(not pot.is_refused(f"late owner {i}") for i in range(100)) == 8
    assert pot.permits.left == -8


class PermitsMachine(RuleBasedStateMachine):
    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.permits = Permits(lambda: self.CAPACITY, lambda: 1)
        self.held: list[tuple[Permit, list[FakeGeneration]]] = []

    @rule(owner=st.sampled_from("abc"), tenant=st.sampled_from("xy"), count=st.integers(1, 3))
    def take(self, owner: str, tenant: str, count: int) -> None:
        share = Share(owner, tenant)
        owners = Counter({o: 0 for o in "abc"})
        for permit, _ in self.held:
            owners[permit.share.owner] += permit.left
        equal = self.CAPACITY // len({o for o in owners if owners[o]} | {owner})
        try:
            permit = self.permits.take(share, count)
        except OverloadedError:
            assert self.permits.left < count
            is_full = self.CAPACITY - self.permits.left + count > MAX_OUT * self.CAPACITY
            assert is_full or (owners[owner] and owners[owner] + count > equal), "it was below its share"
            self._drop_refused()
            return
        self._drop_refused()
        generations = [FakeGeneration() for _ in range(count)]
        permit.submitted(generations)
        self.held.append((permit, generations))

    def _drop_refused(self) -> None:
        """Drops requests that were refused to make room, even if that was not room enough."""
        for other, generations in self.held:
            if any(generation.refusals for generation in generations) and other.left == 0:
                assert not any(generation.has_begun for generation in generations)
        self.held = [(p, g) for p, g in self.held if p.left]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Begins some generations, at most one for each row."""
        if sum(g.has_begun for _, generations in self.held for g in generations) < self.CAPACITY:
            _, generations = self.held[data.draw(st.integers(0, len(self.held) - 1))]
            generations[0].has_begun = True

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        permit, generations = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        permit.give_back(1)
        generations.pop()
        if not permit.left:
            self.held.remove((permit, generations))

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.CAPACITY - self.permits.left == sum(permit.left for permit, _ in self.held)
        assert -self.permits.left <= (MAX_OUT - 1) * self.CAPACITY
        held = Counter(permit.share for permit, _ in self.held for _ in range(permit.left))
        counted = {
            Share(o, t): tenant.held for o, owner in self.permits._owners.items() for t, tenant in owner.tenants.items()
        }
        assert counted == held

    def teardown(self) -> None:
        for permit, _ in self.held:
            permit.give_back(permit.left)
        assert self.permits.left == self.CAPACITY and not self.permits._owners


TestPermitsMachine = PermitsMachine.TestCase


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_refused_to_make_room_gets_the_error_in_every_dialect(make_server, route, stream):
    """If a stream has begun with status 200, its refusal is an event, as for other failures before the first token."""
    server = make_server(max_concurrent_requests=2)
    begun, waiting = Script(hang_after=0), Script(hang_after=0, begins=False)
    server.engine.scripts = [begun, waiting]
    body = json.dumps(route.body | {"stream": stream}).encode()
    asked = []
    for number in (1, 2):
        asked.append(asyncio.create_task(server.call("POST", route.path, body)))
        while len(server.engine.asked) < number:
            await asyncio.sleep(0.001)
    headers = {"content-type": "application/json", "x-tenant": "another"}
    newcomer = await server.call("POST", "/generate", b'{"inputs": "Hi"}', headers)
    displaced = await asyncio.wait_for(asked[1], 10)
    asked[0].cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert newcomer.status == 200 and server.permits.left == 2
    if route.fails_as_event or (stream and route.path != "/generate"):
        assert (displaced.status, displaced.told) == (200, ERROR)
    else:
        assert (displaced.status, displaced.told, displaced.headers["retry-after"]) == (429, ERROR, "1")


async def test_a_request_refused_to_make_room_while_it_is_tokenized_gets_the_error():
    permits = Permits(lambda: 2, lambda: 7)
    permits.take(Share("greedy"), 1)
    permit = permits.take(Share("greedy"), 1)
    cancelled = asyncio.Event()

    async def tokenize() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asked = asyncio.create_task(permit.unless_refused(tokenize()))
    while permit._work is None:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    permits.take(Share("modest"), 1)
    with pytest.raises(OverloadedError) as refused:
        await asyncio.wait_for(asked, 10)
    assert refused.value.retry_after_s == 7 and cancelled.is_set() and permits.left == 0


async def test_a_refusal_that_comes_just_after_the_work_counts_too():
    permits = Permits(lambda: 2, lambda: 1)
    permits.take(Share("greedy"), 1)
    permit = permits.take(Share("greedy"), 1)

    async def work() -> None:
        permits.take(Share("modest"), 1)

    with pytest.raises(OverloadedError):
        await permit.unless_refused(work())


async def test_a_client_that_leaves_while_its_text_is_tokenized_is_not_overloaded():
    permit = Permits(lambda: 1, lambda: 1).take(Share("a"), 1)
    asked = asyncio.create_task(permit.unless_refused(asyncio.Event().wait()))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
