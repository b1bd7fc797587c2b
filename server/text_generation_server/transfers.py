"""Between host and device, neither waiting for the other: copies through pinned memory, and moments in the device's
work. On a CPU all of it has happened when the call returns."""

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Views into one buffer begin at whole vectors of 16 bytes: kernels are compiled apart for those that do not.
ALIGNED_WORDS = 4


class Moment(Protocol):
    """A point in the order of the device's work."""

    def has_come(self) -> bool: ...

    def wait(self) -> None:
        """May be called from any thread."""
        ...

    def ns_since(self, earlier: Any) -> int:
        """The device's time between the two, both of which have come."""
        ...


class HostMoment:
    """The host is the device: now."""

    def __init__(self) -> None:
        self._at_ns = time.perf_counter_ns()

    def has_come(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def ns_since(self, earlier: "HostMoment") -> int:
        return self._at_ns - earlier._at_ns


class CudaMoment:
    """When the work has been done that the current stream was given so far."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def has_come(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.set_device(self._device)  # another thread may wait, which would make a context on the first device
        self._event.synchronize()

    def ns_since(self, earlier: "CudaMoment") -> int:
        return int(earlier._event.elapsed_time(self._event) * 1e6)


def moments_of(device: torch.device) -> Callable[[], Moment]:
    return CudaMoment if device.type == "cuda" else HostMoment


def use_own_stream(device: torch.device) -> None:
    """The calling thread gives its work to a stream of its own from now on, after what the default stream was given:
    the default one cannot be captured in graphs."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


def host_words(count: int, device: torch.device) -> Tensor:
    """int32 [count] on the host, to be sent. torch gives its memory to nobody else before the copy has been made."""
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")


def send(parts: list[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """The same numbers on the device, in one copy."""
    padded = [-(-len(part) // ALIGNED_WORDS) * ALIGNED_WORDS for part in parts]
    bounds = list(accumulate(padded, initial=0))
    host = host_words(bounds[-1], device)
    words = host.numpy()
    for first, part in zip(bounds, parts, strict=False):
        words[first : first + len(part)] = part
    there = host.to(device, non_blocking=True)
    return [there[first : first + len(part)] for (first, _), part in zip(pairwise(bounds), parts, strict=True)]


def fetch(x: Tensor) -> Tensor:
    """A copy on the host, complete when a moment marked after it has come."""
    if x.device.type != "cuda":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
