"""Plays the load of a simulation to live fronts: the same turns of chats at the same times, as texts."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from text_generation_benchmark.load import Completions
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.replicas.chats import FIRST_SYSTEM_ID, ChatLoad, Chats, ChatTurn
from text_generation_benchmark.simulation.trace import Floats

LIMIT_S = 600.0  # seconds for one answer
DIALECT = Completions("pretended", {"stream_options": {"include_usage": True}})


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """What a client saw of one request. Times in seconds."""

    arrival_s: float
    first_s: float  # from its arrival to its first token
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class ChatWords:
    """Turns the ids of simulated texts into words of one token each. Different texts have different words, also those
    of another `salt`."""

    def __init__(self, prompts: Prompts, salt: int) -> None:
        self._words, self._answer = prompts.words[1:], prompts.answer
        self._salt = salt
        self._texts: dict[int, list[str]] = {}

    def text(self, ids: Sequence[int]) -> str:
        """`ids`: those of a `ChatTurn`. A text begins with an id of its own, and goes on with 1, 2, 3, …; all between
        texts are answers."""
        words: list[str] = []
        own: list[str] = []
        at = 0
        for token in ids:
            if token >= FIRST_SYSTEM_ID:
                own, at = self._words_of(token), 0
            elif token == at + 1:
                at += 1
            else:
                words.append(self._answer)
                continue
            while at >= len(own):
                own += self._random(own, len(own))
            words.append(own[at])
        return "".join(words)

    def _words_of(self, first: int) -> list[str]:
        if first not in self._texts:
            self._texts[first] = random.Random(f"{self._salt} {first}").choices(self._words, k=2048)
        return self._texts[first]

    def _random(self, own: list[str], count: int) -> list[str]:
        return random.Random(f"{self._salt} {own[0]} {count}").choices(self._words, k=count)


async def play_chats(
    ports: Sequence[int], load: ChatLoad, arrivals_s: Floats, words: ChatWords, seed: int
) -> list[LiveAnswer]:
    """The requests go to the fronts in turn. RuntimeError if one is refused or does not have its tokens."""
    chats = Chats(load, seed)
    started = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, at_s in enumerate(arrivals_s.tolist()):
            await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
            port = ports[number % len(ports)]
            tasks.append(group.create_task(_play_turn(port, chats, chats.next(), words, started)))
    return [task.result() for task in tasks]


async def _play_turn(port: int, chats: Chats, turn: ChatTurn, words: ChatWords, started: float) -> LiveAnswer:
    arrival_s = time.perf_counter() - started
    text = words.text(turn.prompt.tuple)
    async with asyncio.timeout(LIMIT_S):
        first_s, usage = await _ask(port, text, turn.output_tokens)
    chats.answered(turn)
    made = int(usage["completion_tokens"])
    if made != turn.output_tokens:
        raise RuntimeError(f"an answer has {made} tokens of {turn.output_tokens}")
    cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    end_s = time.perf_counter() - started
    return LiveAnswer(arrival_s, first_s - started - arrival_s, end_s, int(usage["prompt_tokens"]), cached, made)


async def _ask(port: int, prompt: str, new_tokens: int) -> tuple[float, dict[str, Any]]:
    """When the first token came, and the usage that the last event states."""
    body = orjson.dumps(DIALECT.body(prompt, new_tokens))
    head = f"POST {DIALECT.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    first_s, last = 0.0, b""
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                first_s, last = first_s or time.perf_counter(), line
            elif line.strip() and not first_s:
                last += line
    finally:
        writer.close()
        await writer.wait_closed()
    usage = orjson.loads(last.removeprefix(b"data: ")).get("usage") if first_s else None
    if not usage:
        raise RuntimeError(f"a front did not answer to the end: {last[-500:]!r}")
    return first_s, usage
