"""One request's stream: its events, its text and its end."""

import asyncio
import time
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_common.sampling import Sampling
from text_generation_router.api.generation_stream import GenerationStream
from text_generation_router.errors import DeadlineError
from text_generation_router.scheduling.request import FinishReason, GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.text.detokenization import Vocabulary
from text_generation_router.text.events import TokenEvent

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
E_ACUTE = [ALPHABET.index(char) for char in "Ã©"]  # the two bytes of é, as byte-level tokenizers write them


EOS = len(ALPHABET)
DEADLINE_S = 10


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Vocabulary.of(tokenizer, [EOS])


def make_stream(vocabulary: Vocabulary, max_new_tokens: int = 9, **sampling: Any) -> GenerationStream:
    running = Running(1, GenerationRequest((1, 2, 3), max_new_tokens, Sampling(**sampling)))
    return GenerationStream(running, vocabulary, lambda running, reason: None, lambda: None)


def push(stream: GenerationStream, *token_ids: int, at: float = 0.0) -> None:
    for token_id in token_ids:
        made, most = stream.running.output_ids, stream.running.request.max_new_tokens
        made.append(token_id)
        reason = FinishReason.LENGTH if len(made) == most else FinishReason.EOS_TOKEN if token_id == EOS else None
        stream.push(token_id, -1.0, (), reason, at)


async def read(stream: GenerationStream) -> list[TokenEvent]:
    return [event async for event in stream]


def test_a_request_at_its_deadline_ends_with_an_event_without_a_token_and_its_whole_text(vocabulary):
    async def run() -> None:
        stream = make_stream(vocabulary, do_sample=True, seed=5)
        stream.running.cached_tokens = 2
        stream.begin(10.0)
        push(stream, ALPHABET.index("a"), ALPHABET.index("b"), at=11.0)
        assert stream.expire(12.0)
        first, second, last = await read(stream)
        assert first.token is not None and second.token is not None and last.token is None
        assert (first.finish, second.finish, last.top_tokens) == (None, None, ())
        assert last.finish is not None
        assert (last.finish.reason, last.finish.generated_text) == (FinishReason.DEADLINE, "ab")
        assert (last.finish.generated_tokens, last.finish.cached_tokens, last.finish.seed) == (2, 2, 5)
        assert last.finish.inference_s == 2.0

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_the_time_in_the_queue_ends_with_the_first_step_and_the_rest_is_inference(vocabulary):
    async def run() -> None:
        earliest = time.perf_counter()
        stream = make_stream(vocabulary, max_new_tokens=1)
        latest = time.perf_counter()
        assert stream.queue_s == 0.0
        assert stream.begin(latest + 10.0) and not stream.begin(latest + 20.0)
        assert 10.0 <= stream.queue_s <= 10.0 + latest - earliest
        push(stream, ALPHABET.index("a"), at=latest + 13.0)
        (event,) = await read(stream)
        assert event.finish.queue_s == stream.queue_s
        assert event.finish.inference_s == pytest.approx(3.0)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_half_a_character_that_was_held_back_is_not_lost(vocabulary):
    async def run() -> None:
        stream = make_stream(vocabulary)
        push(stream, ALPHABET.index("a"), *E_ACUTE, E_ACUTE[0])
        assert stream.expire(1.0)
        *tokens, last = await read(stream)
        assert "".join(event.token.text for event in tokens) == "aé"
        assert last.text == "\ufffd" and last.finish.generated_text == "aé\ufffd"

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.DEADLINE])
def test_the_events_texts_add_up_to_the_text_at_every_end(vocabulary, reason):
    async def run() -> None:
        stream = make_stream(vocabulary, max_new_tokens=4 if reason is FinishReason.LENGTH else 9)
        push(stream, ALPHABET.index("a"), *E_ACUTE, E_ACUTE[0])
        if reason is FinishReason.EOS_TOKEN:
            push(stream, EOS)
        elif reason is FinishReason.DEADLINE:
            assert stream.expire(1.0)
        events = await read(stream)
        finish = events[-1].finish
        assert finish is not None and finish.reason is reason
        assert "".join(event.text for event in events) == finish.generated_text == "aé\ufffd"

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_special_token_that_ends_the_text_shows_what_was_held_back_and_itself(vocabulary):
    async def run() -> None:
        stream = make_stream(vocabulary)
        push(stream, E_ACUTE[0], EOS)
        _, last = await read(stream)
        assert (last.token.text, last.text, last.token.special) == ("\ufffd</s>", "\ufffd", True)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_request_without_a_token_at_its_deadline_fails(vocabulary):
    async def run() -> None:
        stream = make_stream(vocabulary)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        assert not stream.expire(1.0)
        with pytest.raises(DeadlineError):
            await reading

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_reader_that_is_far_behind_pauses_its_request_until_half_is_read(vocabulary, monkeypatch):
    monkeypatch.setattr("text_generation_router.api.generation_stream.MAX_UNREAD", 6)
    wakes: list[None] = []

    async def run() -> None:
        running = Running(1, GenerationRequest((1, 2, 3), 20))
        stream = GenerationStream(running, vocabulary, lambda running, reason: None, lambda: wakes.append(None))
        push(stream, *[ALPHABET.index("a")] * 5)
        assert not running.paused
        await anext(stream)
        assert not wakes, "the request of a reader that keeps up does not pause"
        push(stream, *[ALPHABET.index("a")] * 2)
        for _ in range(3):
            assert running.paused and not wakes
            await anext(stream)
        assert not running.paused and len(wakes) == 1

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_every_last_event_has_the_number_of_cached_tokens(vocabulary):
    async def run() -> None:
        stream = make_stream(vocabulary)
        stream.running.cached_tokens = 3
        push(stream, *[ALPHABET.index("a")] * 9)
        *_, last = await read(stream)
        assert (last.finish.reason, last.finish.cached_tokens) == (FinishReason.LENGTH, 3)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
