"""What a prompt of 30,000 tokens costs 32 streams that are under way, and what a chunk of it costs by itself.

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
HEAD_TOKENS = 64  # that each stream has made when the long prompt is sent
TAIL_TOKENS = 96  # that are left for the time after it; TGI's joining rule takes 20 of them before it
# What fused steps may cost more than their parts, measured one after the other on a machine that is never quiet.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Step:
    """As the shard has logged it. Its clock is the client's: both are the system's monotonic one."""

    ended_s: float
    cost_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between tokens, as clients of all streams saw them."""

    before: list[float]
    during: list[tuple[int, float]]  # with the number of the chunk that was in the step
    after: list[float]


@dataclass(frozen=True, slots=True)
class Measured:
    alone: list[float]  # seconds that each chunk takes when nothing else runs
    gaps: Gaps

    @property
    def raised(self) -> list[float]:
        """By how much each gap beside a chunk was longer than without one, over what that chunk costs alone."""
        usual = median(self.gaps.before)
        return [(gap - usual) / self.alone[chunk] for chunk, gap in self.gaps.during]


def steps_of(log: Path) -> list[Step]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        Step(entry["at_ns"] / 1e9, (entry["forward_ns"] + entry["sampling_ns"]) / 1e9, entry["prompt_tokens"])
        for entry in entries
    ]


def prompts(num_tokens: int, count: int, seed: int) -> list[str]:
    """Of words that are one token each; a token that begins every text is added to them."""
    rng, vocabulary = random.Random(seed), tokenizer().get_vocab()
    words = sorted(word.replace("Ġ", " ") for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha())
    return ["".join(rng.choice(words) for _ in range(num_tokens - 1)) for _ in range(count)]


def ask_long(prompt: str) -> Any:
    async def call(client: httpx.AsyncClient) -> None:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 1}}
        (await client.post("/generate", json=body, timeout=600)).raise_for_status()

    return call


class Streams:
    """Those under way, each with the times at which its tokens came."""

    def __init__(self) -> None:
        self.arrivals_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    def listen(self, i: int, prompt: str, new_tokens: int) -> Any:
        async def call(client: httpx.AsyncClient) -> None:
            parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True}
            body = {"inputs": prompt, "parameters": parameters}
            async with client.stream("POST", "/generate_stream", json=body, timeout=600) as response:
                async for _ in events_of(response):
                    self.arrivals_s[i].append(time.perf_counter())

        return call

    def then(self, num_heard: int, call: Any) -> Any:
        """`call`, when all of them have heard so much."""

        async def wait(client: httpx.AsyncClient) -> None:
            while min(map(len, self.arrivals_s)) < num_heard:
                await asyncio.sleep(0.01)
            await call(client)

        return wait


def run(server: ServerProcess, log: Path) -> Measured:
    first, second, third = prompts(LONG_TOKENS, 3, seed=1)
    at_once(server.url, ask_long(prompts(CHUNK_TOKENS, 1, seed=2)[0]))  # whatever is slow the first time

    def chunks(prompt: str) -> list[float]:
        known = len(steps_of(log))
        at_once(server.url, ask_long(prompt))
        return [step.cost_s for step in steps_of(log)[known:] if step.prompt_tokens]

    before = chunks(first)
    known = len(steps_of(log))
    streams = Streams()
    new_tokens = HEAD_TOKENS + len(before) + TAIL_TOKENS
    calls = [streams.listen(i, prompt, new_tokens) for i, prompt in enumerate(prompts(48, NUM_STREAMS, seed=3))]
    at_once(server.url, *calls, streams.then(HEAD_TOKENS, ask_long(second)))
    gaps = gaps_of(streams, steps_of(log)[known:])
    # Of the two the smaller: what else this machine does is no part of a chunk.
    return Measured(list(map(min, before, chunks(third))), gaps)


def gaps_of(streams: Streams, steps: Sequence[Step]) -> Gaps:
    """A gap belongs to the step that ended it: the last that had been computed when the token came."""
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
    """When the last of them had its first tokens: until then they are prompts themselves."""
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
        f"prompt would have kept everybody waiting for {together:.0f} s."
    )
    lines = ["| | number | median | p90 | p99 | max |", "| --- | --- | --- | --- | --- | --- |", *rows]
    return "\n\n".join([head, "\n".join(lines), text])


def _row(name: str, values_s: Sequence[float]) -> str:
    cells = [f"{1000 * value:.1f}" for value in np.percentile(values_s, [50, 90, 99, 100])]
    return f"| {name} | {len(values_s)} | {' | '.join(cells)} |"


def main() -> int:
    """1 if the streams waited longer, in the median, than a chunk costs."""
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
