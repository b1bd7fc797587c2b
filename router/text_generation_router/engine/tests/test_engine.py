"""The engine with fake shards and fake sinks: requests, their tokens and their ends."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from text_generation_common.logs import id_of, request_id
from text_generation_common.sampling import Sampling
from text_generation_router.engine.loop import MAX_IN_FLIGHT
from text_generation_router.engine.shards import WarmupAnswer
from text_generation_router.engine.tests.fakes import (
    LIMIT_S,
    MANY,
    FakeShards,
    Listener,
    Serve,
    World,
    all_ids,
    both_ways,
    expected_tokens,
    fails,
    prompt,
    serve,
    top_id,
)
from text_generation_router.errors import Refusal, RefusedError, StepFailedError, WarmupRefusedError
from text_generation_router.metrics.page import render
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.scheduling.step import ForwardStep, Step, StepAnswer


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def used_up(world: World, listener: Listener, credits: int, prompt_length: int) -> int:
    """Waits until the engine's first request has used up its credits, and its sink has all tokens that were made for
    it. Returns their number."""
    shards = world.groups.made[0]
    await listener.until_tokens(credits)
    await until(lambda: not shards._in_flight and len(listener.ids) == len(shards.histories[1]) - prompt_length)
    return len(listener.ids)


@both_ways
async def test_every_request_gets_its_own_tokens_with_two_steps_in_flight(world: World) -> None:
    listeners = [world.ask(prompt(i), 5 + i) for i in range(12)]
    assert await all_ids(listeners) == [expected_tokens(prompt(i), 5 + i) for i in range(12)]

    assert world.groups.made[0].max_in_flight == 2
    between_tokens = world.metrics.time_between_tokens.series
    assert sum(between_tokens.counts) == sum(4 + i for i in range(12)) and 0 < between_tokens.sum < 60 * 12


def test_requests_that_do_not_fit_wait_their_turn(serve: Serve) -> None:
    async def use(world: World) -> None:
        assert await all_ids(world.ask_all(12, 30)) == [expected_tokens(prompt(i), 30) for i in range(12)]

    serve(use, lambda: FakeShards(capacity=100))


def test_the_shards_keep_rows_for_the_largest_batch_and_slots_for_all_requests(serve: Serve) -> None:
    async def use(world: World) -> None:
        listeners = world.ask_all(6, 8)
        assert await all_ids(listeners) == [expected_tokens(prompt(i), 8) for i in range(6)]
        shards = world.groups.made[0]
        assert shards.wanted == (64, None, 16, None, 2)
        assert max(len(step.request_ids) for step in shards.steps if isinstance(step, ForwardStep)) == 2

    serve(use, max_batch_size=2)


@pytest.mark.parametrize("failing", [1, 2, 5, 8])
def test_a_step_that_fails_once_costs_no_request_a_token(serve: Serve, failing: int) -> None:
    def fail(step: ForwardStep) -> None:
        nonlocal failed
        if step.number == failing and not failed:
            failed = True
            raise StepFailedError(f"step {failing} failed")

    failed = False

    async def use(world: World) -> None:
        assert await all_ids(world.ask_all(6, 8)) == [expected_tokens(prompt(i), 8) for i in range(6)]

    serve(use, fails(fail))
    assert failed


def test_a_request_that_makes_its_steps_fail_is_the_only_one_that_fails(serve: Serve) -> None:
    def fail(step: ForwardStep) -> None:
        if 3 in step.request_ids:
            raise StepFailedError("poison")

    async def use(world: World) -> None:
        listeners = world.ask_all(6, 8)
        bad = listeners.pop(2)
        assert "poison" in await bad.failure()
        assert await all_ids(listeners) == [expected_tokens(prompt(i), 8) for i in range(6) if i != 2]

    serve(use, fails(fail))


@both_ways
async def test_a_cancelled_request_leaves_and_the_others_go_on(world: World) -> None:
    gone, stays = world.ask([1, 2, 3], 400), world.ask(prompt(1), 20)
    await gone.until_tokens()
    for _ in range(2):
        world.client.cancel(gone.index)
    made = gone.ids
    assert gone.end is not None and gone.end.reason is EndReason.CANCELLED and gone.end.inference_s > 0
    assert await stays.all_ids() == expected_tokens(prompt(1), 20)
    assert gone.ids == made, "no token comes after the end"


def test_a_request_cancelled_in_the_queue_reaches_no_shard(serve: Serve) -> None:
    async def use(world: World) -> None:
        first, waiting = world.ask([1, 2, 3], 20), world.ask([4, 5, 6], 20)
        await first.until_tokens()
        assert world.client.has_begun(first.index) and not world.client.has_begun(waiting.index)
        world.client.cancel(waiting.index)
        assert waiting.end is not None and waiting.end.inference_s == 0
        await first.all_ids()
        assert {i for step in world.forward_steps for i in step.request_ids} == {1}

    serve(use, max_rows=1)


def test_a_sink_that_ends_its_request_gets_no_further_token_and_no_step_is_decided_for_it() -> None:
    def end_at_third(listener: Listener) -> None:
        if len(listener.ids) == 3:
            world.engine.end(listener.index, 3)
            seen.append(listener.end)
            world.engine.end(listener.index, 3)
            world.engine.cancel(listener.index)

    seen: list[object] = []
    world: World

    async def use(used: World) -> None:
        nonlocal world
        world = used
        listener = world.ask([7], 50, on_tokens=end_at_third)
        end = await listener.until_end()
        assert end.reason is EndReason.STOPPED and seen == [end], "`ended` is called within `end`"
        await asyncio.sleep(0.02)
        assert listener.ids == expected_tokens([7], 3)
        # Four steps: the prompt's step, two steps for further tokens, and the step that was in flight at the third
        # token.
        assert len(world.forward_steps) == 4
        assert world.metrics.length_estimate_ratio._sum.get() > 0

    serve(use)


@both_ways
async def test_a_sink_may_cancel_another_request_of_the_same_step(world: World) -> None:
    def cancel_other(listener: Listener) -> None:
        if len(listener.ids) == 3:
            world.client.cancel(other.index)

    cancels = world.ask(prompt(0), 8, on_tokens=cancel_other)
    other, third = world.ask(prompt(1), 8), world.ask(prompt(2), 8)
    assert await all_ids([cancels, third]) == [expected_tokens(prompt(i), 8) for i in (0, 2)]
    assert other.end is not None and other.end.reason is EndReason.CANCELLED and len(other.ids) < 4


def test_an_end_of_text_token_ends_a_request_unless_it_is_ignored(serve: Serve) -> None:
    whole = expected_tokens([3], 30)
    end_id = whole[9]

    class EndsTexts(FakeShards):
        info = replace(FakeShards.info, eos_token_ids=(end_id,))

    async def use(world: World) -> None:
        heeds, ignores = Listener(), Listener()
        for ignore_eos, listener in ((False, heeds), (True, ignores)):
            world.client.submit_all([GenerationRequest((3,), 30, ignore_eos=ignore_eos)], [listener], MANY)
        assert (await heeds.until_end()).reason is EndReason.EOS_TOKEN
        assert heeds.ids == whole[: whole.index(end_id) + 1]
        assert await ignores.all_ids() == whole

    serve(use, EndsTexts)


@both_ways
async def test_the_first_tokens_say_how_long_the_request_waited_and_what_was_cached(world: World) -> None:
    for cached in (0, 49):
        asked_s = time.monotonic()
        listener = world.ask(list(range(1, 51)), 5)
        assert await listener.all_ids() == expected_tokens(list(range(1, 51)), 5)
        first = listener.given[0].first
        assert first is not None and first.cached_tokens == cached
        assert 0 <= first.queue_s <= time.monotonic() - asked_s
        times = [tokens.inference_s for tokens in listener.given]
        assert times[0] > 0 and times == sorted(times)
        assert listener.end is not None and listener.end.inference_s == times[-1]
    page = render(world.metrics.registry)
    assert "\ntgi_prefix_hit_tokens 49\n" in page and "\ntgi_prefilled_tokens 51\n" in page


async def test_each_step_whose_new_rows_join_running_rows_is_timed(world: World) -> None:
    def one_more(listener: Listener) -> None:
        if len(listener.ids) in (1, 6):
            later.append(world.ask(prompt(len(later) + 1), 2))

    later: list[Listener] = []
    await world.ask(prompt(0), 12, on_tokens=one_more).all_ids()
    await all_ids(later)
    counted = sum(world.metrics.batch_concat.labels(reason=r)._value.get() for r in ("backpressure", "wait_exceeded"))
    page = render(world.metrics.registry)
    assert counted == len(later) == 2
    assert '\ntgi_batch_concat_duration_count{method="decode"} 2\n' in page
    assert '\ntgi_batch_concat_duration_sum{method="decode"} 0\n' not in page


@both_ways
async def test_requests_get_their_own_top_tokens_also_beside_a_request_with_non_finite_logits(world: World) -> None:
    shards = world.groups.made[0]
    shards.poisoned, shards.top_counts = {2}, {1: 1, 2: 3, 3: 2, 4: 0}
    listeners = world.ask_all(4, 6)
    assert "not finite" in await listeners[1].failure() and not listeners[1].ids
    for listener in (listeners[0], *listeners[2:]):
        await listener.all_ids()
        best = [top_id(listener.index, rank) for rank in range(shards.top_counts[listener.index])]
        for tokens in listener.given:
            assert [found for found, _ in (tokens.tops[0] if tokens.tops else ())] == best


@both_ways
async def test_a_request_whose_logits_are_not_finite_ends_alone(world: World) -> None:
    world.groups.made[0].poisoned = {2}
    listeners = world.ask_all(4, 8)
    bad = listeners.pop(1)
    assert "not finite" in await bad.failure()
    assert await all_ids(listeners) == [expected_tokens(prompt(i), 8) for i in (0, 2, 3)]


@both_ways
async def test_a_request_ends_with_the_token_that_completes_its_grammar(world: World) -> None:
    expected = expected_tokens(prompt(1), 12)
    last = next(i for i in range(3, 12) if expected[i] not in expected[:i])
    world.groups.made[0].completing = {2: expected[last]}
    listeners = world.ask_all(3, 12)
    constrained = listeners.pop(1)
    assert (await constrained.until_end()).reason is EndReason.COMPLETE
    assert constrained.ids == expected[: last + 1]
    assert await all_ids(listeners) == [expected_tokens(prompt(i), 12) for i in (0, 2)]


@both_ways
async def test_the_cache_keeps_nothing_of_a_request_whose_logits_were_not_finite(world: World) -> None:
    async def cached(ids: range) -> int:
        listener = world.ask(list(ids), 5)
        await listener.until_end()
        return listener.given[0].first.cached_tokens if listener.given and listener.given[0].first else -1

    world.groups.made[0].poisoned = {2}
    assert await cached(range(20)) == 0
    assert await cached(range(60)) == -1
    assert await cached(range(60)) == 20, "the good text is found, and nothing of the other"
    assert await cached(range(80)) == 60


@both_ways
async def test_a_request_without_credits_pauses_until_it_gets_more(world: World) -> None:
    paused, other = world.ask(prompt(0), 40, credits=10), world.ask(prompt(1), 40)
    assert await other.all_ids() == expected_tokens(prompt(1), 40)
    made = await used_up(world, paused, 10, len(prompt(0)))
    assert made <= 10 + MAX_IN_FLIGHT
    world.client.credit(paused.index, made - 10)
    await asyncio.sleep(0.05)
    assert len(paused.ids) == made, "it has used them up already"
    world.client.credit(paused.index, 100)
    assert await paused.all_ids() == expected_tokens(prompt(0), 40)
    world.client.credit(paused.index, 100)


@both_ways
async def test_top_tokens_cost_credits_too(world: World) -> None:
    world.groups.made[0].top_counts = {1: 4}
    listener = Listener()
    request = GenerationRequest((1, 2), 20, Sampling(top_n_tokens=4))
    [index] = world.client.submit_all([request], [listener], 10).indexes
    assert await used_up(world, listener, 2, 2) <= 2 + MAX_IN_FLIGHT
    world.client.credit(index, 1000)
    await listener.all_ids()


@pytest.mark.parametrize("at", ["first tokens", "last tokens", "end"])
def test_a_sink_that_raises_an_error_fails_its_own_request_only(
    serve: Serve, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(Listener):
        def take(self, tokens: object, ended: object) -> None:
            if at == "first tokens" or (at == "last tokens" and ended is not None):
                raise ZeroDivisionError

        def ended(self, ended: object) -> None:
            super().ended(ended)  # type: ignore[arg-type]
            if at == "end":
                raise ZeroDivisionError

    async def use(world: World) -> None:
        raising, others = Raises(), world.ask_all(3, 8)
        token = request_id.set("mine-1")
        [index] = world.client.submit_all([GenerationRequest((9, 9), 8)], [raising], MANY).indexes
        request_id.reset(token)
        if at == "end":
            world.client.cancel(index)
            assert (await raising.until_end()).reason is EndReason.CANCELLED
        else:
            assert await raising.failure() == "Server error: ZeroDivisionError"
        assert await all_ids(others) == [expected_tokens(prompt(i), 8) for i in range(3)]
        assert "ZeroDivisionError" in caplog.text and not world.engine.failed.done()
        assert [id_of(record) for record in caplog.records if "the sink of" in record.message] == ["mine-1"]

    serve(use)


def test_an_error_of_the_engine_itself_fails_every_request_and_is_reported() -> None:
    def fail(step: ForwardStep) -> None:
        raise ZeroDivisionError

    async def use(world: World) -> None:
        assert await world.ask([1, 2], 3).failure() == "Server error: ZeroDivisionError"
        await asyncio.wait_for(world.engine.failed, LIMIT_S)
        assert not await world.engine.is_healthy()
        with pytest.raises(RefusedError, match="closed"):
            world.ask([1, 2], 3)
        world.engine._scheduler.put_back(())

    serve(use, fails(fail))


def test_shards_that_refuse_the_first_warm_up_end_the_start() -> None:
    class Refusing(FakeShards):
        async def warmup(self, *wanted: int | None, content: int, known_content: int) -> WarmupAnswer:
            raise WarmupRefusedError("--max-batch-total-tokens 9 needs more")

    async def run() -> None:
        engine = World(Refusing).engine
        with pytest.raises(WarmupRefusedError, match="needs more"):
            await engine.start()
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


async def test_a_closed_engine_ends_waiting_requests_accepts_no_request_and_leaves_no_task() -> None:
    class NeverAnswers(FakeShards):
        async def run(self, step: Step) -> StepAnswer | None:
            self.steps.append(step)
            await asyncio.Event().wait()

    world = World(NeverAnswers)
    await world.engine.start()
    listener = world.ask([1, 2], 3)
    await until(lambda: len(world.forward_steps) >= MAX_IN_FLIGHT)
    await asyncio.sleep(0.01)
    assert len(world.forward_steps) == MAX_IN_FLIGHT
    for _ in range(2):
        await world.engine.close()
    assert listener.end is not None and listener.end.reason is EndReason.CLOSED
    world.engine.cancel(listener.index)
    with pytest.raises(RefusedError) as refused:
        world.ask([1, 2], 3)
    assert refused.value.reason is Refusal.CLOSED
    assert asyncio.all_tasks() == {asyncio.current_task()}


@both_ways
async def test_a_deadline_ends_a_running_request(world: World) -> None:
    def hold(listener: Listener) -> None:
        world.groups.made[0].may_answer.clear()  # the request does not come to its end before its deadline

    asked_s = time.monotonic()
    listener = world.ask([1, 2, 3], 450, timeout_s=0.5, on_tokens=hold)
    end = await listener.until_end()
    world.groups.made[0].may_answer.set()
    assert end.reason is EndReason.DEADLINE and 0 < len(listener.ids) < 450
    assert listener.given[-1].inference_s <= end.inference_s <= time.monotonic() - asked_s


@both_ways
async def test_a_request_that_ends_before_its_deadline_is_not_ended_again(world: World) -> None:
    listener = world.ask([1, 2, 3], 2, timeout_s=100.0)
    assert len(await listener.all_ids()) == 2
    assert world.engine._requests._deadlines._timers == {}
    assert world.client is world.engine or world.client._deadlines._timers == {}, "a front has a timer of its own"


def test_a_request_whose_deadline_passes_in_the_queue_reaches_no_shard(serve: Serve) -> None:
    async def use(world: World) -> None:
        first, waiting = world.ask([1, 2, 3], 60), world.ask([4, 5, 6], 20, timeout_s=0.02)
        end = await waiting.until_end()
        assert end.reason is EndReason.DEADLINE and not waiting.ids
        await first.all_ids()
        assert {i for step in world.forward_steps for i in step.request_ids} == {1}

    serve(use, max_rows=1)


def test_a_queue_of_too_many_tokens_refuses_requests_and_says_when_to_retry() -> None:
    async def use(world: World) -> None:
        running = world.ask([1], 20)
        await running.until_tokens()
        waiting = [world.ask([2] * 30, 5) for _ in range(2)]
        with pytest.raises(RefusedError) as refused:
            world.ask([2] * 30, 5)
        assert refused.value.reason is Refusal.OVERLOADED and 1 <= refused.value.retry_after_s <= 60
        assert world.engine.load().retry_after_s == refused.value.retry_after_s
        await all_ids([running, *waiting])

    serve(use, max_rows=1, max_queued_tokens=60)


@both_ways
async def test_rows_without_a_request_are_noticed_when_the_engine_is_idle(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for rows, errors in ((0, 0), (3, 1)):
        world.groups.made[0].rows_left = rows
        world.engine._audit._asked_s = float("-inf")
        await world.ask([1, 2], 3).all_ids()
        await asyncio.sleep(0.05)
        await until(lambda errors=errors: world.metrics.books_errors._value.get() == errors)
    assert "holds 3 rows" in caplog.text
