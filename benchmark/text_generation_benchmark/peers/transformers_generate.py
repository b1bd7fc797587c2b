"""transformers' `generate`, as a process of its own: all prompts of a run as one batch of equal length.

    python -m text_generation_benchmark.peers.transformers_generate MODEL CONCURRENCY,IN,OUT …

prints one JSON line: for each workload the seconds to the first token, to the last, and in all.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.workload import REPETITIONS, Workload, median


class Clock:
    """Asked by `generate` after every token whether to stop: it notes the time, and says no."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def run_once(model: Any, ids: torch.Tensor, new_tokens: int) -> LoadResult:
    clock = Clock()
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_length": None}
    out = model.generate(
        ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, stopping_criteria=[clock], **options
    )
    wall = time.perf_counter() - clock.times[0]
    if out.shape[1] != ids.shape[1] + new_tokens:
        raise RuntimeError(f"transformers made {out.shape[1] - ids.shape[1]} of {new_tokens} tokens")
    stream = StreamTimes(clock.times[1] - clock.times[0], clock.times[-1] - clock.times[0], new_tokens)
    return LoadResult((stream,) * len(ids), wall)


def measure_here(model: Any, tokenizer: Tokenizer, prompts: Prompts, workload: Workload) -> LoadResult:
    def ids() -> torch.Tensor:
        texts = prompts.make(workload.concurrency, workload.input_tokens)
        return torch.tensor([tokenizer.encode(text).ids for text in texts])

    run_once(model, ids(), min(4, workload.new_tokens))
    return median([run_once(model, ids(), workload.new_tokens) for _ in range(REPETITIONS)])


def measure_transformers(model: Path, workloads: Sequence[Workload]) -> dict[Workload, LoadResult]:
    wanted = [f"{w.concurrency},{w.input_tokens},{w.new_tokens}" for w in workloads]
    command = [sys.executable, "-m", __name__, str(model), *wanted]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answers = json.loads(result.stdout.splitlines()[-1])
    return {w: _result(w, *seconds) for w, seconds in zip(workloads, answers, strict=True)}


def _result(workload: Workload, first: float, last: float, wall: float) -> LoadResult:
    return LoadResult((StreamTimes(first, last, workload.new_tokens),) * workload.concurrency, wall)


def main() -> None:
    from transformers import LlamaForCausalLM

    path, *wanted = sys.argv[1:]
    model = LlamaForCausalLM.from_pretrained(Path(path), dtype=torch.bfloat16).eval()
    tokenizer, prompts = Tokenizer.from_file(f"{path}/tokenizer.json"), Prompts(Path(path))
    answers = []
    with torch.inference_mode():
        for workload in (Workload(*map(int, text.split(","))) for text in wanted):
            result = measure_here(model, tokenizer, prompts, workload)
            answers.append((result.streams[0].first, result.streams[0].last, result.wall_s))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
