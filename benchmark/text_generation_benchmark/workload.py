"""The loads that every server gets, and how the servers take turns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import orjson

from text_generation_benchmark.load import GREEDY, Completions, Dialect, LoadResult, run_load
from text_generation_benchmark.process import request
from text_generation_benchmark.prompts import Prompts

ROUNDS = 3
SAMPLING = MappingProxyType({"temperature": 0.7, "top_p": 0.9})


@dataclass(frozen=True, slots=True)
class Workload:
    concurrency: int
    input_tokens: int = 256
    new_tokens: int = 128
    is_sampled: bool = False  # draws tokens with SAMPLING; otherwise tokens are greedy

    @property
    def sampling(self) -> Mapping[str, float]:
        return SAMPLING if self.is_sampled else GREEDY


PREFILL = Workload(1, input_tokens=1024, new_tokens=1)
LONG_PREFILL = Workload(1, input_tokens=4000, new_tokens=1)


# Runs one load, with prompts that were never sent to any server.
Run = Callable[[Workload], LoadResult]


def loads_on(port: int, dialect: Dialect, prompts: Prompts) -> Run:
    def run(workload: Workload) -> LoadResult:
        asked = prompts.make(workload.concurrency, workload.input_tokens)
        return run_load(port, dialect, asked, workload.new_tokens, workload.sampling)

    return run


def take_turns(runs: Mapping[str, Run], workload: Workload, rounds: int = ROUNDS) -> dict[str, list[LoadResult]]:
    """Measures all servers in turn. Returns one result per round, by name of the server. A short run comes first, in
    which the servers compile and warm up for this load.
    """
    for run in runs.values():
        run(replace(workload, new_tokens=min(4, workload.new_tokens)))
    measured = [{name: run(workload) for name, run in runs.items()} for _ in range(rounds)]
    return {name: [results[name] for results in measured] for name in runs}


def check_counts(port: int, dialect: Completions, prompts: Prompts) -> None:
    """Checks a server's counts of tokens. RuntimeError if the server counts another number of tokens in a prompt or an
    answer than was asked for.
    """
    body = dialect.body(prompts.make(1, 64)[0], 4) | {"stream": False}
    body.pop("stream_options", None)
    usage = orjson.loads(request(port, dialect.path, orjson.dumps(body)))["usage"]
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (64, 4):
        raise RuntimeError(f"asked for 64 tokens in and 4 out, the server counts {usage}")
