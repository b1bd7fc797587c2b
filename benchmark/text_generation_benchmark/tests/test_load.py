"""The load generator counts the tokens that a server sends, and checks every number that the server states."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from text_generation_benchmark.load import Completions, Dialect, GenerateStream, LoadResult, StreamTimes, stream_once

OPENAI = Completions("peer", {})


@contextlib.asynccontextmanager
async def answering(*lines: str) -> AsyncIterator[int]:
    """The port of a server that gives the same answer to every request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + "".join(f"{line}\r\n\r\n" for line in lines).encode())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def ask(dialect: Dialect, new_tokens: int, *lines: str) -> StreamTimes:
    async def run() -> StreamTimes:
        async with answering(*lines) as port:
            return await stream_once(port, dialect, "a fox", new_tokens)

    return asyncio.run(run())


def piece(text: str, finish: str = "null", usage: str = "null") -> str:
    return f'data: {{"choices": [{{"text": "{text}", "finish_reason": {finish}}}], "usage": {usage}}}'


def test_every_event_of_generate_stream_is_a_token() -> None:
    assert ask(GenerateStream(), 2, 'data: {"token": {}}', 'data: {"token": {}}').tokens == 2


def test_several_tokens_in_an_event_are_counted_by_the_usage() -> None:
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 5}}'
    assert ask(OPENAI, 5, piece("a b c"), piece(" d e"), usage, "data: [DONE]").tokens == 5


def test_without_a_usage_a_text_ended_by_its_length_has_the_length_asked_for() -> None:
    assert ask(OPENAI, 5, piece("a b c"), piece(" d e"), piece("", '"length"')).tokens == 5


def test_an_event_without_text_is_not_the_last_token() -> None:
    times = ask(OPENAI, 1, piece("a"), piece("", '"length"'))
    assert times.first == times.last


def test_tokens_without_text_count_when_all_end_within_a_character() -> None:
    usage = 'data: {"choices": [], "usage": {"completion_tokens": 2}}'
    assert len(ask(OPENAI, 2, piece(""), piece(""), usage).gaps) == 1


@pytest.mark.parametrize(
    ("dialect", "lines", "made"),
    [
        (GenerateStream(), ['data: {"token": {}}'], 1),
        (OPENAI, [piece("a"), piece("", '"stop"')], 1),
        (OPENAI, [piece("a b"), 'data: {"choices": [], "usage": {"completion_tokens": 2}}'], 2),
        (OPENAI, [], 0),
    ],
)
def test_a_stream_of_fewer_tokens_is_an_error(dialect: Dialect, lines: list[str], made: int) -> None:
    with pytest.raises(RuntimeError, match=f"after {made} of 5 tokens"):
        ask(dialect, 5, *lines)


def test_sampling_parameters_are_where_the_protocol_has_them() -> None:
    asked = {"temperature": 0.7, "top_p": 0.9}
    parameters = GenerateStream().body("a fox", 5, asked)["parameters"]
    assert {**asked, "do_sample": True}.items() <= parameters.items()
    assert asked.items() <= OPENAI.body("a fox", 5, asked).items()
    assert OPENAI.body("a fox", 5)["temperature"] == 0 and "do_sample" not in str(GenerateStream().body("a fox", 5))


def test_a_refusal_is_shown() -> None:
    with pytest.raises(RuntimeError, match="too busy"):
        ask(GenerateStream(), 5, 'data: {"error": "too busy"}')
    with pytest.raises(RuntimeError, match="no such model"):
        ask(OPENAI, 5, '{"message": "no such model"}')


def test_gaps_are_the_times_between_pieces_of_text_and_a_share_of_them_is_not_exceeded() -> None:
    times = ask(GenerateStream(), 3, *['data: {"token": {}}'] * 3)
    assert len(times.gaps) == 2 and sum(times.gaps) == pytest.approx(times.last - times.first)
    result = LoadResult((StreamTimes(0, 1, 3, (0.1, 0.3)), StreamTimes(0, 1, 3, (0.2, 0.4))), 1.0)
    assert [result.gap_s(share) for share in (0, 0.5, 0.99)] == [0.1, 0.3, 0.4]
    assert LoadResult((StreamTimes(0, 0, 1),), 1.0).gap_s(0.5) == 0
