"""The engine when its shards are lost: requests go on with the next shards."""

import asyncio
from functools import partial

import pytest

from text_generation_router.engine.loop import MAX_IN_FLIGHT
from text_generation_router.engine.tests.fakes import (
    FakeShards,
    Listener,
    Serve,
    World,
    all_ids,
    dies_at,
    expected_tokens,
    prompt,
    serve,
)
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.step import ForwardStep, Step, StepAnswer


@pytest.mark.parametrize("step_numbers", [(1,), (3,), (5, 30), (2, 20, 15), (40,)])
def test_when_shards_die_every_request_goes_on_with_the_next_ones(serve: Serve, step_numbers: tuple[int, ...]) -> None:
    async def use(world: World) -> None:
        assert await all_ids(world.ask_all(6, 40)) == [expected_tokens(prompt(i), 40) for i in range(6)]
        metrics = world.metrics
        assert metrics.shard_losses._value.get() == len(step_numbers) and metrics.request_resumes._value.get() >= 1
        losses = [event for event in world.groups.events if event != "confirmed"]
        assert losses == ["lost: connection reset"] * len(step_numbers)
        assert metrics.shards_ready._value.get() == 1

    serve(use, *map(dies_at, step_numbers), FakeShards)


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_the_end_of_a_request_says_when_it_waited_to_be_sent_again_after_a_loss(losses: int) -> None:
    async def use(world: World) -> None:
        def stop(listener: Listener) -> None:
            if len(listener.ids) == 30:
                world.engine.end(listener.index, 30)

        listener, stopped = world.ask(prompt(0), 40), world.ask(prompt(1), 40, on_tokens=stop)
        for end in (await listener.until_end(), await stopped.until_end()):
            assert len(end.replays) == losses and end.queue_s is not None and 0 <= end.queue_s < 1
            times = [time for replay in end.replays for time in replay]
            assert times == sorted(times) and all(0 < time < end.inference_s for time in times)

    serve(use, *map(dies_at, (3, 5, 4)[:losses]), FakeShards)


async def test_a_request_that_ends_while_it_waits_for_new_shards_says_since_when_and_one_in_the_queue_nothing(
    world: World,
) -> None:
    listener = world.ask(prompt(0), 400)
    await listener.until_tokens(3)
    world.groups.made[0].lost.set_result("gone")
    await asyncio.sleep(0.05)
    waiting = world.ask(prompt(1), 3)
    for ended in (listener, waiting):
        world.engine.cancel(ended.index)
    assert listener.end is not None and waiting.end is not None
    ((start_s, end_s),) = listener.end.replays
    assert 0 < start_s < end_s == pytest.approx(listener.end.inference_s)
    assert waiting.end.queue_s is None and not waiting.end.replays


def test_after_a_loss_two_steps_are_in_flight_again() -> None:
    async def use(world: World) -> None:
        await all_ids(world.ask_all(6, 40))
        assert [group.max_in_flight for group in world.groups.made] == [MAX_IN_FLIGHT] * 2

    serve(use, dies_at(9), FakeShards)


def test_shards_reported_as_lost_are_left_even_when_no_request_runs(serve: Serve) -> None:
    async def use(world: World) -> None:
        world.groups.made[0].lost.set_result("shard 0 was ended by signal 9")
        await asyncio.sleep(0)
        assert await world.ask(prompt(1), 5).all_ids() == expected_tokens(prompt(1), 5)
        assert len(world.groups.made) == 2 and world.groups.made[0].steps == []

    serve(use, FakeShards, FakeShards)


async def test_without_shards_the_engine_is_not_healthy_and_requests_wait(world: World) -> None:
    assert await world.engine.is_healthy() and world.metrics.shards_ready._value.get() == 1
    world.groups.made[0].lost.set_result("gone")
    await asyncio.sleep(0.05)
    assert not await world.engine.is_healthy() and world.metrics.shards_ready._value.get() == 0
    waiting = world.ask([1, 2], 3)
    await asyncio.sleep(0.05)
    assert not waiting.given and waiting.end is None
    world.engine.cancel(waiting.index)


def test_four_kills_from_outside_in_a_row_lose_no_request_and_the_next_token_resets_the_count(serve: Serve) -> None:
    async def use(world: World) -> None:
        assert await all_ids(world.ask_all(6, 20)) == [expected_tokens(prompt(i), 20) for i in range(6)]
        assert world.metrics.shard_losses._value.get() == 8 and "blamed" not in world.groups.events

    four = [dies_at(3), dies_at(1), dies_at(1), dies_at(1)]
    serve(use, *four, *four, FakeShards)


def test_a_request_that_is_alone_survives_four_kills_in_a_row_too() -> None:
    async def use(world: World) -> None:
        assert await world.ask([5, 6], 9).all_ids() == expected_tokens([5, 6], 9)

    serve(use, *[dies_at(1)] * 4, FakeShards)


@pytest.mark.parametrize("neighbours", [0, 5, 15])
def test_only_the_request_that_kills_the_shards_each_time_is_ended(serve: Serve, neighbours: int) -> None:
    async def use(world: World) -> None:
        bad, *good = world.ask_all(neighbours + 1, 8)
        cause = await bad.failure()
        assert "5 times in a row" in cause and "the last 3 times on nothing else: connection reset" in cause
        assert await all_ids(good) == [expected_tokens(prompt(i + 1), 8) for i in range(len(good))]
        assert world.metrics.shard_losses._value.get() == 5 and world.groups.events.count("blamed") == 1
        if neighbours:
            deaths = "".join("d" if event.startswith("lost") else event[0] for event in world.groups.events)
            assert "dddd" not in deaths, "a neighbour gets on between two deaths alone"

    serve(use, *[dies_at(0, {1})] * 5, FakeShards)


async def test_a_group_is_confirmed_by_its_first_chunk_before_any_token(world: World) -> None:
    listener = world.ask([7] * 200, 3)
    while not world.groups.events:
        await asyncio.sleep(0.001)
    assert world.groups.events == ["confirmed"] and not listener.ids
    assert await listener.all_ids() == expected_tokens([7] * 200, 3)
    assert world.groups.events == ["confirmed"], "once for each epoch"


def test_an_answer_that_came_before_the_loss_counts(serve: Serve) -> None:
    """The shards end right after each answer, so a request gets one token in each epoch."""

    class AnswersOnce(FakeShards):
        async def run(self, step: Step) -> StepAnswer | None:
            answer = await super().run(step)
            if not self.lost.done():
                self.lost.set_result("shard 0 was ended by signal 9")
                await asyncio.sleep(0)  # the engine sees the answer and the loss in the same turn of the event loop
            return answer

    async def use(world: World) -> None:
        assert await world.ask([5, 6], 12).all_ids() == expected_tokens([5, 6], 12)
        assert len(world.groups.made) <= 12

    serve(use, *[AnswersOnce] * 30)


def test_a_token_between_two_deaths_clears_a_request_of_blame() -> None:
    async def use(world: World) -> None:
        assert await world.ask([5, 6], 30).all_ids() == expected_tokens([5, 6], 30)

    serve(use, *[dies_at(4)] * 6, FakeShards)


def test_requests_that_do_not_fit_the_next_shards_fail_and_the_others_go_on() -> None:
    async def use(world: World) -> None:
        large, small = world.ask([1, 2], 300), world.ask([3, 4], 40)
        assert world.engine.snapshot().limits.max_batch_total_tokens == 500
        assert "room for 100 tokens" in await large.failure()
        assert await small.all_ids() == expected_tokens([3, 4], 40)
        assert world.engine.snapshot().limits.max_batch_total_tokens == 100
        with pytest.raises(RefusedError) as refused:
            world.ask([1], 100)
        assert refused.value.reason is Refusal.TOO_LONG

    serve(use, dies_at(6), lambda: FakeShards(capacity=100))


@pytest.mark.parametrize(
    ("capacity", "prefix_caching"),
    [(500, True), (400, True), (600, True), (500, False)],
    ids=["the same", "fewer slots", "more slots", "no prefix cache"],
)
@pytest.mark.parametrize("keeps", [True, False])
def test_tokens_are_computed_again_unless_the_next_shards_have_their_keys(
    serve: Serve, keeps: bool, capacity: int, prefix_caching: bool
) -> None:
    async def use(world: World) -> None:
        assert await all_ids(world.ask_all(6, 40)) == [expected_tokens(prompt(i), 40) for i in range(6)]
        first, second = world.groups.made
        assert first.known_content == 0 and second.known_content == first.content != second.content != 0
        again = [chunk.start for step in second.steps if isinstance(step, ForwardStep) for chunk in step.chunks]
        assert bool(again) and (0 in again) != (keeps and capacity == 500 and prefix_caching)
        assert world.metrics.books_errors._value.get() == 0

    shards = partial(FakeShards, capacity=capacity, keeps=keeps)
    serve(use, dies_at(20), shards, prefix_caching=prefix_caching)


def test_wrong_books_of_the_epoch_before_are_not_gone_by() -> None:
    async def use(world: World) -> None:
        listener = world.ask(prompt(0), 40)
        await listener.until_tokens(3)
        slots = world.engine._scheduler.memory.slots
        slots.allocate(1)  # by no one
        assert await listener.all_ids() == expected_tokens(prompt(0), 40)
        first = next(step for step in world.groups.made[1].steps if isinstance(step, ForwardStep))
        assert first.chunks[0].start == 0 and world.engine._scheduler.memory.slots is not slots

    serve(use, dies_at(20), lambda: FakeShards(keeps=True))
