"""One request's stream between an engine and a reader: events, credits, failures."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from typing import cast

import pytest

from text_generation_common.errors import GRAMMARS_WAIT, NO_TOKEN
from text_generation_router.api.common.generation import Generation
from text_generation_router.api.common.generation_stream import GenerationStream
from text_generation_router.api.openai.answers import merged
from text_generation_router.engine.protocol import Ended, FirstStep, Sink, Submission, Tokens
from text_generation_router.errors import (
    DeadlineError,
    GenerationError,
    IncompleteGenerationError,
    InferenceError,
    OverloadedError,
    ValidationError,
)
from text_generation_router.fairness import LoopTurns
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.text.tokens.events import FinishReason, TokenEvent
from text_generation_router.text.tokens.output import TextRules

FIRST = FirstStep(queue_s=1.5, cached_tokens=2)


class LetterVocabulary:
    """A vocabulary in which token i is the i-th letter."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.token_bytes = self
        self.whole_texts: dict[int, str] = {}

    def of(self, token_id: int, previous: int | None) -> bytes:
        return self.text_of(token_id).encode()

    def text_of(self, token_id: int) -> str:
        return chr(ord("a") + token_id)


class RecordingEngine:
    """A fake Engine that accepts one request and records the calls for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.begun = False

    def submit_all(self, requests: Sequence[GenerationRequest], sinks: Sequence[Sink], credits: int) -> Submission:
        self.calls.append(("submit", credits))
        return Submission([7])

    def end(self, index: int, num_tokens: int) -> None:
        assert index == 7
        self.calls.append(("end", num_tokens))

    def cancel(self, index: int) -> None:
        self.calls.append(("cancel", index))

    def credit(self, index: int, tokens: int) -> None:
        assert index == 7
        self.calls.append(("credit", tokens))

    def has_begun(self, index: int) -> bool:
        return self.begun


class World:
    def __init__(self, *stop: str) -> None:
        self.engine, self.metrics = RecordingEngine(), Metrics()
        request, rules = GenerationRequest((0, 1), 1000), TextRules(stop)
        self.wakes = LoopTurns(1)
        self.stream = GenerationStream(self.engine, LetterVocabulary(), self.metrics, request, self.wakes, rules)  # type: ignore[arg-type]
        assert GenerationStream.submit([self.stream]) is None
        self.submit_call = self.engine.calls.pop()

    def take(self, *ids: int, ended: Ended | None = None, tops: int = 0, inference_s: float = 0.0) -> None:
        top_tokens = tuple(tuple((rank, -1.0) for rank in range(tops)) for _ in ids) if tops else ()
        self.stream.take(Tokens(ids, (-0.5,) * len(ids), top_tokens, inference_s, FIRST), ended)

    @property
    def failures(self) -> dict[str, float]:
        family = next(iter(self.metrics.request_failure.collect()))
        counted = (sample for sample in family.samples if sample.name.endswith("_total"))
        return {sample.labels["err"]: sample.value for sample in counted if sample.value}


@asynccontextmanager
async def made(*stop: str) -> AsyncIterator[World]:
    async with asyncio.timeout(10):
        yield World(*stop)


@pytest.fixture
def world() -> AbstractAsyncContextManager[World]:
    return made()


async def read(stream: GenerationStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def test_several_tokens_of_one_step_are_as_many_events(world: World) -> None:
    world.take(2, 3)
    world.take(4, ended=Ended(EndReason.LENGTH, 9.0), inference_s=9.0)
    events = await read(world.stream)
    assert [event.text for event in events] == ["c", "d", "e"]
    assert [event.finish is None for event in events] == [True, True, False]
    finish = events[-1].finish
    assert finish is not None and (finish.reason, finish.generated_text) == (FinishReason.LENGTH, "cde")
    assert (finish.generated_tokens, finish.queue_s, finish.inference_s, finish.cached_tokens) == (3, 1.5, 9.0, 2)
    world.stream.cancel()
    assert world.engine.calls == [] and world.failures == {}


async def test_a_stop_string_ends_the_request_at_its_token_and_drops_later_tokens_of_the_step() -> None:
    async with made("cd") as world:
        world.take(2)
        world.take(3, 4, 5)
        world.stream.ended(Ended(EndReason.STOPPED))
        *_, last = await read(world.stream)
        assert last.finish is not None and last.finish.reason is FinishReason.STOP_SEQUENCE
        assert (last.finish.generated_text, last.finish.generated_tokens) == ("cd", 2)
        assert world.engine.calls == [("end", 2)]
        world.stream.cancel()
        assert world.engine.calls == [("end", 2)] and world.failures == {}


async def test_the_reason_of_the_engine_goes_before_a_stop_string_at_the_same_token() -> None:
    async with made("cd") as world:
        world.take(2, 3, ended=Ended(EndReason.LENGTH))
        *_, last = await read(world.stream)
        assert last.finish is not None and last.finish.reason is FinishReason.LENGTH
        assert world.engine.calls == []


async def test_a_stop_string_before_the_engines_end_cuts_the_text_there() -> None:
    async with made("cd") as world:
        world.take(2, 3, 4, ended=Ended(EndReason.LENGTH))
        *_, last = await read(world.stream)
        assert last.finish is not None and last.finish.reason is FinishReason.STOP_SEQUENCE
        assert last.finish.generated_text == "cd"


async def test_a_request_at_its_deadline_ends_with_an_event_without_a_token(world: World) -> None:
    world.take(2)
    world.stream.ended(Ended(EndReason.DEADLINE, 4.0))
    first, last = await read(world.stream)
    assert first.token is not None and last.token is None and last.finish is not None
    assert (last.finish.reason, last.finish.inference_s) == (FinishReason.DEADLINE, 4.0)
    assert world.failures == {}


@pytest.mark.parametrize(
    ("ended", "error", "failures"),
    [
        (Ended(EndReason.DEADLINE), DeadlineError, {"deadline": 1}),
        (Ended(EndReason.FAILED, cause="boom"), GenerationError, {"generation": 1}),
        (Ended(EndReason.FAILED, cause=NO_TOKEN), ValidationError, {"validation": 1}),
        (Ended(EndReason.FAILED, cause=GRAMMARS_WAIT), OverloadedError, {"overloaded": 1}),
        (Ended(EndReason.CLOSED), IncompleteGenerationError, {}),
    ],
)
async def test_an_end_without_a_token_is_an_error_for_a_reader_that_waits(
    world: World, ended: Ended, error: type[InferenceError], failures: dict[str, float]
) -> None:
    reading = asyncio.create_task(read(world.stream))
    await asyncio.sleep(0)
    world.stream.ended(ended)
    with pytest.raises(error) as raised:
        await reading
    assert ended.cause in str(raised.value) or type(raised.value) is not GenerationError
    world.stream.cancel()
    assert world.failures == failures and world.engine.calls == []


async def test_a_cancelled_stream_gives_what_came_before_and_then_an_error(world: World) -> None:
    world.take(2)
    for _ in range(2):
        world.stream.cancel()
    world.stream.ended(Ended(EndReason.CANCELLED))
    assert (await anext(world.stream)).text == "c"
    with pytest.raises(IncompleteGenerationError):
        await anext(world.stream)
    assert world.engine.calls == [("cancel", 7)] and world.failures == {"dropped": 1}


async def test_a_stream_that_makes_room_for_another_request_raises_the_refusal(world: World) -> None:
    assert not world.stream.has_begun
    world.engine.begun = True
    assert world.stream.has_begun
    for _ in range(2):
        world.stream.refuse(OverloadedError(3))
    with pytest.raises(OverloadedError):
        await anext(world.stream)
    assert world.engine.calls == [("cancel", 7)] and world.failures == {"overloaded": 1}


async def test_a_stream_with_tokens_has_begun_also_after_its_end(world: World) -> None:
    world.take(2, ended=Ended(EndReason.LENGTH))
    assert world.stream.has_begun


async def test_a_reader_that_is_far_behind_gives_no_credit_until_half_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_router.api.common.generation_stream.CREDITS", 6)
    async with made() as world:
        assert world.submit_call == ("submit", 6)
        calls = world.engine.calls
        world.take(*[2] * 5)
        await anext(world.stream)
        assert not calls, "one credit is left"
        world.take(3)
        assert calls.pop() == ("credit", 1), "5 tokens are unread: fewer than the credits"
        world.take(4)
        for _ in range(3):
            assert not calls
            await anext(world.stream)
        assert calls.pop() == ("credit", 3)


async def test_top_tokens_use_up_credits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_router.api.common.generation_stream.CREDITS", 8)
    async with made() as world:
        world.take(2, 3, tops=3)
        event = await anext(world.stream)
        assert [token.text for token in event.top_tokens] == ["a", "b", "c"]
        assert world.engine.calls == [("credit", 4)]


async def test_readers_of_one_step_get_their_tokens_in_several_turns_of_the_event_loop() -> None:
    wakes, engine, readers = LoopTurns(2), RecordingEngine(), 5
    streams = [
        GenerationStream(engine, LetterVocabulary(), Metrics(), GenerationRequest((0,), 9), wakes)  # type: ignore[arg-type]
        for _ in range(readers)
    ]
    reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams:
        stream.take(Tokens((1,), (-0.5,), (), 0.0, FIRST), None)
    counts = []
    while len(counts) < 9 and not all(task.done() for task in reading):
        await asyncio.sleep(0)
        counts.append(sum(task.done() for task in reading))
    assert max(now - before for before, now in pairwise([0, *counts])) <= 2 and counts[-1] == readers
    await asyncio.gather(*reading)


class Page:
    """A fake DirectWriter that keeps what is written."""

    def __init__(self) -> None:
        self.is_open = True
        self.text = ""

    def write(self, events: Sequence[bytes]) -> None:
        self.text += b"".join(events).decode()


async def begin_reading(world: World, page: Page) -> tuple["asyncio.Task[None]", list[TokenEvent]]:
    """Starts a task that reads the stream's events. Returns the task and the list of the events that it has read."""
    got: list[TokenEvent] = []

    async def read_all() -> None:
        async for event in world.stream:
            got.append(event)
            await asyncio.sleep(0)

    world.stream.write_through(page, lambda event: event.text.encode())  # type: ignore[arg-type]
    reading = asyncio.create_task(read_all())
    await asyncio.sleep(0)
    return reading, got


async def test_events_are_written_at_once_and_only_the_last_one_wakes_the_reader(world: World) -> None:
    page = Page()
    reading, got = await begin_reading(world, page)
    world.take(2, 3)
    assert page.text == "cd"
    await asyncio.sleep(0)
    world.take(4)
    await asyncio.sleep(0.01)
    assert not got and world.stream._credits + world.stream._read == 512
    world.take(5, ended=Ended(EndReason.LENGTH))
    await reading
    assert [event.text for event in got] == ["f"] and page.text in ("cd", "cde")


async def test_a_reader_behind_a_closed_writer_gets_the_events_in_their_order(world: World) -> None:
    page = Page()
    reading, got = await begin_reading(world, page)
    page.is_open = False
    world.take(2)
    await asyncio.sleep(0)
    page.is_open = True  # the reader still holds an event that is older than the next one
    world.take(3)
    assert page.text == ""
    await asyncio.sleep(0.01)
    world.take(4)
    assert page.text == "e" and [event.text for event in got] == ["c", "d"]
    world.take(5, ended=Ended(EndReason.LENGTH))
    await reading


async def test_an_event_that_cannot_be_written_fails_its_request(world: World) -> None:
    page = Page()
    reading, _ = await begin_reading(world, page)
    world.stream.write_through(page, lambda event: b"" + None)  # type: ignore
    world.take(2)
    with pytest.raises(GenerationError, match="TypeError"):
        await reading
    assert world.engine.calls == [("cancel", 7)] and world.failures == {"generation": 1}


async def test_written_events_give_their_credits_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_router.api.common.generation_stream.CREDITS", 4)
    async with made() as world:
        page = Page()
        reading, _ = await begin_reading(world, page)
        for letter in range(8):
            world.take(letter)
            await asyncio.sleep(0)
        given = sum(count for call, count in world.engine.calls if call == "credit")
        assert given >= 4 and page.text == "abcdefgh"
        reading.cancel()


def test_an_error_of_ours_in_one_of_several_texts_ends_the_answer() -> None:
    async def broken() -> AsyncGenerator[TokenEvent, None]:
        raise LookupError("ours")
        yield

    async def waiting() -> AsyncGenerator[TokenEvent, None]:
        await asyncio.Event().wait()
        yield

    async def read() -> None:
        async for _ in merged([cast(Generation, waiting()), cast(Generation, broken())]):
            pass

    with pytest.raises(LookupError, match="ours"):
        asyncio.run(asyncio.wait_for(read(), 60))
