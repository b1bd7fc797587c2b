"""Streams: text, the whole answer in the end, and closing."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from text_generation import AsyncClient, Client, errors
from text_generation.types import FinishReason, Response

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"token":{"id":1,"text":"a","logprob":-0.5,"special":false},"top_tokens":[]}\n\n'
END = (
    b'data: {"token":{"id":2,"text":"</s>","logprob":-1.0,"special":true},"top_tokens":[],"generated_text":"aa",'
    b'"details":{"finish_reason":"eos_token","generated_tokens":3,"seed":5,"cached_tokens":1}}\n\n'
)
DEADLINE = (
    b'data: {"token":{"id":0,"text":"","special":true},"generated_text":"a",'
    b'"details":{"finish_reason":"deadline","generated_tokens":1}}\n\n'
)
NEVER_S = 30.0


def test_text_gives_pieces_without_special_tokens(caller: Any, fake: Any) -> None:
    server = fake(body=TOKEN + TOKEN + END)
    assert caller.call("generate_stream", "hi", then="text", client=server.options) == ["a", "a"]


def test_final_is_what_generate_returns(caller: Any, fake: Any) -> None:
    final = caller.call("generate_stream", "hi", then="final", client=fake(body=TOKEN + TOKEN + END).options)
    token = {"id": 1, "text": "a", "logprob": -0.5, "special": False}
    end = {"id": 2, "text": "</s>", "logprob": -1.0, "special": True}
    details = {
        "finish_reason": "eos_token", "generated_tokens": 3, "seed": 5, "cached_tokens": 1, "prefill": [],
        "tokens": [token, token, end], "top_tokens": [[], [], []],
    }  # fmt: skip
    assert final == Response.model_validate({"generated_text": "aa", "details": details})


def test_final_leaves_out_the_token_that_marks_a_deadline(caller: Any, fake: Any) -> None:
    final = caller.call("generate_stream", "hi", then="final", client=fake(body=TOKEN + DEADLINE).options)
    assert final.details.finish_reason is FinishReason.Deadline and [t.text for t in final.details.tokens] == ["a"]


def test_final_counts_the_events_that_were_read_before(fake: Any) -> None:
    with Client("http://server", **fake(body=TOKEN + TOKEN + END).options) as client:
        stream = client.generate_stream("hi")
        assert next(stream).token.text == "a" and next(stream.text()) == "a"
        assert len(stream.final().details.tokens) == 3 and stream.final().generated_text == "aa"
        assert list(stream) == []


def test_final_of_a_stream_that_failed_raises(caller: Any, fake: Any) -> None:
    broken = fake(body=TOKEN + b'data: {"error":"x","error_type":"generation"}\n\n').options
    with pytest.raises(errors.GenerationError):
        caller.call("generate_stream", "hi", then="final", client=broken)
    with Client("http://server", **broken) as client:
        stream = client.generate_stream("hi")
        with pytest.raises(errors.GenerationError):
            list(stream)
        with pytest.raises(errors.IncompleteGenerationError):
            stream.final()


def test_leaving_a_stream_hangs_up_and_ends_it(play: Any) -> None:
    server = play(HEAD, TOKEN, NEVER_S)
    with Client(server.url) as client:
        with client.generate_stream("hi") as stream:
            next(stream)
        assert server.closed.wait(10) and list(stream) == []
        with pytest.raises(errors.IncompleteGenerationError):
            stream.final()

    server = play(HEAD, TOKEN, NEVER_S)

    async def call() -> None:
        async with AsyncClient(server.url) as client:
            async with client.generate_stream("hi") as stream:
                await anext(stream)
            assert await asyncio.to_thread(server.closed.wait, 10)
            assert [event async for event in stream] == []

    asyncio.run(call())


def test_a_stream_keeps_its_client(fake: Any) -> None:
    stream = Client("http://server", **fake(body=TOKEN + TOKEN + END).options).generate_stream("hi")
    next(stream)
    gc.collect()
    assert stream.final().generated_text == "aa"


def test_another_thread_may_close_a_stream_that_waits(play: Any) -> None:
    server = play(HEAD, TOKEN, NEVER_S)
    with Client(server.url) as client:
        stream = client.generate_stream("hi")
        next(stream)
        closer = threading.Timer(0.1, stream.close)
        closer.start()
        assert list(stream) == [] and server.closed.wait(10)
        closer.join()


def test_another_task_may_close_a_stream_that_waits(play: Any) -> None:
    server = play(HEAD, TOKEN, NEVER_S)

    async def call() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.generate_stream("hi")
            await anext(stream)
            rest = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.05)
            await stream.aclose()
            assert await rest == [] and await asyncio.to_thread(server.closed.wait, 10)

    async def collect(stream: Any) -> list[Any]:
        return [event async for event in stream]

    asyncio.run(call())


def test_a_task_that_waits_for_an_event_can_be_cancelled(play: Any) -> None:
    server = play(HEAD, TOKEN, NEVER_S)

    async def call() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.generate_stream("hi")
            await anext(stream)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await anext(stream)
            assert await asyncio.to_thread(server.closed.wait, 10)

    asyncio.run(call())
