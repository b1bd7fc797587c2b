"""An engine's state: made while it is watched, in its process and for fronts in others, and never otherwise."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.cluster.endpoints import UnixEndpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_router.engine import watching
from text_generation_router.engine.protocol import EngineStanding, StateNews, Watchable
from text_generation_router.engine.state_hub import StateHub, StateViewer
from text_generation_router.engine.tests import fakes
from text_generation_router.fleet import state_calls
from text_generation_router.fleet.engine import RemoteEngine
from text_generation_router.fleet.tests.fake_service import FakeService

both_ways = fakes.both_ways


def hub_of(world: fakes.World) -> tuple[StateHub, str]:
    assert isinstance(world.client, Watchable)
    [note] = world.client.engines()
    assert note.standing is EngineStanding.READY
    return StateHub(world.client), note.name


async def state_of(viewer: StateViewer, **wanted: int) -> dict[str, Any]:
    """The first state that has the wanted numbers."""
    while True:
        news = await viewer.next()
        assert news is not None and not news.problem, news
        state = json.loads(news.state)
        if all(state[name] == value for name, value in wanted.items()):
            return state


@both_ways
async def test_a_state_has_rows_queue_slots_and_steps_and_no_token(world: fakes.World):
    hub, name = hub_of(world)
    ids = [199, 201, 203] * 20
    listener = world.ask(ids, 300, owner="peer 192.0.2.1")
    await listener.until_tokens(5)
    with hub.watching(name) as viewer:
        state = await state_of(viewer, num_running=1)
        while len(state["steps"]["number"]) < 3:
            state = await state_of(viewer)
    assert state["rows"]["prompt"] == [60] and state["rows"]["most"] == [300] and state["rows"]["made"][0] >= 5
    assert sum(run // 4 for run in state["slots"]["runs"]) == 500 == sum(state["slots"]["counts"])
    assert state["shards"]["is_ready"] and state["tree"]["tokens"] and len(state["rows"]["tenant"][0]) == 8
    assert "192.0.2.1" not in json.dumps(state) and "201" not in json.dumps(state["tree"])
    assert len(state["fronts"]) == (world.client is not world.engine)
    world.client.cancel(listener.index)


@both_ways
async def test_nothing_is_computed_without_a_viewer(world: fakes.World):
    hub, name = hub_of(world)
    await asyncio.gather(*(one.all_ids() for one in world.ask_all(3, 20)))
    assert world.engine.num_states == 0 and world.engine._states._counts.ring is None
    with hub.watching(name) as first, hub.watching(name) as second:
        await state_of(first)
        await state_of(second)
        assert hub.num_viewers == 2
    await asyncio.sleep(0)
    until = asyncio.get_running_loop().time() + 60
    while world.engine._states._counts.ring is not None:  # behind gRPC the end of the call has to arrive
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.01)
    made = world.engine.num_states
    await asyncio.gather(*(one.all_ids() for one in world.ask_all(3, 20)))
    assert world.engine.num_states == made > 0


@both_ways
async def test_all_viewers_share_one_watch_and_a_viewer_that_does_not_read_is_skipped(world: fakes.World):
    hub, name = hub_of(world)
    with ExitStack() as stack:
        viewers = [stack.enter_context(hub.watching(name)) for _ in range(8)]
        reading, asleep = viewers[0], viewers[7]
        for _ in range(4):
            await state_of(reading)
        made = world.engine.num_states
        assert 4 <= made <= 8, "one state for all"
        assert asleep.num_skipped >= 2 and reading.num_skipped <= 1
        newest = await state_of(asleep)
        assert newest["shards"]["since_s"] >= 0 and await asleep.next(0) is None, "only the newest waits"


async def test_a_large_state_is_made_as_seldom_as_a_viewer_may_be_sent_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watching, "EVERY_S", 0.01)
    async with fakes.served() as world:
        hub, name = hub_of(world)
        with hub.watching(name) as viewer:
            for _ in range(3):
                await state_of(viewer)
        monkeypatch.setattr(watching, "STATE_BYTES_PER_S", 1)
        with hub.watching(name) as viewer:
            await state_of(viewer)
            assert await viewer.next(0.3) is None


async def test_a_loss_of_the_shards_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watching, "EVERY_S", 100.0)
    async with fakes.served(fakes.FakeShards, fakes.FakeShards) as world:
        hub, name = hub_of(world)
        with hub.watching(name) as viewer:
            await state_of(viewer)
            world.groups.made[0].lost.set_result("killed by a test")
            state = await state_of(viewer)
            while state["shards"]["is_ready"] is False:
                state = await state_of(viewer)
            assert state["shards"]["loss"] == "killed by a test" and state["shards"]["num_losses"] == 1


async def test_a_fault_of_the_view_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    async with fakes.served() as world:
        hub, name = hub_of(world)
        monkeypatch.setattr(watching, "rows_of", lambda *_: 1 / 0)
        with hub.watching(name) as viewer:
            news = await viewer.next()
            assert news == StateNews(problem="the state could not be read: ZeroDivisionError")
        await asyncio.gather(*(one.all_ids() for one in world.ask_all(1, 5)))


async def test_an_older_engine_says_so_and_a_lost_one_is_away(tmp_path: Path):
    path = str(tmp_path / "engine")
    security = Security(Role.FRONT, None, insecure=False, logger=watching.logger)
    service = FakeService(path)
    async with service:
        front = RemoteEngine([UnixEndpoint(path)], security)
        await front.start()
        [note] = front.engines()
        with StateHub(front).watching(note.name) as viewer:
            assert await viewer.next() == StateNews(problem=state_calls.OLDER)
            await service.die()
            assert await viewer.next() == StateNews(problem=state_calls.AWAY)
            [note] = front.engines()
            assert note.standing is EngineStanding.AWAY and note.loss and note.loss_s is not None
        with StateHub(front).watching("unix:/nowhere") as viewer:
            assert await viewer.next() == StateNews(problem="there is no such engine any more")
        await front.close()


@pytest.mark.parametrize("state", [b"{", b"[]", b'{"a":\n1}', b"{}" + b" " * 70_000, b"\xff"])
def test_a_state_that_is_not_one_line_of_json_is_not_passed_on(state: bytes):
    assert state_calls._news_of(state).state == b"" and state_calls._news_of(state).problem
    assert state_calls._news_of(b'{"rows":{}}') == StateNews(b'{"rows":{}}')
