"""Measures how long the device takes for calls that follow each other."""

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

ROUNDS = 5
ROUND_S = 0.02


def seconds_per_call(calls: Sequence[Call], device: torch.device) -> float:
    """Mean seconds per call, of the fastest round. Each call is made at least once before, which compiles it. On a GPU
    the calls are then recorded as one graph, like a server's decode steps, so the host's launch time does not count.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return min(_host_seconds(calls) for _ in range(2)) / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = event_seconds(graph.replay, 3)
    repetitions = max(1, int(ROUND_S / once))
    return min(event_seconds(graph.replay, repetitions) for _ in range(ROUNDS)) / len(calls)


def event_seconds(call: Call, repetitions: int) -> float:
    """GPU seconds per call, the mean of `repetitions` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    call()
    start.record()
    for _ in range(repetitions):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repetitions


def _host_seconds(calls: Sequence[Call]) -> float:
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started
