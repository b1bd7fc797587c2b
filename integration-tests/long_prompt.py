"""Measures how much a prompt of 30,000 tokens delays 32 running streams, and how long it takes itself, for each of some
values of --max-prefill-slowdown.

python integration-tests/long_prompt.py --write docs/scheduling.md"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from calls import at_once, events_of, tokenizer
from server_process import ServerProcess

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.output import aligned_table, replace_table
from text_generation_benchmark.shapes import SHAPES

POSITIONS = 32_768
LONG_TOKENS = 30_000
NUM_STREAMS = 32
HEAD_TOKENS = 64  # tokens of each stream before the long prompt is sent
# A stream goes on until it has TAIL_TOKENS after the long prompt is done, or this many tokens in all, about as many as
# the slots allow.
MAX_TOKENS = 4_096
TAIL_TOKENS = 24
SLOWDOWNS = (2.0, 4.0, 8.0, 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    slowdown: float
    alone_s: float  # seconds that the steps of such a prompt take when no stream runs
    before: list[float]  # seconds between tokens, as the clients of all streams measure them
    beside: list[float]  # the same while the long prompt is computed
    after: list[float]  # the same when it is done: the streams have longer contexts by then
    steps: int  # number of steps with chunks of the long prompt
    prompt_s: float  # seconds from sending the long prompt to its token

    @property
    def own_s(self) -> float:
        """What the prompt and the streams' tokens take one after the other. The streams' contexts grow from step to
        step, and the time of a step without chunks with them."""
        return self.alone_s + self.steps * (median(self.before) + median(self.after)) / 2


def cost_of(log: Path, known: int) -> tuple[int, float]:
    """The number of steps with chunks behind the first `known` lines of the log, and the seconds that they took."""
    entries = [json.loads(line) for line in log.read_text().splitlines()[known:]]
    costs = [(entry["forward_ns"] + entry["sampling_ns"]) / 1e9 for entry in entries if entry["prompt_tokens"]]
    return len(costs), sum(costs)


def prompts(num_tokens: int, count: int, seed: int) -> list[str]:
    """`count` prompts of `num_tokens` tokens: the token with which every text begins, then words of one token each."""
    rng, vocabulary = random.Random(seed), tokenizer().get_vocab()
    words = sorted(word.replace("Ġ", " ") for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha())
    return ["".join(rng.choice(words) for _ in range(num_tokens - 1)) for _ in range(count)]


@dataclass(slots=True)
class LongPrompt:
    """A request for one token behind a long prompt, and when it was sent and answered."""

    prompt: str
    sent_s: float = 0.0
    done_s: float = 0.0

    async def ask(self, client: httpx.AsyncClient) -> None:
        self.sent_s = time.perf_counter()
        body = {"inputs": self.prompt, "parameters": {"max_new_tokens": 1}}
        (await client.post("/generate", json=body, timeout=900)).raise_for_status()
        self.done_s = time.perf_counter()


class Streams:
    """The streams that run until the long prompt is done, with the arrival times of each stream's tokens."""

    def __init__(self, long: LongPrompt) -> None:
        self.arrivals_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._long = long

    def receive(self, i: int, prompt: str) -> Any:
        async def call(client: httpx.AsyncClient) -> None:
            body = {"inputs": prompt, "parameters": {"max_new_tokens": MAX_TOKENS, "ignore_eos_token": True}}
            async with client.stream("POST", "/generate_stream", json=body, timeout=900) as response:
                left = TAIL_TOKENS
                async for _ in events_of(response):
                    self.arrivals_s[i].append(time.perf_counter())
                    left -= self._long.done_s > 0
                    if not left:
                        break

        return call

    async def then_long(self, client: httpx.AsyncClient) -> None:
        """Sends the long prompt once every stream has received HEAD_TOKENS tokens."""
        while min(map(len, self.arrivals_s)) < HEAD_TOKENS:
            await asyncio.sleep(0.01)
        await self._long.ask(client)

    def gaps(self, from_s: float, to_s: float) -> list[float]:
        """Seconds between two tokens of a stream, where both came between these two times."""
        return [
            after - before
            for arrivals in self.arrivals_s
            for before, after in pairwise(arrivals)
            if from_s <= before and after <= to_s
        ]

    @property
    def all_run_s(self) -> float:
        """When every stream has two tokens. Before that time, steps compute the streams' own prompts."""
        return max(arrivals[1] for arrivals in self.arrivals_s)


def run(server: ServerProcess, log: Path, slowdown: float, tokens: int) -> Measured:
    first, second = prompts(tokens, 2, seed=1)
    known = len(log.read_text().splitlines())
    at_once(server.url, LongPrompt(first).ask)
    _, alone_s = cost_of(log, known)
    long = LongPrompt(second)
    streams = Streams(long)
    calls = [streams.receive(i, prompt) for i, prompt in enumerate(prompts(48, NUM_STREAMS, seed=3))]
    at_once(server.url, *calls, streams.then_long)
    before, beside = streams.gaps(streams.all_run_s, long.sent_s), streams.gaps(long.sent_s, long.done_s)
    # The first streams that end make the last steps of the others shorter.
    after = streams.gaps(long.done_s, min(arrivals[-1] for arrivals in streams.arrivals_s))
    steps = sum(len([s for s in arrivals if long.sent_s < s <= long.done_s]) for arrivals in streams.arrivals_s)
    return Measured(slowdown, alone_s, before, beside, after, steps // NUM_STREAMS, long.done_s - long.sent_s)


def as_markdown(results: Sequence[Measured], tokens: int) -> str:
    head = (
        f"`m100` with {POSITIONS:,} positions, bfloat16, {os.cpu_count()} cores, torch {version('torch')}; "
        f"{NUM_STREAMS} streams; a prompt of {tokens:,} tokens. Milliseconds between two tokens of a stream; "
        "seconds of the prompt. *Own*: what the prompt takes alone, and as many decode steps as it was computed "
        "beside, each as long as the mean of those before and after."
    )
    names = (
        "`--max-prefill-slowdown`", "before", "after", "beside", "p99", "p99 / bound", "prompt", "own", "prompt / own",
        "alone",
    )  # fmt: skip
    return f"{head}\n\n{aligned_table([names, *map(_row, results)])}"


def _row(measured: Measured) -> tuple[str, ...]:
    usual, late = median(measured.before), float(np.percentile(measured.beside, 99))
    bound = f"{late / (measured.slowdown * usual):.2f}" if measured.slowdown else "–"
    return (
        f"{measured.slowdown:g}" if measured.slowdown else "0 (no bound)",
        f"{1000 * usual:.1f}", f"{1000 * median(measured.after):.1f}", f"{1000 * median(measured.beside):.1f}",
        f"{1000 * late:.1f}", bound,
        f"{measured.prompt_s:.1f}", f"{measured.own_s:.1f}", f"{measured.prompt_s / measured.own_s:.2f}",
        f"{measured.alone_s:.1f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked table is replaced")
    parser.add_argument("--slowdown", type=float, nargs="+", default=SLOWDOWNS)
    parser.add_argument("--tokens", type=int, default=LONG_TOKENS, help="tokens of the long prompt")
    asked = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "m100", Path(folder) / "steps"
        write_checkpoint(model, replace(SHAPES["m100"], max_positions=POSITIONS))
        for slowdown in asked.slowdown:
            flags = ("--model-id", str(model), "--dtype", "bfloat16", "--max-prefill-slowdown", f"{slowdown:g}")
            log.write_text("")
            with ServerProcess(*flags, environ={"STEP_LOG": str(log)}) as server:
                results.append(run(server, log, slowdown, asked.tokens))
            print(" | ".join(_row(results[-1])), flush=True)
    table = as_markdown(results, asked.tokens)
    print(table)
    if asked.write is not None:
        asked.write.write_text(replace_table(asked.write.read_text(), table, "long prompt"))


if __name__ == "__main__":
    main()
