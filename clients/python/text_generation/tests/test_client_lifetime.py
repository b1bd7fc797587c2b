"""Loops, threads and connections: where a client may be used, and what it leaves behind."""

import asyncio
import gc
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from text_generation import AsyncClient, Client

TOKEN = b'data: {"token":{"id":1,"text":"a","special":false}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
ANSWER = b'[{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":1,"prefill":[],"tokens":[]}}]'


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "text-generation-client"]


def test_the_sync_client_works_inside_a_running_loop(fake: Any) -> None:
    async def notebook_cell() -> str:
        with Client("http://server", **fake(body=ANSWER).options) as client:
            return client.generate("hi").generated_text

    assert asyncio.run(notebook_cell()) == "a"


def test_threads_may_share_a_sync_client(fake: Any) -> None:
    server = fake(body=ANSWER)
    with Client("http://server", **server.options) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: client.generate(f"{i}").generated_text, range(64)))
        assert len(loop_threads()) == 1
    assert texts == ["a"] * 64 and len(server.seen) == 64


def test_an_async_client_outlives_its_loop(fake: Any) -> None:
    client = AsyncClient("http://server", **fake(body=ANSWER).options)

    async def call() -> str:
        return (await client.generate("hi")).generated_text

    assert [asyncio.run(call()), asyncio.run(call())] == ["a", "a"]


def test_connections_are_kept(play: Any) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
    server = play(head + ANSWER, 0.1, head + ANSWER, 0.1)
    with Client(server.url) as client:
        client.generate("hi")
        client.generate("hi")
    assert server.connections == 1


def test_breaking_off_a_stream_hangs_up(play: Any) -> None:
    server = play(HEAD, TOKEN, 30.0)
    with Client(server.url) as client:
        for event in client.generate_stream("hi"):
            assert event.token.text == "a"
            break
        assert server.closed.wait(10)

    server = play(HEAD, TOKEN, 30.0)

    async def call() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.generate_stream("hi")
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            assert await asyncio.to_thread(server.closed.wait, 10)

    asyncio.run(call())


def test_a_cancelled_call_hangs_up(play: Any) -> None:
    server = play(30.0)

    async def call() -> None:
        async with AsyncClient(server.url) as client:
            task = asyncio.create_task(client.generate("hi"))
            while not server.heads:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.closed.wait, 10)

    asyncio.run(call())


def test_closing_ends_the_thread_and_the_calls_of_others(play: Any) -> None:
    server = play(30.0)
    client = Client(server.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "hi")
        while not server.heads:
            time.sleep(0.01)
        client.close()
        with pytest.raises(RuntimeError, match="closed during the call"):
            waiting.result(timeout=10)
    assert loop_threads() == [] and server.closed.wait(10)


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_client_says_so(fake: Any, used: bool) -> None:
    client = Client("http://server", **fake(body=ANSWER).options)
    if used:
        client.generate("hi")
    client.close()
    client.close()
    for call in (lambda: client.generate("hi"), lambda: next(client.generate_stream("hi"))):
        with pytest.raises(RuntimeError, match="this client is closed"):
            call()


def test_a_forgotten_client_leaves_no_thread(fake: Any) -> None:
    client = Client("http://server", **fake(body=ANSWER).options)
    client.generate("hi")
    (thread,) = loop_threads()
    del client
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_program_that_forgets_to_close_ends_silently(play: Any) -> None:
    server = play(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER, 5.0)
    program = f"from text_generation import Client\nc = Client({server.url!r})\nprint(c.generate('hi').generated_text)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.stdout, done.stderr, done.returncode) == (b"a\n", b"", 0)


def _call_in_child(client: Client, answers: Any) -> None:
    try:
        client.generate("hi")
    except RuntimeError as error:
        answers.put(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_client_used_before_a_fork_says_so_instead_of_hanging(fake: Any) -> None:
    with Client("http://server", **fake(body=ANSWER).options) as client:
        client.generate("hi")
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        child = context.Process(target=_call_in_child, args=(client, answers))
        child.start()
        child.join(30)
        assert child.exitcode == 0 and "before the process forked" in answers.get()
