"""Requests that come from another engine, with what happened to them there, and requests that go to one."""

import asyncio
from collections.abc import Collection

import pytest

from text_generation_router.engine.local import NewRequest
from text_generation_router.engine.protocol import Snapshot
from text_generation_router.engine.tests.fakes import (
    MANY,
    FakeShards,
    Listener,
    World,
    dies_at,
    expected_tokens,
    prompt,
    serve,
)
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.request import EndReason, GenerationRequest, Past


@pytest.mark.parametrize("made", [1, 4, 8])
async def test_a_request_that_brings_tokens_makes_the_others_only_and_its_prompt_stays_its_prompt(
    world: World, made: int
) -> None:
    whole = expected_tokens(prompt(3), 9)
    resumed = world.ask(prompt(3), 9, past=Past(tuple(whole[:made]), has_run=True))
    fresh = world.ask(prompt(3), 9)
    assert await resumed.all_ids() == whole[made:] and await fresh.all_ids() == whole
    first = next(chunk.first for step in world.forward_steps for chunk in step.chunks if chunk.first)
    assert list(first.ids) == [*prompt(3), *whole[:made]] and first.prompt_length == len(prompt(3))


def test_what_counts_against_a_request_is_carried_on_and_told_at_its_end() -> None:
    """The request comes with two deaths that it met alone: the third ends it, and its neighbour goes on."""

    async def use(world: World) -> None:
        deadly = world.ask(prompt(0), 5, past=Past(has_run=True, suspicions=2, counts=2))
        await asyncio.sleep(0)
        other = world.ask(prompt(1), 5)
        assert "the shards died" in await deadly.failure()
        assert deadly.end is not None and (deadly.end.suspicions, deadly.end.counts) == (2, 3)
        assert await other.all_ids() == expected_tokens(prompt(1), 5)

    serve(use, dies_at(1, {1}), FakeShards)


async def test_a_suspect_of_another_engine_runs_alone_until_its_next_token(world: World) -> None:
    others = [world.ask(prompt(i), 12) for i in range(3)]
    await others[0].until_tokens(2)
    suspect = world.ask(prompt(5), 4, past=Past(has_run=True, suspicions=2))
    assert await suspect.all_ids() == expected_tokens(prompt(5), 4)
    for i, other in enumerate(others):
        assert await other.all_ids() == expected_tokens(prompt(i), 12)
    its_first = next(s for s in world.forward_steps if suspect.index in s.request_ids)
    assert its_first.request_ids == (suspect.index,)


def test_a_request_is_withdrawn_only_before_its_first_step() -> None:
    async def use(world: World) -> None:
        running = world.ask(prompt(0), 6)
        await running.until_tokens()
        waiting = world.ask(prompt(1), 6, past=Past(has_run=True, suspicions=1))
        for listener in (running, waiting):
            world.engine.withdraw(listener.index)
        assert waiting.end is not None and waiting.end.reason is EndReason.WITHDRAWN
        assert (waiting.end.suspicions, waiting.end.queue_s) == (1, None)
        assert await running.all_ids() == expected_tokens(prompt(0), 6)

    serve(use, max_batch_size=1)


def test_requests_of_one_prompt_are_all_taken_or_all_refused() -> None:
    async def use(world: World) -> None:
        def group(count: int) -> list[NewRequest]:
            return [NewRequest(GenerationRequest((1,) * 10, 4), Listener(), MANY) for _ in range(count)]

        world.engine.submit_group(group(4))
        with pytest.raises(RefusedError) as refused:
            world.engine.submit_group(group(7))
        assert refused.value.reason is Refusal.OVERLOADED and world.engine.load().waiting == 4
        begun = [NewRequest(one.request, one.sink, MANY, Past(has_run=True)) for one in group(7)]
        indexes = world.engine.submit_group(begun)  # these requests were accepted once
        for index in indexes:
            world.engine.cancel(index)

    serve(use, max_queued_tokens=100)


async def test_a_draining_engine_ends_what_it_has_and_takes_nothing(world: World) -> None:
    listener = world.ask(prompt(0), 8)
    world.engine.drain()
    assert world.engine.load().is_draining
    with pytest.raises(RefusedError) as refused:
        world.ask(prompt(1), 4)
    assert refused.value.reason is Refusal.DRAINING
    assert await listener.all_ids() == expected_tokens(prompt(0), 8) and world.engine.is_idle


def test_watchers_are_told_of_a_loss_with_the_requests_aboard_and_of_the_next_shards() -> None:
    events: list[object] = []

    class Watcher:
        def lost(self, reason: str, aboard: Collection[int]) -> None:
            events.append((reason, sorted(aboard)))

        def ready(self, snapshot: Snapshot) -> None:
            events.append(snapshot.limits.max_batch_total_tokens)

    async def use(world: World) -> None:
        world.engine.watch(Watcher())
        aboard = [world.ask(prompt(i), 6) for i in range(2)]
        queued = world.ask(prompt(2), 6)
        for i, listener in enumerate([*aboard, queued]):
            assert await listener.all_ids() == expected_tokens(prompt(i), 6)
        assert events == [("connection reset", [listener.index for listener in aboard]), 300]

    serve(use, dies_at(3), lambda: FakeShards(capacity=300), max_batch_size=2)
