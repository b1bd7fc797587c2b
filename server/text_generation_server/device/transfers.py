"""Copies between host and device through pinned memory, and moments (points in the order of the device's work). Host
and device do not wait for each other. On a CPU a copy is complete, and a moment has come, when the call returns.
"""

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Views into one buffer begin at multiples of 16 bytes: for other addresses Triton compiles every kernel a second time.
ALIGNED_WORDS = 4


class Moment(Protocol):
    """A point in the order of the device's work."""

    def has_come(self) -> bool: ...

    def wait(self) -> None:
        """Waits until the moment has come. May be called from any thread."""
        ...

    def ns_since(self, earlier: Any) -> int:
        """Nanoseconds of the device's time since the moment `earlier`. Both moments must have come."""
        ...


class HostMoment:
    """A moment on a CPU. A CPU computes at once, so the moment has come when it is made."""

    def __init__(self) -> None:
        self._at_ns = time.perf_counter_ns()

    def has_come(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def ns_since(self, earlier: "HostMoment") -> int:
        return self._at_ns - earlier._at_ns


class CudaMoment:
    """The moment at which all work given to the current stream until now is done."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def has_come(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.set_device(self._device)  # without this call, a waiting thread would make a context on device 0
        self._event.synchronize()

    def ns_since(self, earlier: "CudaMoment") -> int:
        return int(earlier._event.elapsed_time(self._event) * 1e6)


def moments_of(device: torch.device) -> Callable[[], Moment]:
    return CudaMoment if device.type == "cuda" else HostMoment


def use_own_stream(device: torch.device) -> None:
    """From now on the calling thread's work goes to a new stream, after the work of the default stream. The default
    stream cannot be captured in graphs."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


def host_words(count: int, device: torch.device) -> Tensor:
    """An int32 tensor [count] on the host, for `send`. torch does not reuse its memory before the copy is complete."""
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")


def send(parts: list[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copies the parts to the device in one transfer, and returns each as a tensor there."""
    padded = [-(-len(part) // ALIGNED_WORDS) * ALIGNED_WORDS for part in parts]
    bounds = list(accumulate(padded, initial=0))
    host = host_words(bounds[-1], device)
    words = host.numpy()
    for first, part in zip(bounds, parts, strict=False):
        words[first : first + len(part)] = part
    there = host.to(device, non_blocking=True)
    return [there[first : first + len(part)] for (first, _), part in zip(pairwise(bounds), parts, strict=True)]


def fetch(x: Tensor) -> Tensor:
    """A copy of `x` on the host, complete when a moment that is marked after this call has come."""
    if x.device.type != "cuda":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
