"""The engine with fake shards. As with a greedy model, each token depends only on the tokens before it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from text_generation_common.flags.requests import SchedulingFlags, TokenFlags
from text_generation_router.api.generation_stream import GenerationStream
from text_generation_router.engine.local import MAX_IN_FLIGHT, Engine, EngineConfig
from text_generation_router.engine.shards import ModelInfo, ShardView, StepAnswer, WarmupAnswer
from text_generation_router.errors import (
    DeadlineError,
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    ShardsError,
    StepAbortedError,
    StepFailedError,
    ValidationError,
    WarmupRefusedError,
)
from text_generation_router.metrics import Metrics
from text_generation_router.scheduling.request import FinishReason, GenerationRequest
from text_generation_router.scheduling.step import ClearStep, FilterStep, ForwardStep, Step
from text_generation_router.text.detokenization import Vocabulary
from text_generation_router.text.events import TokenEvent

EOS = 255
INFO = ModelInfo("torch.float32", "cpu", 256, 512, (EOS,), "reference", 1, 1)


def make_vocabulary() -> Vocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary.of(tokenizer, [EOS])


def next_token(history: list[int]) -> int:
    return (sum(history) * 31 + len(history)) % 60 + 10


def top_id(request_id: int, rank: int) -> int:
    return 10 * request_id + rank


class FakeShards:
    """A group of shards that answers after some turns of the event loop. `fail(step)` may raise, as a step may."""

    info = INFO
    epoch = INFO.epoch

    def __init__(self, fail: Callable[[ForwardStep], None] = lambda step: None, capacity: int = 500) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.capacity = capacity
        self.poisoned: set[int] = set()  # requests whose logits are not finite
        self.top_counts: dict[int, int] = {}  # by request: number of top tokens in each answer
        self.rows_left = 0  # number of rows that it reports while no request runs
        self.steps: list[Step] = []
        self.histories: dict[int, list[int]] = {}
        self.most_in_flight = 0
        self._in_flight = 0
        self._fail = fail
        self._failed = False

    async def run(self, step: Step) -> StepAnswer | None:
        assert step.number == len(self.steps) + 1, "steps are sent in their order"
        self.steps.append(step)
        self._in_flight += isinstance(step, ForwardStep)
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        answer = self._answer(step)
        await asyncio.sleep(0.002)
        self._in_flight -= isinstance(step, ForwardStep)
        if isinstance(answer, ShardsError):
            raise answer
        return answer

    def _answer(self, step: Step) -> StepAnswer | ShardsError | None:
        """The answer, computed when the step is sent: a shard runs steps in the order they are sent."""
        if isinstance(step, ClearStep):
            self._failed = False
            self.histories.clear()
        if self._failed:
            return StepAbortedError("an earlier step failed")
        try:
            return self._compute(step)
        except ShardsError as error:
            self._failed = True
            return error

    def _compute(self, step: Step) -> StepAnswer | None:
        if isinstance(step, FilterStep):
            self.histories = {i: h for i, h in self.histories.items() if i in step.keep}
        if not isinstance(step, ForwardStep):
            return None
        self._fail(step)
        for chunk in step.chunks:
            if chunk.first:
                self.histories[chunk.request_id] = list(chunk.first.ids)
        ids = [*step.decode_ids, *(c.request_id for c in step.chunks if c.last)]
        tokens = []
        for request_id in ids:
            tokens.append(next_token(self.histories[request_id]))
            self.histories[request_id].append(tokens[-1])
        zeros = np.zeros(len(ids), dtype=np.float32)
        poisoned = [i for i in ids if i in self.poisoned]
        counts = [self.top_counts.get(i, 0) for i in ids]
        tops = [top_id(i, rank) for i, count in zip(ids, counts, strict=True) for rank in range(count)]
        top_logprobs = np.zeros(len(tops), dtype=np.float32)
        return StepAnswer(step.number, ids, tokens, zeros, counts, tops, top_logprobs, 1, 1, 1, True, poisoned)

    async def warmup(self, *wanted: int | None) -> WarmupAnswer:
        return WarmupAnswer(self.capacity, self.capacity)

    async def is_healthy(self) -> bool:
        return True

    async def views(self) -> list[ShardView]:
        return [ShardView(self.rows_left, self.capacity)]

    async def close(self) -> None:
        pass


class FakeShardGroups:
    """Hands out one group of fake shards after the other."""

    def __init__(self, *groups: Callable[[], FakeShards]) -> None:
        self.made: list[FakeShards] = []
        self.events: list[str] = []
        self._groups = list(groups)

    async def next(self) -> FakeShards:
        if not self._groups:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.made.append(self._groups.pop(0)())
        return self.made[-1]

    def lost(self, group: FakeShards, reason: str) -> None:
        self.events.append(f"lost: {reason}")

    def confirmed(self, group: FakeShards) -> None:
        self.events.append("confirmed")

    def blamed(self, group: FakeShards) -> None:
        self.events.append("blamed")

    async def close(self) -> None:
        pass


def make_engine(shard_groups: FakeShardGroups, **limits: int) -> Engine:
    config = EngineConfig(
        TokenFlags(max_batch_prefill_tokens=64),
        SchedulingFlags(max_queued_tokens=limits.get("max_queued_tokens")),
        max_concurrent_requests=limits.get("max_rows", 16),
    )
    return Engine(shard_groups, config, lambda info: make_vocabulary(), Metrics())  # type: ignore[arg-type]


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


async def collect(stream: GenerationStream) -> list[int]:
    return [event.token.id async for event in stream]


def prompt(i: int) -> list[int]:
    return [i + 1] * (i + 3)


def serve(
    use: Callable[[Engine, FakeShardGroups], Awaitable[None]], *groups: Callable[[], FakeShards], **limits: int
) -> None:
    """Runs `use` with an engine whose shard groups are `groups`; by default a single group that never fails."""

    async def run() -> None:
        shard_groups = FakeShardGroups(*(groups or (FakeShards,)))
        engine = make_engine(shard_groups, **limits)
        await engine.start()
        try:
            await asyncio.wait_for(use(engine, shard_groups), timeout=20)
            await asyncio.sleep(0.02)
            assert engine._scheduler.memory.num_held == 0 and engine._scheduler.books() is None, "all slots come back"
        finally:
            await engine.close()

    asyncio.run(run())


def fails(fail: Callable[[ForwardStep], None]) -> Callable[[], FakeShards]:
    return lambda: FakeShards(fail)


def dies_at(step_number: int, failed_ids: set[int] | None = None) -> Callable[[], FakeShards]:
    """Shards that are lost from step `step_number` on; with `failed_ids`, at the first such step that carries one of
    these requests."""

    def fail(step: ForwardStep) -> None:
        if step.number >= step_number and (failed_ids is None or failed_ids & set(step.request_ids)):
            raise ShardsError("connection reset")

    return fails(fail)


def test_every_request_gets_its_own_tokens_with_two_steps_in_flight() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 5 + i)) for i in range(12)]
        tokens = await asyncio.gather(*map(collect, streams))
        assert tokens == [expected_tokens(prompt(i), 5 + i) for i in range(12)]

        assert shard_groups.made[0].most_in_flight == 2
        between_tokens = engine._metrics.time_between_tokens
        assert sum(between_tokens._counts) == sum(4 + i for i in range(12)) and 0 < between_tokens._sum < 60 * 12

    serve(use)


def test_requests_that_do_not_fit_wait_their_turn() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 30)) for i in range(12)]
        tokens = await asyncio.gather(*map(collect, streams))
        assert tokens == [expected_tokens(prompt(i), 30) for i in range(12)]

    serve(use, lambda: FakeShards(capacity=100))


@pytest.mark.parametrize("failing", [1, 2, 5, 8])
def test_a_step_that_fails_once_costs_no_request_a_token(failing: int) -> None:
    def fail(step: ForwardStep) -> None:
        nonlocal failed
        if step.number == failing and not failed:
            failed = True
            raise StepFailedError(f"step {failing} failed")

    failed = False

    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 8)) for i in range(6)]
        tokens = await asyncio.gather(*map(collect, streams))
        assert tokens == [expected_tokens(prompt(i), 8) for i in range(6)]

    serve(use, fails(fail))
    assert failed


def test_a_request_that_makes_its_steps_fail_is_the_only_one_that_fails() -> None:
    def fail(step: ForwardStep) -> None:
        if 3 in step.request_ids:
            raise StepFailedError("poison")

    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 8)) for i in range(6)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        (bad,) = [i for i, result in enumerate(results) if isinstance(result, BaseException)]
        assert bad == 2 and isinstance(results[2], GenerationError) and "poison" in str(results[2])
        assert all(results[i] == expected_tokens(prompt(i), 8) for i in range(6) if i != 2)
        assert engine._metrics.request_failure.labels(err="generation")._value.get() == 1

    serve(use, fails(fail))


def test_a_cancelled_request_leaves_and_the_others_go_on() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        gone = engine.submit(GenerationRequest((1, 2, 3), 400))
        stays = engine.submit(GenerationRequest(tuple(prompt(1)), 20))
        await anext(gone)
        gone.cancel()
        gone.cancel()
        assert engine._metrics.request_failure.labels(err="dropped")._value.get() == 1
        assert await collect(stays) == expected_tokens(prompt(1), 20)
        assert engine._scheduler.is_idle or engine._scheduler.active.num_running == 0

    serve(use)


def test_a_request_cancelled_in_the_queue_reaches_no_shard() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        first = engine.submit(GenerationRequest((1, 2, 3), 20))
        waiting = engine.submit(GenerationRequest((4, 5, 6), 20))
        await anext(first)
        waiting.cancel()
        await collect(first)

        steps = shard_groups.made[0].steps
        assert {i for step in steps if isinstance(step, ForwardStep) for i in step.request_ids} == {1}

    serve(use, max_rows=1)


def test_an_end_of_text_token_ends_a_request_and_later_tokens_are_dropped() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        events = [event async for event in engine.submit(GenerationRequest((7,), 50, stop=(chr_of(next_token([7])),)))]
        assert len(events) == 1
        assert events[0].finish is not None and events[0].finish.reason is FinishReason.STOP_SEQUENCE
        assert events[0].finish.generated_tokens == 1

    serve(use)


def chr_of(token: int) -> str:
    return make_vocabulary().text_of(token)


@pytest.mark.parametrize("step_numbers", [(1,), (3,), (5, 30), (2, 20, 15), (40,)])
def test_when_shards_die_every_stream_goes_on_with_the_next_ones(step_numbers: tuple[int, ...]) -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 40)) for i in range(6)]
        assert await asyncio.gather(*map(collect, streams)) == [expected_tokens(prompt(i), 40) for i in range(6)]
        metrics = engine._metrics
        assert metrics.shard_losses._value.get() == len(step_numbers) and metrics.request_resumes._value.get() >= 1
        assert [event for event in shard_groups.events if event != "confirmed"] == ["lost: connection reset"] * len(
            step_numbers
        )

    serve(use, *map(dies_at, step_numbers), FakeShards)


def test_after_a_loss_two_steps_are_in_flight_again() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        await asyncio.gather(*(collect(engine.submit(GenerationRequest(tuple(prompt(i)), 40))) for i in range(6)))
        assert [group.most_in_flight for group in shard_groups.made] == [MAX_IN_FLIGHT] * 2

    serve(use, dies_at(9), FakeShards)


def test_shards_reported_as_lost_are_left_even_when_no_request_runs() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        shard_groups.made[0].lost.set_result("shard 0 was ended by signal 9")
        await asyncio.sleep(0)
        stream = engine.submit(GenerationRequest(tuple(prompt(1)), 5))
        assert await collect(stream) == expected_tokens(prompt(1), 5)
        assert len(shard_groups.made) == 2 and shard_groups.made[0].steps == []

    serve(use, FakeShards, FakeShards)


def test_without_shards_the_engine_is_not_healthy_and_requests_wait() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        assert await engine.is_healthy()
        shard_groups.made[0].lost.set_result("gone")
        await asyncio.sleep(0.05)
        assert not await engine.is_healthy()
        stream = engine.submit(GenerationRequest((1, 2), 3))
        waiting = asyncio.ensure_future(anext(stream))
        assert not (await asyncio.wait([waiting], timeout=0.05))[0]
        waiting.cancel()
        stream.cancel()

    serve(use)


def test_four_kills_from_outside_in_a_row_lose_no_stream_and_the_next_token_resets_the_count() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 20)) for i in range(6)]
        assert await asyncio.gather(*map(collect, streams)) == [expected_tokens(prompt(i), 20) for i in range(6)]
        assert engine._metrics.shard_losses._value.get() == 8 and "blamed" not in shard_groups.events

    four = [dies_at(3), dies_at(1), dies_at(1), dies_at(1)]
    serve(use, *four, *four, FakeShards)


def test_a_stream_that_is_alone_survives_four_kills_in_a_row_too() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        assert await collect(engine.submit(GenerationRequest((5, 6), 9))) == expected_tokens([5, 6], 9)

    serve(use, *[dies_at(1)] * 4, FakeShards)


@pytest.mark.parametrize("neighbours", [0, 5, 15])
def test_only_the_request_that_kills_the_shards_each_time_is_ended(neighbours: int) -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        bad, *good = [engine.submit(GenerationRequest(tuple(prompt(i)), 8)) for i in range(neighbours + 1)]
        with pytest.raises(GenerationError, match="5 times in a row") as ended:
            await collect(bad)
        assert "the last 3 times on nothing else: connection reset" in str(ended.value)
        assert await asyncio.gather(*map(collect, good)) == [
            expected_tokens(prompt(i + 1), 8) for i in range(len(good))
        ]
        assert engine._metrics.shard_losses._value.get() == 5 and shard_groups.events.count("blamed") == 1
        if neighbours:
            deaths = "".join("d" if event.startswith("lost") else event[0] for event in shard_groups.events)
            assert "dddd" not in deaths, "a neighbour gets on between two deaths alone"

    serve(use, *[dies_at(0, {1})] * 5, FakeShards)


def test_a_group_is_confirmed_by_its_first_chunk_before_any_token() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        stream = engine.submit(GenerationRequest(tuple([7] * 200), 3))
        while not shard_groups.events:
            await asyncio.sleep(0.001)
        assert shard_groups.events == ["confirmed"] and not stream.running.output_ids
        assert await collect(stream) == expected_tokens([7] * 200, 3)
        assert shard_groups.events == ["confirmed"], "once for each epoch"

    serve(use)


def test_an_answer_that_came_before_the_loss_counts() -> None:
    """The shards end right after each answer, so the stream gets one token in each epoch."""

    class AnswersOnce(FakeShards):
        async def run(self, step: Step) -> StepAnswer | None:
            answer = await super().run(step)
            if not self.lost.done():
                self.lost.set_result("shard 0 was ended by signal 9")
                await asyncio.sleep(0)  # the engine sees the answer and the loss in the same turn of the event loop
            return answer

    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        assert await collect(engine.submit(GenerationRequest((5, 6), 12))) == expected_tokens([5, 6], 12)
        assert len(shard_groups.made) <= 12

    serve(use, *[AnswersOnce] * 30)


def test_requests_get_their_own_top_tokens_also_beside_a_request_with_non_finite_logits() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        shards = shard_groups.made[0]
        shards.poisoned, shards.top_counts = {2}, {1: 1, 2: 3, 3: 2, 4: 0}
        asked = [GenerationRequest(tuple(prompt(i)), 6) for i in range(4)]
        events = await asyncio.gather(*(heard(engine.submit(request)) for request in asked))
        for request_id in (1, 3, 4):
            for event in events[request_id - 1]:
                best = [top_id(request_id, rank) for rank in range(shards.top_counts[request_id])]
                assert [token.id for token in event.top_tokens] == best

    serve(use)


async def heard(stream: GenerationStream) -> list[TokenEvent]:
    """The events of a stream up to its end or its error."""
    events = []
    with suppress(GenerationError):
        async for event in stream:
            events.append(event)
    return events


def test_a_token_between_two_deaths_clears_a_request_of_blame() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        assert await collect(engine.submit(GenerationRequest((5, 6), 30))) == expected_tokens([5, 6], 30)

    serve(use, *[dies_at(4)] * 6, FakeShards)


def test_requests_that_do_not_fit_the_next_shards_fail_and_the_others_go_on() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        large, small = engine.submit(GenerationRequest((1, 2), 300)), engine.submit(GenerationRequest((3, 4), 40))
        results = await asyncio.gather(collect(large), collect(small), return_exceptions=True)
        assert isinstance(results[0], GenerationError) and "room for 100 tokens" in str(results[0])
        assert results[1] == expected_tokens([3, 4], 40)
        with pytest.raises(ValidationError, match="must be <= 100"):
            engine.submit(GenerationRequest((1,), 100))

    serve(use, dies_at(6), lambda: FakeShards(capacity=100))


def test_a_request_whose_logits_are_not_finite_ends_alone() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        shard_groups.made[0].poisoned = {2}
        streams = [engine.submit(GenerationRequest(tuple(prompt(i)), 8)) for i in range(4)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert isinstance(results[1], GenerationError) and "not finite" in str(results[1])
        assert all(results[i] == expected_tokens(prompt(i), 8) for i in (0, 2, 3))

    serve(use)


def test_the_cache_keeps_nothing_of_a_request_whose_logits_were_not_finite() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        async def cached(ids: range) -> int:
            events = await heard(engine.submit(GenerationRequest(tuple(ids), 5)))
            return events[-1].finish.cached_tokens if events and events[-1].finish else -1

        shard_groups.made[0].poisoned = {2}
        assert await cached(range(20)) == 0
        assert await cached(range(60)) == -1
        assert await cached(range(60)) == 20, "the good text is found, and nothing of the other"
        assert await cached(range(80)) == 60

    serve(use)


def test_an_unread_stream_pauses_and_goes_on_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_router.api.generation_stream.MAX_UNREAD", 10)

    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        unread, read = (engine.submit(GenerationRequest(tuple(prompt(i)), 40)) for i in range(2))
        assert await collect(read) == expected_tokens(prompt(1), 40)
        await asyncio.sleep(0.05)
        assert 10 <= len(unread.running.output_ids) <= 10 + MAX_IN_FLIGHT
        assert await collect(unread) == expected_tokens(prompt(0), 40)

    serve(use)


def test_an_error_of_the_engine_itself_fails_every_request_and_is_reported() -> None:
    def fail(step: ForwardStep) -> None:
        raise ZeroDivisionError

    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        with pytest.raises(GenerationError, match="ZeroDivisionError"):
            await collect(engine.submit(GenerationRequest((1, 2), 3)))
        await asyncio.wait_for(engine.failed, 5)
        engine._scheduler.put_back(())

    serve(use, fails(fail))


def test_shards_that_refuse_the_first_warm_up_end_the_start() -> None:
    class Refusing(FakeShards):
        async def warmup(self, *wanted: int | None) -> WarmupAnswer:
            raise WarmupRefusedError("--max-batch-total-tokens 9 needs more")

    async def run() -> None:
        engine = make_engine(FakeShardGroups(Refusing))
        with pytest.raises(WarmupRefusedError, match="needs more"):
            await engine.start()
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_closed_engine_fails_waiting_requests_accepts_no_request_and_leaves_no_task() -> None:
    class NeverAnswers(FakeShards):
        async def run(self, step: Step) -> StepAnswer | None:
            await asyncio.Event().wait()

    async def run() -> None:
        engine = make_engine(FakeShardGroups(NeverAnswers))
        await engine.start()
        stream = engine.submit(GenerationRequest((1, 2), 3))
        await asyncio.sleep(0.01)
        assert len(engine._in_flight) == MAX_IN_FLIGHT
        for _ in range(2):
            await engine.close()
        with pytest.raises(IncompleteGenerationError):
            await anext(stream)
        stream.cancel()
        assert engine._metrics.request_failure.labels(err="dropped")._value.get() == 0, "it had ended"
        with pytest.raises(IncompleteGenerationError):
            engine.submit(GenerationRequest((1, 2), 3))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_prompt_that_was_computed_before_is_not_computed_again() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        asked = tuple(range(1, 51))
        for cached in (0, 49):
            events = [event async for event in engine.submit(GenerationRequest(asked, 5))]
            assert [event.token.id for event in events if event.token] == expected_tokens(list(asked), 5)
            assert events[-1].finish is not None and events[-1].finish.cached_tokens == cached
        assert engine._metrics.prefix_hit_tokens._value.get() == 49
        assert engine._metrics.prefilled_tokens._value.get() == 51

    serve(use)


def test_a_deadline_ends_a_running_request_with_the_text_so_far() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        events = [event async for event in engine.submit(GenerationRequest((1, 2, 3), 450, timeout_s=0.2))]
        finish = events[-1].finish
        assert finish is not None and finish.reason is FinishReason.DEADLINE and events[-1].token is None
        assert 0 < finish.generated_tokens == len(events) - 1 < 450

    serve(use)


def test_a_request_whose_deadline_passes_in_the_queue_reaches_no_shard() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        first = engine.submit(GenerationRequest((1, 2, 3), 60))
        waiting = engine.submit(GenerationRequest((4, 5, 6), 20, timeout_s=0.02))
        with pytest.raises(DeadlineError):
            await collect(waiting)
        await collect(first)
        steps = shard_groups.made[0].steps
        assert {i for step in steps if isinstance(step, ForwardStep) for i in step.request_ids} == {1}
        assert engine._metrics.request_failure.labels(err="deadline")._value.get() == 1

    serve(use, max_rows=1)


def test_a_queue_of_too_many_tokens_refuses_requests_and_says_when_to_retry() -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        running = engine.submit(GenerationRequest((1,), 20))
        await anext(running)
        waiting = [engine.submit(GenerationRequest((2,) * 30, 5)) for _ in range(2)]
        with pytest.raises(OverloadedError) as refused:
            engine.submit(GenerationRequest((2,) * 30, 5))
        assert refused.value.retry_after_s is not None and 1 <= refused.value.retry_after_s <= 60
        for stream in (running, *waiting):
            await collect(stream)

    serve(use, max_rows=1, max_queued_tokens=60)


def test_rows_without_a_request_are_noticed_when_the_engine_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    async def use(engine: Engine, shard_groups: FakeShardGroups) -> None:
        for rows, errors in ((0, 0), (3, 1)):
            shard_groups.made[0].rows_left = rows
            engine._audit._asked_s = float("-inf")
            await collect(engine.submit(GenerationRequest((1, 2), 3)))
            await asyncio.sleep(0.05)
            assert engine._metrics.books_errors._value.get() == errors
        assert "holds 3 rows" in caplog.text

    serve(use)
