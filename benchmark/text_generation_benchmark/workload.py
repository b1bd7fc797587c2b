"""What is asked of every server, and the median of some runs of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from text_generation_benchmark.load import Completions, Dialect, LoadResult, run_load
from text_generation_benchmark.process import request
from text_generation_benchmark.prompts import Prompts

REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Workload:
    concurrency: int
    input_tokens: int = 256
    new_tokens: int = 128


PREFILL = Workload(1, input_tokens=1024, new_tokens=1)


def median(runs: Sequence[LoadResult]) -> LoadResult:
    return sorted(runs, key=lambda run: run.wall_s)[len(runs) // 2]


def measure(port: int, dialect: Dialect, prompts: Prompts, workload: Workload) -> LoadResult:
    """The median run, after a short one: each shape of a step has been met once, compiled or warmed."""
    run_load(port, dialect, prompts.make(workload.concurrency, workload.input_tokens), min(4, workload.new_tokens))
    runs = []
    for _ in range(REPETITIONS):
        asked = prompts.make(workload.concurrency, workload.input_tokens)
        runs.append(run_load(port, dialect, asked, workload.new_tokens))
    return median(runs)


def check_counts(port: int, dialect: Completions, prompts: Prompts) -> None:
    """RuntimeError if the server reads another number of tokens out of a prompt than was meant."""
    body = dialect.body(prompts.make(1, 64)[0], 4) | {"stream": False}
    body.pop("stream_options", None)
    usage = orjson.loads(request(port, dialect.path, orjson.dumps(body)))["usage"]
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (64, 4):
        raise RuntimeError(f"asked for 64 tokens in and 4 out, the server counts {usage}")
