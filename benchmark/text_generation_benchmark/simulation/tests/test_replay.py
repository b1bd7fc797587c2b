"""A real server receives the requests of the trace, and its measured times stand beside the simulated times."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from text_generation_benchmark.simulation.cost import Fit, SimulatedModel, StepCost
from text_generation_benchmark.simulation.replay import Played, ReplayComparison, play
from text_generation_benchmark.simulation.trace import TraceWorkload, Uniform, generate

SHARED = TraceWorkload(Uniform(1, 30), Uniform(1, 5), 5, num_prefixes=2, prefix=Uniform(5, 40))


@contextmanager
def generating(asked: list[dict[str, object]], refuse: bool = False) -> Iterator[int]:
    """A server that makes the number of tokens that a request asks for. Yields its port."""
    loop = asyncio.new_event_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(length))
        asked.append(body)
        event = {"error": "too busy"} if refuse else {"token": {}}
        lines = [f"data: {json.dumps(event)}\r\n\r\n"] * body["parameters"]["max_new_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + "".join(lines).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(server.wait_closed())
    loop.close()


def test_every_request_is_sent_with_its_own_length_when_its_time_has_come() -> None:
    trace = generate(SHARED, 40, 0.5, 0).with_exact_lengths()
    asked: list[dict[str, object]] = []
    with generating(asked) as port:
        played = play(port, trace, [f"prompt {i}" for i in range(len(trace))])
    lengths = {body["inputs"]: body["parameters"]["max_new_tokens"] for body in asked}  # type: ignore[index]
    assert lengths == {f"prompt {i}": tokens for i, tokens in enumerate(trace.output_tokens.tolist())}
    assert played.num_tokens == trace.output_tokens.sum()
    assert played.end_s >= trace.duration_s - 0.01  # the event loop's clock has a coarse resolution
    assert len(played.first_token_s) == len(trace) and len(played.token_s) == (trace.output_tokens > 1).sum()


def test_a_refused_request_is_an_error() -> None:
    trace = generate(SHARED, 40, 0.2, 0).with_exact_lengths()
    with generating([], refuse=True) as port, pytest.raises(RuntimeError, match="too busy"):
        play(port, trace, ["prompt"] * len(trace))


def test_the_parts_are_compared_together() -> None:
    def part(first_s: float, end_s: float) -> Played:
        return Played(np.array([first_s]), np.array([0.01]), 100, end_s)

    model = SimulatedModel("m", StepCost(1, 0, 0, 0, 0, 0, 0), 10, 0.002, "")
    fitted = Fit(model.cost, 1234, 0.05)
    comparison = ReplayComparison(7.0, model, fitted, [part(0.1, 1), part(0.3, 3)], [part(0.2, 2), part(0.4, 2)])
    text = comparison.as_markdown()
    assert "2 requests, 7 a second" in text and "1,234 steps" in text and "2.0 ms" in text
    assert "| output tokens/s     | 50.0  | 50.0      | 1.00             |" in text
    assert "| first token ms, p50 | 200.0 | 300.0     | 1.50             |" in text
