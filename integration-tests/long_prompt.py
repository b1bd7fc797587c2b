"""Measures how much a prompt of 30,000 tokens delays 32 running streams, and how long each of its chunks takes without
streams.

python integration-tests/long_prompt.py --write integration-tests/README.md
"""

import argparse
import asyncio
import bisect
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
from text_generation_benchmark.output import replace_table
from text_generation_benchmark.shapes import SHAPES

POSITIONS = 32_768
LONG_TOKENS = 30_000
CHUNK_TOKENS = 512
NUM_STREAMS = 32
HEAD_TOKENS = 64  # tokens of each stream before the long prompt is sent
TAIL_TOKENS = 96  # tokens of each stream after that; TGI's joining rule admits the long prompt after 20 of them
# A step with a chunk and decode rows may take this share longer than the sum of both measured separately: other
# processes disturb the measurement.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Step:
    """A step as logged by the shard. Shard and client use the same clock, the system's monotonic clock."""

    ended_s: float
    cost_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between tokens, as measured by the clients of all streams: before, during and after the long prompt."""

    before: list[float]
    during: list[tuple[int, float]]  # (number of the chunk that a step computes, seconds between tokens)
    after: list[float]


@dataclass(frozen=True, slots=True)
class Measured:
    alone: list[float]  # seconds that each chunk takes when no stream runs
    gaps: Gaps

    @property
    def raised(self) -> list[float]:
        """For each gap between tokens during the long prompt: (gap - usual gap) / time of the step's chunk alone."""
        usual = median(self.gaps.before)
        return [(gap - usual) / self.alone[chunk] for chunk, gap in self.gaps.during]


def steps_of(log: Path) -> list[Step]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        Step(entry["at_ns"] / 1e9, (entry["forward_ns"] + entry["sampling_ns"]) / 1e9, entry["prompt_tokens"])
        for entry in entries
    ]


def prompts(num_tokens: int, count: int, seed: int) -> list[str]:
    """`count` prompts of `num_tokens` tokens: the token with which every text begins, then words of one token each."""
    rng, vocabulary = random.Random(seed), tokenizer().get_vocab()
    words = sorted(word.replace("Ġ", " ") for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha())
    return ["".join(rng.choice(words) for _ in range(num_tokens - 1)) for _ in range(count)]


def ask_long(prompt: str) -> Any:
    async def call(client: httpx.AsyncClient) -> None:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 1}}
        (await client.post("/generate", json=body, timeout=600)).raise_for_status()

    return call


class Streams:
    """The running streams, with the arrival times of each stream's tokens."""

    def __init__(self) -> None:
        self.arrivals_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    def receive(self, i: int, prompt: str, new_tokens: int) -> Any:
        async def call(client: httpx.AsyncClient) -> None:
            parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True}
            body = {"inputs": prompt, "parameters": parameters}
            async with client.stream("POST", "/generate_stream", json=body, timeout=600) as response:
                async for _ in events_of(response):
                    self.arrivals_s[i].append(time.perf_counter())

        return call

    def then(self, num_tokens: int, call: Any) -> Any:
        """Runs `call` once every stream has received `num_tokens` tokens."""

        async def wait(client: httpx.AsyncClient) -> None:
            while min(map(len, self.arrivals_s)) < num_tokens:
                await asyncio.sleep(0.01)
            await call(client)

        return wait


def run(server: ServerProcess, log: Path) -> Measured:
    first, second, third = prompts(LONG_TOKENS, 3, seed=1)
    at_once(server.url, ask_long(prompts(CHUNK_TOKENS, 1, seed=2)[0]))  # warm up: the first chunk is slower

    def chunks(prompt: str) -> list[float]:
        known = len(steps_of(log))
        at_once(server.url, ask_long(prompt))
        return [step.cost_s for step in steps_of(log)[known:] if step.prompt_tokens]

    before = chunks(first)
    known = len(steps_of(log))
    streams = Streams()
    new_tokens = HEAD_TOKENS + len(before) + TAIL_TOKENS
    calls = [streams.receive(i, prompt, new_tokens) for i, prompt in enumerate(prompts(48, NUM_STREAMS, seed=3))]
    at_once(server.url, *calls, streams.then(HEAD_TOKENS, ask_long(second)))
    gaps = gaps_of(streams, steps_of(log)[known:])
    # The smaller of two measurements of each chunk: other load on this machine does not belong to a chunk's cost.
    return Measured(list(map(min, before, chunks(third))), gaps)


def gaps_of(streams: Streams, steps: Sequence[Step]) -> Gaps:
    """Assigns each gap to the step that ended it: the last step computed when the token arrived."""
    ends = [step.ended_s for step in steps]
    long_steps = [i for i, step in enumerate(steps) if step.prompt_tokens and ends[i] > _all_run_s(streams)]
    numbers = {step: chunk for chunk, step in enumerate(long_steps)}
    gaps = Gaps([], [], [])
    for arrivals in streams.arrivals_s:
        for before_s, now_s in pairwise(arrivals):
            step = bisect.bisect_right(ends, now_s) - 1
            if step in numbers:
                gaps.during.append((numbers[step], now_s - before_s))
            elif before_s > _all_run_s(streams):
                (gaps.before if step < long_steps[0] else gaps.after).append(now_s - before_s)
    return gaps


def _all_run_s(streams: Streams) -> float:
    """Time at which every stream has two tokens. Before that time, steps compute the streams' own prompts."""
    return max(arrivals[1] for arrivals in streams.arrivals_s)


def as_markdown(measured: Measured) -> str:
    gaps, alone = measured.gaps, measured.alone
    usual, together = median(gaps.before), sum(alone)
    beside = [gap for _, gap in gaps.during]
    head = (
        f"`m100` with {POSITIONS:,} positions, bfloat16, {os.cpu_count()} cores, torch {version('torch')}; "
        f"{NUM_STREAMS} streams; a prompt of {LONG_TOKENS:,} tokens; `--max-batch-prefill-tokens {CHUNK_TOKENS}`. "
        "Milliseconds."
    )
    rows = [
        _row("between tokens, before", gaps.before),
        _row(f"between tokens, beside its {len(alone)} chunks", beside),
        _row("between tokens, after", gaps.after),
        _row("a chunk of such a prompt, alone", alone),
        _row("the median before, and such a chunk", [usual + cost for cost in alone]),
    ]
    share = sum(ratio <= 1 + TOLERANCE for ratio in measured.raised) / len(beside)
    text = (
        f"Gap by gap, streams waited longer beside a chunk than before by {median(measured.raised):.2f} of what that "
        f"chunk costs alone (median; at most {1 + TOLERANCE:g} of it in {share:.1%} of all gaps). In one piece the "
        f"prompt would have kept every stream waiting for {together:.0f} s."
    )
    lines = ["| | number | median | p90 | p99 | max |", "| --- | --- | --- | --- | --- | --- |", *rows]
    return "\n\n".join([head, "\n".join(lines), text])


def _row(name: str, values_s: Sequence[float]) -> str:
    cells = [f"{1000 * value:.1f}" for value in np.percentile(values_s, [50, 90, 99, 100])]
    return f"| {name} | {len(values_s)} | {' | '.join(cells)} |"


def main() -> int:
    """Returns 1 if the median stream waited longer than a chunk costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked table is replaced")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "m100", Path(folder) / "steps"
        write_checkpoint(model, replace(SHAPES["m100"], max_positions=POSITIONS))
        arguments = ("--model-id", str(model), "--dtype", "bfloat16", "--max-batch-prefill-tokens", str(CHUNK_TOKENS))
        with ServerProcess(*arguments, environ={"STEP_LOG": str(log)}) as server:
            measured = run(server, log)
    table = as_markdown(measured)
    print(table)
    if asked.write is not None:
        asked.write.write_text(replace_table(asked.write.read_text(), table, "long prompt"))
    return 0 if median(measured.raised) <= 1 + TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
