"""More LoRA adapters than slots: every request begins in time, none waits for another one's adapter, and texts stay
what they are."""

from collections.abc import Iterable
from random import Random

import pytest

from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling.adapter_slots import AdapterRoom
from text_generation_router.scheduling.request import GenerationRequest, Limits, Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import AdapterStep, FilterStep, ForwardStep, Step, StepAnswer

PROMISE = 256  # forward steps after which a request begins at the latest
SLOTS, ROWS = 8, 64
ENDLESS, CAPACITY = 4000, 1_000_000


class SlotShard:
    """Runs steps, and asserts that each row has its adapter. The next token depends only on the history."""

    def __init__(self, adapters: Iterable[str], is_short: bool) -> None:
        self.adapters = {slot: adapter for slot, adapter in enumerate(adapters) if adapter}
        self.is_short = is_short
        self.rows: dict[int, tuple[str, list[int]]] = {}

    def run(self, step: Step) -> dict[int, int]:
        if isinstance(step, AdapterStep):
            self.adapters[step.slot] = step.adapter
            assert len(set(self.adapters.values())) == len(self.adapters), "an adapter is in two slots"
        if isinstance(step, FilterStep):
            self.rows = {i: row for i, row in self.rows.items() if i in step.keep}
        if not isinstance(step, ForwardStep):
            return {}
        for chunk in step.chunks:
            if chunk.first is not None:
                self.rows[chunk.request_id] = chunk.first.adapter, list(chunk.first.ids)
        for i in step.request_ids:
            adapter = self.rows[i][0]
            assert not (adapter and self.is_short) or adapter in self.adapters.values(), "an adapter is not in a slot"
        made = [*step.decode_ids, *(chunk.request_id for chunk in step.chunks if chunk.last)]
        return {i: self._sample(self.rows[i][1]) for i in made}

    @staticmethod
    def _sample(history: list[int]) -> int:
        history.append(token_after(history))
        return history[-1]


def token_after(history: list[int]) -> int:
    return (history[-1] * 31 + len(history)) % 50


class SlotServer:
    """A scheduler and a model of its shards, with two steps in flight. Reading an adapter takes `read_steps` steps."""

    def __init__(
        self, adapters: int, slots: int = SLOTS, in_host: int = 64, read_steps: int = 3, **flags: object
    ) -> None:
        self.names = tuple(f"a{number}" for number in range(adapters))
        policy = SchedulingFlags(waiting_served_ratio=0.0, **flags)  # type: ignore[arg-type]
        self.scheduler = Scheduler(Limits(CAPACITY, ROWS, 512, policy))
        self.scheduler.begin_epoch(
            CAPACITY, adapters=AdapterRoom(self.names, slots, in_host, resident=self.names[:slots])
        )
        self.shard = SlotShard(self.names[:slots], adapters > slots)
        self.in_flight: list[Step] = []
        self.reading: list[tuple[int, str]] = []  # when an adapter is read
        self.ready_at: dict[str, int] = {}  # when one was read last
        self.read_steps = read_steps
        self.now = 0  # forward steps
        self.loads = 0
        self.arrived: dict[int, int] = {}
        self.began: dict[int, int] = {}
        self.waits: list[int] = []  # forward steps from a request's arrival, or the end of its adapter's reading
        self.requests: dict[int, Running] = {}

    def add(self, adapter: str, new: int = ENDLESS, length: int = 5, tenant: str = "") -> Running:
        ids = tuple(self.now % 50 + place for place in range(length))
        asked = GenerationRequest(ids, new, adapter=adapter, namespace=("", adapter), share=Share(tenant))
        request = self.scheduler.add(asked)
        self.arrived[request.id], self.requests[request.id] = self.now, request
        return request

    def step(self) -> bool:
        """Decides steps until two are in flight, and answers the oldest one. False: there is none."""
        while len(self.in_flight) < 2 and (step := self.scheduler.next_step()) is not None:
            self.in_flight.append(step)
            if isinstance(step, ForwardStep):
                self.now += 1
                for chunk in step.chunks:
                    if self.began.setdefault(chunk.request_id, self.now) == self.now:
                        adapter = self.requests[chunk.request_id].request.adapter
                        read = max(self.ready_at.get(adapter, 0), self.arrived[chunk.request_id])
                        self.waits.append(self.now - read)
        ready_at = self.now + self.read_steps
        self.reading += [(ready_at, adapter) for adapter in self.scheduler.adapters.take_unready()]
        idle = not self.in_flight
        for at, adapter in [each for each in self.reading if idle or each[0] <= self.now]:
            self.reading.remove((at, adapter))
            self.scheduler.adapters.note_ready(adapter)
            self.ready_at[adapter] = self.now
        if idle:
            return bool(self.scheduler.queue)
        step = self.in_flight.pop(0)
        tokens = self.shard.run(step)
        self.scheduler.apply(StepAnswer(step.number, list(tokens), list(tokens.values())))
        if isinstance(step, AdapterStep):
            self.loads += 1
            self.scheduler.note_adapter(step.adapter)
        return True

    def wait_of(self, request: Running) -> int:
        return self.began.get(request.id, self.now) - self.arrived[request.id]

    def check_texts(self) -> None:
        for request in self.requests.values():
            history = list(request.request.input_ids)
            for token in request.output_ids:
                assert token == token_after(history)
                history.append(token)


@pytest.mark.parametrize("adapters", [9, 12, 16, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_with_endless_streams_of_more_adapters_than_slots_no_request_starves(adapters: int, caching: bool) -> None:
    server = SlotServer(adapters, prefix_caching=caching)
    streams = [server.add(name) for name in server.names]
    for _ in range(1500):
        assert server.step()
    assert max(server.wait_of(stream) for stream in streams) <= PROMISE
    made = [len(stream.output_ids) for stream in streams]
    assert min(made) >= 1500 * SLOTS / adapters / 2, "turns are not of one length"
    server.check_texts()


@pytest.mark.parametrize("seed", range(8))
def test_requests_that_come_at_any_time_begin_in_time_and_end(seed: int) -> None:
    draw = Random(seed)
    server = SlotServer(draw.choice([9, 20, 40]), in_host=draw.choice([1, 4, 64]), read_steps=draw.choice([0, 1, 5]))
    for name in server.names[:SLOTS]:
        server.add(name)  # endless
    for _ in range(800):
        if draw.random() < 0.1 and len(server.requests) < ROWS:
            adapter = draw.choice([*server.names, ""])
            server.add(adapter, draw.choice([1, 20, 200]), draw.choice([1, 30, 600]))
        assert server.step()
    for request in server.requests.values():
        if request.request.max_new_tokens == ENDLESS:
            server.scheduler.cancel(request.id)
    while server.step():
        pass
    assert all(request.ended for request in server.requests.values()) and server.scheduler.books() is None
    assert len(server.waits) == len(server.requests) and max(server.waits) <= PROMISE
    server.check_texts()


@pytest.mark.parametrize(("tenants", "least"), [(2, 300), (10, 150)])
def test_a_tenant_with_many_adapters_has_fewer_turns_for_each(tenants: int, least: int) -> None:
    """All but the first tenant have a stream of one adapter, the first one has those of all other adapters. Turns go to
    the tenant that was served least, as far as no adapter waits too long; by age alone each has about 100 tokens."""
    server = SlotServer(40)
    owners = ["first"] * (41 - tenants) + [f"t{number}" for number in range(1, tenants)]
    streams = [server.add(name, tenant=owner) for name, owner in zip(server.names, owners, strict=True)]
    for _ in range(800):
        assert server.step()
    made = [len(stream.output_ids) for stream in streams]
    assert min(made[41 - tenants :]) >= least
    assert max(server.wait_of(stream) for stream in streams) <= PROMISE
    server.check_texts()


def test_a_request_that_waits_for_its_adapter_holds_up_no_other_one() -> None:
    server = SlotServer(9, read_steps=10_000)
    for name in server.names[:SLOTS]:
        server.add(name)
    while not server.began:
        server.step()
    blocked = [server.add(server.names[8]) for _ in range(50)]
    others = [server.add(name) for name in ("", server.names[0], server.names[1])]
    for _ in range(4):
        server.step()
    assert all(request.id in server.began for request in others)
    assert not any(request.id in server.began for request in blocked)
    assert {request.waited_for for request in blocked[:8]} == {"adapter"}


def test_a_suspect_that_others_made_room_for_and_that_waits_for_its_adapter_holds_up_none() -> None:
    server = SlotServer(9, read_steps=10_000)
    blocked, other = server.add(server.names[8]), server.add(server.names[0])
    blocked.blame.runs_alone = True
    server.scheduler.joining.places._favoured = blocked
    server.step()
    assert other.id in server.began and blocked.id not in server.began


def test_adapters_that_fit_are_never_loaded_again_and_a_free_slot_is_taken_at_once() -> None:
    server = SlotServer(8)
    for name in server.names * 2:
        server.add(name, 5)
    while server.step():
        pass
    assert server.loads == 0
    server = SlotServer(9, read_steps=0)
    waiting = server.add(server.names[8], 5)
    while server.step():
        pass
    assert (server.loads, waiting.ended) == (1, True) and server.began[waiting.id] == 1


def test_the_slot_that_has_been_idle_for_longest_is_taken_first() -> None:
    server = SlotServer(10, slots=2, read_steps=0)
    old, hot = server.names[:2]
    server.add(old, 5)
    while server.step():
        pass
    server.add(hot, 5)
    while server.step():
        pass
    server.add(server.names[2], 5)
    while server.step():
        pass
    assert set(server.shard.adapters.values()) == {hot, server.names[2]}
    server.add(hot, 5)
    while server.step():
        pass
    server.add(server.names[3], 5)
    while server.step():
        pass
    assert set(server.shard.adapters.values()) == {hot, server.names[3]}, "it was filled first, and was used last"


def test_requests_of_an_adapter_that_cannot_be_loaded_end_and_its_slot_is_taken_by_others() -> None:
    server = SlotServer(10, read_steps=10_000)
    bad, good = (server.add(name, 5) for name in server.names[8:])
    server.step()
    assert server.scheduler.refuse_adapter(server.names[8]) == [bad] and bad.ended
    server.scheduler.adapters.note_ready(server.names[9])
    while not good.ended:
        server.step()
    assert server.loads == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_new_shard_has_the_adapters_of_the_lost_one_or_none(kept: bool) -> None:
    server = SlotServer(9, read_steps=0)
    request = server.add(server.names[8], 10)
    for _ in range(4):
        server.step()
    assert request.output_ids
    server.scheduler.put_back([step for step in server.in_flight if isinstance(step, ForwardStep)])
    server.in_flight.clear()
    resident = tuple(map(server.shard.adapters.__getitem__, range(SLOTS))) if kept else ("",) * SLOTS
    server.scheduler.begin_epoch(CAPACITY, adapters=AdapterRoom(server.names, SLOTS, 64, resident=resident))
    server.shard = SlotShard(resident, True)
    while server.step():
        pass
    assert request.ended and server.loads == (1 if kept else 2)
    server.check_texts()
