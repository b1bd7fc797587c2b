"""Streams of every kind that a client can request, and the part of their answers that must be the same in every run."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import httpx
from calls import client_of
from streams import SAMPLED, WORDS

# Fields that change from run to run: times, names of answers, and the tokens found in the prefix cache.
VOLATILE = ("created", "cached_tokens", "system_fingerprint")
SLOW_PAUSE_S = 0.05
# Seconds that a stream may take. Long, because shards that die every few seconds have little time to make tokens.
STREAM_LIMIT_S = 1800.0
SHARED_WORDS = 300  # words in the prefix that prompts of the kind "shared prefix" share
CHANGES: dict[str, Any] = {"min_p": 0.02, "presence_penalty": 0.5, "logit_bias": {"262": -5, "300": 2.5}}
STOP_TOKENS = list(range(260, 400))
ITEM = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}
ENDING = "([a-z]{1,6} ){4,9}the end"
LONG_WORDS = (450, 800)  # range of words in a prompt of several chunks


@dataclass(frozen=True, slots=True)
class MixedAsk:
    kind: str
    path: str
    body: dict[str, Any]
    is_streamed: bool = True
    is_slow: bool = False  # the client reads slowly


@dataclass(frozen=True, slots=True)
class MixedAnswer:
    """The answer to one request. `outcome`: the part of the answer that must be the same in every run."""

    ask: int  # index of the request in the list of requests
    started_s: float  # by the wall clock, as all times in this file
    ended_s: float
    arrivals_s: tuple[float, ...]  # arrival time of each event
    outcome: tuple[str, ...]
    error: str  # how the stream failed; empty if it ended normally
    port: int = 0  # the client's port, if the request had a connection of its own


def mixed_asks(count: int, tokens: tuple[int, int], of_digest: bool = False) -> list[MixedAsk]:
    """`count` requests, the same in every run, of all kinds in turn or, if `of_digest`, of KINDS_OF_DIGEST. `tokens`:
    the least and the largest number of tokens of a text.
    """
    rng = random.Random(2)
    shared = _words(rng, SHARED_WORDS)
    kinds = cycle(KINDS_OF_DIGEST if of_digest else KINDS)
    return [make(i, rng, shared, rng.randint(*tokens)) for i, make in zip(range(count), kinds, strict=False)]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _native(kind: str, prompt: str, tokens: int, **parameters: Any) -> MixedAsk:
    always = {"max_new_tokens": tokens, "ignore_eos_token": True, "details": True}
    return MixedAsk(kind, "/generate_stream", {"inputs": prompt, "parameters": always | parameters})


def _short(i: int, rng: random.Random) -> str:
    return f"{i}: {_words(rng, rng.randint(8, 60))}"


def _greedy(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("greedy", _short(i, rng), tokens)


def _long(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("long prompt", f"{i}: {_words(rng, rng.randint(*LONG_WORDS))}", tokens)


def _shared(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("shared prefix", f"{shared} {_short(i, rng)}", tokens, seed=i, **SAMPLED)


def _seed(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("seed, warpers", _short(i, rng), tokens, seed=i, do_sample=True, top_k=20, typical_p=0.9)


def _penalties(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("penalties", _short(i, rng), tokens, repetition_penalty=1.3, frequency_penalty=0.4)


def _lists(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    """A text that a stop token of its own may end, once half of its tokens are made."""
    lists = {"bad_words": ["fox", "the river", "lamp"], "stop_token_ids": STOP_TOKENS, "min_new_tokens": tokens // 2}
    allowed = {"allowed_token_ids": list(range(1000))} if i % 2 else {}
    return _native("lists of tokens", _short(i, rng), tokens, seed=i, do_sample=True, **CHANGES, **lists, **allowed)


def _grammar(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    """A text by a schema, which its length limit cuts, or one by an expression, which ends by itself."""
    properties = {"list": {"type": "array", "items": ITEM, "minItems": tokens}}
    schema = {"type": "object", "properties": properties, "required": ["list"]}
    grammar = {"type": "json", "value": schema} if i % 2 else {"type": "regex", "value": ENDING}
    return _native("grammar", _short(i, rng), tokens, seed=i, do_sample=True, grammar=grammar)


def _watermark(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("watermark", _short(i, rng), tokens, seed=i, do_sample=True, watermark=True)


def _tops(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("top tokens", _short(i, rng), tokens, top_n_tokens=3)


def _stop(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return _native("stop strings", _short(i, rng), 2 * tokens, stop=["never said by any text", "fox and the"])


def _best_of(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    ask = _native("best_of", _short(i, rng), tokens, best_of=2, do_sample=True)
    return replace(ask, path="/generate", is_streamed=False)


def _chat(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    body = {
        "model": "tgi",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _short(i, rng)}],
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": i,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
    }
    return MixedAsk("OpenAI chat", "/v1/chat/completions", body)


def _slow(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    return replace(_native("slow reader", _short(i, rng), tokens, top_n_tokens=5), is_slow=True)


def _prompt(i: int, rng: random.Random, shared: str, tokens: int) -> MixedAsk:
    ask = _native("log-probabilities of a long prompt", _long(i, rng, shared, tokens).body["inputs"], tokens)
    ask.body["parameters"]["decoder_input_details"] = True
    return replace(ask, path="/generate", is_streamed=False)


# The published hash of `make digest` depends on this list.
KINDS_OF_DIGEST: list[Callable[[int, random.Random, str, int], MixedAsk]] = [
    *(_greedy, _long, _shared, _seed, _penalties, _watermark, _tops, _stop, _best_of, _chat, _slow),
]
KINDS = [*KINDS_OF_DIGEST, _prompt, _lists, _grammar]


async def answer_of(client: httpx.AsyncClient, asked: Sequence[MixedAsk], place: int) -> MixedAnswer:
    ask, started_s = asked[place], time.time()
    answers: list[Any] = []
    arrivals: list[float] = []
    error, port = "", 0

    async def trace(event: str, about: Any) -> None:
        nonlocal port
        if event == "connection.connect_tcp.complete":
            port = about["return_value"].get_extra_info("client_addr")[1]

    try:
        async with asyncio.timeout(STREAM_LIMIT_S):
            if ask.is_streamed:
                error = await _read_stream(client, ask, trace, answers, arrivals)
            else:
                response = await client.post(ask.path, json=ask.body, extensions={"trace": trace})
                answers.append(response.json())
                error = "" if response.status_code == 200 else f"{response.status_code}: {answers[0]}"
    except (httpx.HTTPError, TimeoutError, ValueError) as broken:
        error = f"{type(broken).__name__}: {broken}"
    return MixedAnswer(place, started_s, time.time(), tuple(arrivals), tuple(_outcome(ask, answers)), error, port)


async def _read_stream(
    client: httpx.AsyncClient, ask: MixedAsk, trace: Any, events: list[Any], arrivals: list[float]
) -> str:
    """Reads a stream into `events` and `arrivals`. Returns what was wrong with the stream, or an empty text."""
    is_done = False
    async with client.stream("POST", ask.path, json=ask.body, extensions={"trace": trace}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data:"):
                events.append(json.loads(line.removeprefix("data:")))
                arrivals.append(time.time())
                if ask.is_slow:
                    await asyncio.sleep(SLOW_PAUSE_S)
    wrong = next((event for event in events if "error" in event), None)
    if wrong is not None or response.status_code != 200:
        return f"{response.status_code}: {wrong}"
    is_whole = is_done if ask.path.startswith("/v1") else bool(events and events[-1].get("details"))
    return "" if is_whole else "the stream ended before its text did"


def _outcome(ask: MixedAsk, answers: Sequence[Any]) -> Iterator[str]:
    if ask.kind == "best_of" and answers:
        details = answers[0].get("details") or {}
        for text in [details, *details.get("best_of_sequences", [])]:
            yield json.dumps([text.get("seed"), text.get("tokens")])
        return
    for answer in answers:
        yield json.dumps(_without_volatile(answer), sort_keys=True)


def _without_volatile(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_volatile(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in VOLATILE}
    if isinstance(kept.get("id"), str):  # the id of an OpenAI answer; a token's id is a number
        del kept["id"]
    return {name: _without_volatile(value) for name, value in kept.items()}


def asks_for_each_text(ask: MixedAsk, answer: MixedAnswer) -> list[tuple[MixedAsk, str]]:
    """For each text of an answer with best_of: a request for this text alone, with the seed that the server drew for
    the text, and the expected outcome.
    """
    found = []
    for line in answer.outcome:
        seed, tokens = json.loads(line)
        parameters = ask.body["parameters"] | {"seed": seed, "best_of": 1}
        found.append((replace(ask, body=ask.body | {"parameters": parameters}), json.dumps([seed, tokens])))
    return found


def is_as_expected(ask: MixedAsk, answer: MixedAnswer, expected: MixedAnswer) -> bool:
    """Whether the outcome is `expected`. For best_of only the number of texts is compared, as the server draws the
    seeds; `asks_for_each_text` checks the texts."""
    if ask.kind == "best_of":
        return len(answer.outcome) == len(expected.outcome)
    return answer.outcome == expected.outcome


class MixedClients:
    """Keeps `num_streams` streams running until `finish` is called: when a stream ends, the next one starts. After the
    last request the first one is sent again.
    """

    def __init__(self, asked: Sequence[MixedAsk], num_streams: int) -> None:
        self.answers: list[MixedAnswer] = []
        self.num_counted = 0  # value that `tgi_request_count` has once the server has received every request
        self._asked = asked
        self._num_streams = num_streams
        self._turns = cycle(range(len(asked)))
        self._finishing = asyncio.Event()

    def finish(self) -> None:
        """Starts no more streams. Running streams go on to their ends."""
        self._finishing.set()

    async def run(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        async with client_of(url) as client, asyncio.TaskGroup() as tasks:
            client.timeout = httpx.Timeout(STREAM_LIMIT_S)
            client.headers.update(headers or {})
            for _ in range(self._num_streams):
                tasks.create_task(self._receive(client))

    async def _receive(self, client: httpx.AsyncClient) -> None:
        while not self._finishing.is_set():
            turn = next(self._turns)
            # TGI counts a chat twice: as a chat and as a generation
            self.num_counted += 2 if "/chat/" in self._asked[turn].path else 1
            self.answers.append(await answer_of(client, self._asked, turn))


def all_answers(url: str, asked: Sequence[MixedAsk]) -> list[MixedAnswer]:
    """The answers to all requests, sent at the same time."""

    async def run() -> list[MixedAnswer]:
        async with client_of(url) as client:
            client.timeout = httpx.Timeout(STREAM_LIMIT_S)
            return await asyncio.gather(*(answer_of(client, asked, place) for place in range(len(asked))))

    return asyncio.run(run())
