"""transformers' `generate` in a process of its own: all prompts of a run as one batch of equal length."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.workload import Run, Workload


class Clock:
    """A stopping criterion that never stops. `generate` calls it after every token, and it notes the time."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def run_once(model: Any, ids: torch.Tensor, new_tokens: int, sampling: Mapping[str, float]) -> LoadResult:
    clock = Clock()
    asked = {"do_sample": True, "top_k": 0, **sampling} if sampling else {"do_sample": False}
    options = {**asked, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_length": None}
    out = model.generate(
        ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, stopping_criteria=[clock], **options
    )
    wall = time.perf_counter() - clock.times[0]
    if out.shape[1] != ids.shape[1] + new_tokens:
        raise RuntimeError(f"transformers made {out.shape[1] - ids.shape[1]} of {new_tokens} tokens")
    stream = StreamTimes(clock.times[1] - clock.times[0], clock.times[-1] - clock.times[0], new_tokens)
    return LoadResult((stream,) * len(ids), wall)


@contextlib.contextmanager
def running_transformers(model: Path) -> Iterator[Run]:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(model, there))
    process.start()
    there.close()

    def run(workload: Workload) -> LoadResult:
        try:
            here.send(workload)
            found: LoadResult = here.recv()
        except (EOFError, BrokenPipeError):
            raise RuntimeError("transformers ended without an answer; its output is above") from None
        return found

    try:
        yield run
    finally:
        process.kill()
        process.join()


def _answer(model: Path, pipe: Connection) -> None:
    from transformers import LlamaForCausalLM

    served = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    tokenizer, prompts = Tokenizer.from_file(f"{model}/tokenizer.json"), Prompts(model)
    with torch.inference_mode(), contextlib.suppress(EOFError):
        while True:
            workload: Workload = pipe.recv()
            texts = prompts.make(workload.concurrency, workload.input_tokens)
            ids = torch.tensor([tokenizer.encode(text).ids for text in texts])
            pipe.send(run_once(served, ids, workload.new_tokens, workload.sampling))
