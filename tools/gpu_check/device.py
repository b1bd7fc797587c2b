"""What the checks compute on: a GPU, or the CPU and Triton's interpreter for a rehearsal with small sizes."""

import time
from collections.abc import Callable, Sequence

import torch
from triton.testing import do_bench_cudagraph

from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape

SMALL = LlamaShape(hidden=128, intermediate=320, layers=2, heads=4, kv_heads=2, vocabulary=4000, tied=False)
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPE = LLAMA_8B if GPU else SMALL
# Triton's interpreter computes bfloat16 wrongly.
DTYPE = torch.bfloat16 if GPU else torch.float16

Call = Callable[[], object]
# (title of a table, cells by column, figures that targets name)
Measured = Callable[..., None]


def seconds_per_call(calls: Sequence[Call]) -> float:
    """The fastest run counts. On a GPU the calls are recorded as a graph, so the host's launch time does not count."""

    def run() -> None:
        for call in calls:
            call()

    if GPU:
        return float(do_bench_cudagraph(run, rep=20, return_mode="min")) / 1e3 / len(calls)
    run()
    started_s = time.perf_counter()
    run()
    return (time.perf_counter() - started_s) / len(calls)
