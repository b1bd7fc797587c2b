"""Measures what evil grammars cost their neighbours: the time between tokens of 16 streams, while another tenant sends
nothing (`none`), requests without a grammar (`plain`), or the same requests, each with an evil grammar (`evil`).

The windows follow each other in turns, on the same streams: none, plain, evil, evil, plain, none, and so on. Every
`plain` and `evil` window has the same number of requests, at the same times. No two grammars are equal, so each is
checked and compiled. Prints a line for each kind of window, and the ratios of `evil` to the others."""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count, cycle, pairwise
from pathlib import Path
from typing import Any

import httpx
from assaults import LONG_TEXT, post, text
from calls import DEMO_MODEL
from outcome import table
from server_process import LAUNCHER, ServerProcess
from victim import PATIENCE_S, percentile

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.tests.evil_grammars import grammars

KEYS = NEIGHBOUR, ATTACKER = "neighbour-key", "attacker-key"
STREAMS, STREAM_TOKENS = 16, 1000
ORDER = ("none", "plain", "evil", "evil", "plain", "none")
EVENT = b"\ndata:"


class Stream(asyncio.Protocol):
    """Streams one text after the other, and notes when each token arrives."""

    def __init__(self, body: bytes, arrivals: list[float]) -> None:
        self._body = body
        self._arrivals = arrivals
        self._seen = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._arrivals += [now_s] * (self._seen[1 - len(EVENT) :] + data).count(EVENT)
        self._seen = data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def stream_for_ever(port: int, number: int, texts: list[list[float]]) -> None:
    """Appends to `texts` the arrivals of each text's tokens, in seconds."""
    for i in count():
        parameters = {"max_new_tokens": STREAM_TOKENS, "ignore_eos_token": True, "seed": i, "do_sample": True}
        body = json.dumps({"inputs": f"{number}. Once upon a time", "parameters": parameters}).encode()
        texts.append([])
        request = post("/generate_stream", NEIGHBOUR, body)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda r=request, t=texts[-1]: Stream(r, t), "127.0.0.1", port)
        await stream.ended


def evil_bodies(new_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Route and body of each request: every evil grammar in turn, each time another one."""
    every = list(grammars())
    for number, asked in zip(count(), cycle(every)):
        body = text(f"{number} {LONG_TEXT}", max_new_tokens=new_tokens)
        if asked.kind is GrammarKind.RULES or asked.kind is GrammarKind.CHOICE:
            outputs = {asked.kind.name.lower().replace("rules", "grammar"): _another(asked, number)}
            more = {"prompt": body["inputs"], "max_tokens": new_tokens, "structured_outputs": outputs}
            yield "/v1/completions", more
        else:
            kind = "regex" if asked.kind is GrammarKind.REGEX else "json_schema"
            body["parameters"]["grammar"] = {"type": kind, "value": _another(asked, number)}
            yield "/generate", body


def _another(asked: AskedGrammar, number: int) -> Any:
    """The grammar, changed in nothing that costs."""
    if asked.kind is GrammarKind.REGEX:
        return f"{asked.text}|z{number}"
    if asked.kind is GrammarKind.RULES:
        return asked.text + "\n" * (number + 1)
    try:
        value = json.loads(asked.text)
    except (RecursionError, json.JSONDecodeError):
        return asked.text
    return [*value[:-1], f"{number}"] if isinstance(value, list) else value | {"title": f"{number}"}


def plain_bodies(new_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for number in count():
        yield "/generate", text(f"{number} {LONG_TEXT}", max_new_tokens=new_tokens)


async def send(client: httpx.AsyncClient, route: str, body: dict[str, Any], answers: "Counter[int]") -> None:
    answers[(await client.post(route, json=body)).status_code] += 1


async def measure(port: int, rounds: int, window_s: float, rate: float, new_tokens: int) -> list[dict[str, Any]]:
    """The windows, with the milliseconds between tokens of the streams in each of them."""
    texts: list[list[float]] = []
    streams = [asyncio.create_task(stream_for_ever(port, n, texts)) for n in range(STREAMS)]
    kinds = {"plain": plain_bodies(new_tokens), "evil": evil_bodies(new_tokens)}
    windows = []
    headers = {"authorization": f"Bearer {ATTACKER}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, headers=headers) as client:
        await asyncio.sleep(3)
        for kind in ORDER * rounds:
            answers: Counter[int] = Counter()
            begin_s = time.perf_counter()
            sent = []
            for i in range(round(rate * window_s)):
                await asyncio.sleep(begin_s + i / rate - time.perf_counter())
                if kind in kinds:
                    sent.append(asyncio.create_task(send(client, *next(kinds[kind]), answers)))
            await asyncio.sleep(begin_s + window_s - time.perf_counter())
            await asyncio.gather(*sent)
            end_s = time.perf_counter()
            windows.append({"kind": kind, "begin": begin_s, "end": end_s, "answers": dict(answers)})
            await asyncio.sleep(0.3)
    for stream in streams:
        stream.cancel()
    for window in windows:
        window["ms"] = [
            1000 * (late - early)
            for arrivals in texts
            for early, late in pairwise(arrivals)
            if window["begin"] <= early and late <= window["end"]
        ]
    return windows


def told(windows: Sequence[dict[str, Any]]) -> str:
    rows, average, by_window = [], {}, []
    for kind in dict.fromkeys(ORDER):
        these = [window for window in windows if window["kind"] == kind]
        means = [sum(window["ms"]) / len(window["ms"]) for window in these]
        average[kind] = sum(means) / len(means)
        by_window.append(f"{kind} " + " ".join(f"{mean:.2f}" for mean in means))
        ms = list(chain.from_iterable(window["ms"] for window in these))
        answers = sum((Counter(window["answers"]) for window in these), Counter())
        shown = ", ".join(f"{n} × {status}" for status, n in sorted(answers.items())) or "–"
        figures = [f"{each:.2f}" for each in (sum(ms) / len(ms), *(percentile(ms, p) for p in (0.5, 0.99, 1.0)))]
        seconds = sum(window["end"] - window["begin"] for window in these)
        rows.append([kind, f"{seconds:.0f}", shown, len(ms), *figures])
    ratios = ", ".join(f"evil / {other}: {average['evil'] / average[other]:.3f}" for other in ("plain", "none"))
    head = "window|seconds|answers|tokens|mean ms|p50 ms|p99 ms|worst ms"
    return f"{table(head, rows)}\nmeans by window: {'; '.join(by_window)}\n{ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-id", default=str(DEMO_MODEL))
    parser.add_argument("--launcher", type=Path, default=LAUNCHER)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of a window")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens that each of these requests asks for")
    asked = parser.parse_args()
    keys = ("--api-key", NEIGHBOUR, "--api-key", ATTACKER)
    with ServerProcess("--model-id", asked.model_id, *keys, launcher=asked.launcher) as server:
        print(told(asyncio.run(measure(server.port, asked.rounds, asked.seconds, asked.rate, asked.new_tokens))))


if __name__ == "__main__":
    main()
