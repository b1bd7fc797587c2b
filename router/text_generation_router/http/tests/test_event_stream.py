import asyncio
from collections.abc import AsyncGenerator

from text_generation_router.http.sse import EventStream


async def drive(stream: EventStream, gone: asyncio.Event, on_send=lambda message: None) -> list[bytes]:
    sent = []

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message.get("body", b""))
        on_send(message)

    await asyncio.wait_for(stream({"type": "http"}, receive, send), 10)
    return sent


def test_silence_is_filled_with_empty_comments():
    async def slow() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.2)
        yield b"data: 1\n\n"

    stream = EventStream(slow(), {}, keep_alive_s=0.02)
    sent = asyncio.run(drive(stream, asyncio.Event()))
    assert b":\n\n" in sent and b"data: 1\n\n" in sent and sent[-1] == b""
    assert set(sent) == {b"", b":\n\n", b"data: 1\n\n"}


def test_no_comment_between_events_that_are_on_time():
    async def quick() -> AsyncGenerator[bytes, None]:
        for _ in range(5):
            yield b"data: 1\n\n"

    assert asyncio.run(drive(EventStream(quick(), {}), asyncio.Event())) == [b"", *[b"data: 1\n\n"] * 5, b""]


async def test_a_disconnect_closes_the_events_and_calls_close():
    closed = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0)
        finally:
            closed.append("events")

    gone = asyncio.Event()
    stream = EventStream(endless(), {}, close=lambda: closed.append("close"))
    await drive(stream, gone, lambda message: gone.set() if message.get("body") else None)
    assert closed == ["events", "close"]


async def test_close_is_called_even_if_no_event_was_asked_for():
    closed = []

    async def never() -> AsyncGenerator[bytes, None]:
        raise AssertionError("asked for an event")
        yield b""

    stream = EventStream(never(), {}, close=lambda: closed.append("close"))

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.Event().wait()  # a client that reads nothing

    await asyncio.wait_for(stream({"type": "http"}, receive, send), 10)
    assert closed == ["close"]
