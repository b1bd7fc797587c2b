"""The recorder of streams: many at a time, the part of their answers that must be the same in every run, and the
comparison with a run without faults."""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from typing import Any, TypeVar

import httpx
from asks import PLAIN, Ask
from calls import client_of
from server_process import ServerProcess

T = TypeVar("T")

# Fields that change from run to run: times, names of answers, and the tokens found in the prefix cache.
VOLATILE = ("created", "cached_tokens", "system_fingerprint")
SLOW_PAUSE_S = 0.05
# Seconds that a stream may take. Long, because shards that die every few seconds have little time to make tokens.
STREAM_LIMIT_S = 1800.0
RUN_LIMIT_S = 600.0  # seconds that a run of plain streams may take
AT_ONCE = 64  # requests at a time that nothing is done to: the server refuses those beyond its permits


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The answer to one request. `outcome`: the part of the answer that must be the same in every run. For a plain
    request: the ids of its tokens, then its text and details."""

    ask: int  # index of the request in the list of requests
    started_s: float  # by the wall clock, as all times in this file and in a server's log
    ended_s: float
    arrivals_s: tuple[float, ...]  # arrival time of each event
    outcome: tuple[str, ...]
    error: str  # how the stream failed; empty if it ended normally
    port: int = 0  # the client's port, if the request had a connection of its own

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of the answer to a plain request."""
        return tuple(map(int, self.outcome[:-1]))

    @property
    def text(self) -> str:
        """The text of the answer to a plain request."""
        return str(json.loads(self.outcome[-1])[0])


@dataclass(frozen=True, slots=True)
class Comparison:
    streams: int
    lost: int  # number of streams that did not end normally
    wrong_tokens: int  # number of positions whose token id differs, is missing or is extra
    other_texts: int  # number of streams whose text or details differ
    first_error: str

    def failures(self) -> list[str]:
        """One line that counts what differs; nothing if nothing does."""
        if not (self.lost or self.wrong_tokens or self.other_texts):
            return []
        return [
            f"of {self.streams} streams {self.lost} lost ({self.first_error}), {self.other_texts} with another text,"
            f" {self.wrong_tokens} tokens missing, doubled or others"
        ]


def compare(expected: Sequence[StreamAnswer], answers: Sequence[StreamAnswer]) -> Comparison:
    """The answers to plain requests, each beside the expected one."""
    pairs = list(zip(expected, answers, strict=True))
    errors = [stream.error for stream in answers if stream.error]
    return Comparison(
        streams=len(pairs),
        lost=len(errors),
        wrong_tokens=sum(_wrong_tokens(one.ids, other.ids) for one, other in pairs),
        other_texts=sum(one.outcome[-1] != other.outcome[-1] for one, other in pairs),
        first_error=errors[0] if errors else "",
    )


def _wrong_tokens(expected: Sequence[int], received: Sequence[int]) -> int:
    differing = sum(one != other for one, other in zip(expected, received, strict=False))
    return differing + abs(len(expected) - len(received))


async def answer_of(
    client: httpx.AsyncClient, asked: Sequence[Ask], place: int, on_event: Callable[[], object] = lambda: None
) -> StreamAnswer:
    ask, started_s = asked[place], time.time()
    answers: list[Any] = []
    arrivals: list[float] = []
    error, port = "", 0

    async def trace(event: str, about: Any) -> None:
        nonlocal port
        if event == "connection.connect_tcp.complete":
            port = about["return_value"].get_extra_info("client_addr")[1]

    def take(event: Any) -> None:
        answers.append(event)
        arrivals.append(time.time())
        on_event()

    try:
        async with asyncio.timeout(STREAM_LIMIT_S):
            if ask.is_streamed:
                is_done = await _read_stream(client, ask, trace, take)
                error = _wrong(ask, answers, is_done)
            else:
                response = await client.post(ask.path, json=ask.body, extensions={"trace": trace})
                answers.append(response.json())
                error = "" if response.status_code == 200 else f"{response.status_code}: {answers[0]}"
    except (httpx.HTTPError, TimeoutError, ValueError) as broken:
        error = f"{type(broken).__name__}: {broken}"
    return StreamAnswer(place, started_s, time.time(), tuple(arrivals), tuple(_outcome(ask, answers)), error, port)


async def _read_stream(client: httpx.AsyncClient, ask: Ask, trace: Any, take: Callable[[Any], None]) -> bool:
    """Reads a stream's events. Returns whether OpenAI's last line came."""
    is_done = False
    async with client.stream("POST", ask.path, json=ask.body, extensions={"trace": trace}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data:"):
                take(json.loads(line.removeprefix("data:")))
                if ask.is_slow:
                    await asyncio.sleep(SLOW_PAUSE_S)
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
    return is_done


def _wrong(ask: Ask, events: Sequence[Any], is_done: bool) -> str:
    """What is wrong with a stream; empty if nothing is."""
    if (refused := next((event for event in events if "error" in event), None)) is not None:
        return str(refused["error"])
    is_openai = ask.path.startswith("/v1")
    if not (is_done if is_openai else events and events[-1].get("details")):
        return "the stream ended before its text did"
    is_numbered = is_openai or [event.get("index") for event in events] == list(range(1, len(events) + 1))
    return "" if is_numbered else "the events are not numbered 1, 2, 3, …"


def _outcome(ask: Ask, answers: Sequence[Any]) -> Iterator[str]:
    last = answers[-1] if answers else {}
    if ask.kind == PLAIN:
        yield from (str(event["token"]["id"]) for event in answers if "token" in event)
        yield json.dumps([last.get("generated_text") or "", _without_volatile(last.get("details"))])
    elif ask.kind == "best_of" and answers:
        details = last.get("details") or {}
        for text in [details, *details.get("best_of_sequences", [])]:
            yield json.dumps([text.get("seed"), text.get("tokens")])
    else:
        yield from (json.dumps(_without_volatile(answer), sort_keys=True) for answer in answers)


def _without_volatile(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_volatile(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    kept = {name: value for name, value in answer.items() if name not in VOLATILE}
    if isinstance(kept.get("id"), str):  # the id of an OpenAI answer; a token's id is a number
        del kept["id"]
    return {name: _without_volatile(value) for name, value in kept.items()}


def asks_for_each_text(ask: Ask, answer: StreamAnswer) -> list[tuple[Ask, str]]:
    """For each text of an answer with best_of: a request for this text alone, with the seed that the server drew for
    the text, and the expected outcome."""
    found = []
    for line in answer.outcome:
        seed, tokens = json.loads(line)
        parameters = ask.body["parameters"] | {"seed": seed, "best_of": 1}
        found.append((replace(ask, body=ask.body | {"parameters": parameters}), json.dumps([seed, tokens])))
    return found


def is_as_expected(ask: Ask, answer: StreamAnswer, expected: StreamAnswer) -> bool:
    """Whether the outcome is `expected`. For best_of only the number of texts is compared, as the server draws the
    seeds; `ask_again` checks the texts."""
    if ask.kind == "best_of":
        return len(answer.outcome) == len(expected.outcome)
    return answer.outcome == expected.outcome


def differences(
    asked: Sequence[Ask], expected: Sequence[StreamAnswer], answers: Sequence[StreamAnswer]
) -> tuple[list[StreamAnswer], list[str]]:
    """The streams that did not end normally, and how outcomes of others differ from the run without faults."""
    whole = [answer for answer in answers if not answer.error]
    different = []
    for answer in whole:
        ask, other = asked[answer.ask], expected[answer.ask]
        if not is_as_expected(ask, answer, other):
            when = f"{answer.started_s:.2f} … {answer.ended_s:.2f}"
            different.append(f"{ask.kind}, {when}: {_difference(answer, other)}")
    return [answer for answer in answers if answer.error], different


def _difference(answer: StreamAnswer, expected: StreamAnswer) -> str:
    pairs = zip(answer.outcome, expected.outcome, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return f"{len(answer.outcome)} events instead of {len(expected.outcome)}"
    return f"event {place}: {answer.outcome[place]} instead of {expected.outcome[place]}"


class StreamClients:
    """The clients of all requests, `num_early` of them at a time."""

    def __init__(self, asked: Sequence[Ask], num_early: int) -> None:
        self.num_tokens = 0  # number of events received by all streams together
        self.num_begun = 0  # number of streams that have had an event
        self.answers: list[StreamAnswer] = []  # in the order of their ends
        self.newest_s: dict[int, float] = {}  # when the newest event came, of each running stream that has had one
        self.num_counted = 0  # value that `tgi_request_count` has once the server has received every request
        self._asked = asked
        self._num_early = self._num_early_running = num_early
        self._turns = cycle(range(len(asked)))
        self._numbers = count()
        self._finishing = asyncio.Event()

    async def each_once(self, client: httpx.AsyncClient) -> list[StreamAnswer]:
        """The answer to each request. The early streams start together. The others start one by one as the number of
        received tokens grows, so that new prompts arrive nearly all of the time."""
        async with asyncio.timeout(RUN_LIMIT_S):
            early = [self._early(client, place) for place in range(self._num_early)]
            late = [self._late(client, place) for place in range(self._num_early, len(self._asked))]
            return list(await asyncio.gather(*early, *late))

    async def again_and_again(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Keeps as many streams running until `finish` is called: when a stream ends, the next one starts. After the
        last request the first one is sent again."""
        async with client_of(url) as client, asyncio.TaskGroup() as tasks:
            client.timeout = httpx.Timeout(STREAM_LIMIT_S)
            client.headers.update(headers or {})
            for _ in range(self._num_early):
                tasks.create_task(self._go_on(client))

    def finish(self) -> None:
        """Starts no more streams. Running streams go on to their ends."""
        self._finishing.set()

    async def wait_for_tokens(self, num_tokens: int) -> None:
        """Waits until all streams together have received `num_tokens` tokens, or the early streams have ended."""
        while self.num_tokens < num_tokens and self._num_early_running:
            await asyncio.sleep(0.02)

    async def wait_until_begun(self) -> None:
        """Waits until each early stream has had an event, or all have ended."""
        while self.num_begun < self._num_early and self._num_early_running:
            await asyncio.sleep(0.02)

    async def wait_until_all_go_on(self, since_s: float, limit_s: float) -> None:
        """Waits until each stream that has had an event has ended, or has had one after `since_s`."""
        async with asyncio.timeout(limit_s):
            while any(at_s <= since_s for at_s in self.newest_s.values()):
                await asyncio.sleep(0.02)

    async def _early(self, client: httpx.AsyncClient, place: int) -> StreamAnswer:
        try:
            return await self._receive(client, place)
        finally:
            self._num_early_running -= 1

    async def _late(self, client: httpx.AsyncClient, place: int) -> StreamAnswer:
        early_tokens = sum(ask.new_tokens for ask in self._asked[: self._num_early])
        number, num_late = place - self._num_early + 1, len(self._asked) - self._num_early
        await self.wait_for_tokens(early_tokens * number // (num_late + 1))
        return await self._receive(client, place)

    async def _go_on(self, client: httpx.AsyncClient) -> None:
        while not self._finishing.is_set():
            place = next(self._turns)
            # TGI counts a chat twice: as a chat and as a generation
            self.num_counted += 2 if "/chat/" in self._asked[place].path else 1
            self.answers.append(await self._receive(client, place))

    async def _receive(self, client: httpx.AsyncClient, place: int) -> StreamAnswer:
        number = next(self._numbers)

        def take() -> None:
            self.num_tokens += 1
            self.num_begun += number not in self.newest_s
            self.newest_s[number] = time.time()

        try:
            return await answer_of(client, self._asked, place, take)
        finally:
            self.newest_s.pop(number, None)


def run_streams(
    url: str, asked: Sequence[Ask], num_early: int, meanwhile: Callable[[StreamClients], Awaitable[T]] | None = None
) -> tuple[list[StreamAnswer], T | None]:
    """Runs all streams and `meanwhile` at the same time. Returns (the answers of all streams, the result of
    `meanwhile`)."""

    async def beside(clients: StreamClients) -> T | None:
        return await meanwhile(clients) if meanwhile else None

    async def run() -> tuple[list[StreamAnswer], T | None]:
        clients = StreamClients(asked, num_early)
        async with client_of(url) as client, asyncio.TaskGroup() as tasks:
            streams, other = tasks.create_task(clients.each_once(client)), tasks.create_task(beside(clients))
        return streams.result(), other.result()

    return asyncio.run(run())


def answers_beside(
    url: str, asked: Sequence[Ask], num_early: int, tokens: int, harm: Callable[[], Any]
) -> tuple[list[StreamAnswer], Any]:
    """The answers to all streams, and the result of `harm`, called or awaited when each of the early streams has begun
    and all have received `tokens` tokens together."""

    async def meanwhile(clients: StreamClients) -> Any:
        await clients.wait_until_begun()
        await clients.wait_for_tokens(tokens)
        return await harm() if inspect.iscoroutinefunction(harm) else await asyncio.to_thread(harm)

    return run_streams(url, asked, num_early, meanwhile)


def answers_meanwhile(
    url: str, asked: Sequence[Ask], work: Callable[[], None], settled_s: float = 2.0
) -> list[StreamAnswer]:
    """Keeps as many streams running as there are asks, until `work`, which begins after `settled_s`, has returned."""

    async def run() -> list[StreamAnswer]:
        clients = StreamClients(asked, len(asked))
        async with asyncio.TaskGroup() as tasks:
            # Each request has a connection of its own, so that its port tells which front it was with.
            tasks.create_task(clients.again_and_again(url, {"connection": "close"}))
            await asyncio.sleep(settled_s)
            try:
                await asyncio.to_thread(work)
            finally:
                clients.finish()
        return clients.answers

    return asyncio.run(run())


def all_answers(url: str, asked: Sequence[Ask]) -> list[StreamAnswer]:
    """The answers to all requests, AT_ONCE at a time."""

    async def run() -> list[StreamAnswer]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def answer(client: httpx.AsyncClient, place: int) -> StreamAnswer:
            async with slots:
                return await answer_of(client, asked, place)

        async with client_of(url) as client:
            client.timeout = httpx.Timeout(STREAM_LIMIT_S)
            return await asyncio.gather(*(answer(client, place) for place in range(len(asked))))

    return asyncio.run(run())


def undisturbed(server: ServerProcess, asked: Sequence[Ask]) -> list[StreamAnswer]:
    """The answers of a server, which is started for them, without faults."""
    with server:
        return undisturbed_answers(server.url, asked)


def undisturbed_answers(url: str, asked: Sequence[Ask]) -> list[StreamAnswer]:
    """The answers of a server to which nothing is done meanwhile."""
    answers = all_answers(url, asked)
    broken = [answer.error for answer in answers if answer.error]
    if broken:
        raise RuntimeError(f"{len(broken)} streams fail without any fault: {broken[0]}")
    return answers


def ask_again(url: str, asked: Sequence[Ask], answers: Sequence[StreamAnswer]) -> list[str]:
    """Asks for each text of best_of alone, with the seed that was drawn for it. Returns the kinds that differ."""
    again = [
        pair
        for answer in answers
        if asked[answer.ask].kind == "best_of" and not answer.error
        for pair in asks_for_each_text(asked[answer.ask], answer)
    ]
    found = all_answers(url, [ask for ask, _ in again])
    outcomes = zip(found, again, strict=True)
    return [f"best_of {answer.error}".strip() for answer, (_, text) in outcomes if answer.outcome != (text,)]
