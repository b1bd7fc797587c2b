"""CUDA graphs of decode steps: recorded when a batch size comes for the first time, replayed ever after.

A graph is for one number of rows, and steps are padded to the next one there is. Sizes come as the load grows, the
smallest in the warm-up, so a server starts at once and records only what its load needs. The first step of a size runs
as it is, which compiles its kernels and gives its tokens; it is recorded right behind, while the device works on it:
some tenths of a second, once for each size.
"""

import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import torch
from torch import Tensor

# Beyond some 100 rows the products, not the weights, take the time, and padding costs as much as rows do: finer steps.
DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

log = logging.getLogger("text_generation_server")

Signal = Callable[[], None]
Forward = Callable[[Signal], Tensor]


class Recording(Protocol):
    """Work of the device that can be done again, on the same addresses."""

    output: Tensor

    def replay(self) -> None: ...


class Graphs(Protocol):
    """How decode steps are run; see `DecodeGraphs`, or on CPUs `kernels.cpu.programs`."""

    def size(self, rows: int) -> int: ...

    def run(self, size: int, forward: Forward, on_layer: Signal) -> Tensor: ...

    def clear(self) -> None: ...


class CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """Records on the current stream. All graphs share their memory: they run one after the other, and what one leaves
    behind is read before the next one runs."""

    def __init__(self) -> None:
        # Memory can be shared with a graph that lives; a pool that all graphs have left is gone.
        self._newest: weakref.ref[torch.cuda.CUDAGraph] | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []  # torch's allocator may still ask what they were recording

    def __call__(self, run: Callable[[], Tensor]) -> CudaRecording:
        newest = self._newest() if self._newest else None
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for events meanwhile, NCCL's watchdog among them.
        graph.capture_begin(pool=newest.pool() if newest else None, capture_error_mode="thread_local")
        try:
            output = run()
        except BaseException:
            self._broken.append(graph)
            with suppress(RuntimeError):  # what went wrong first is what is worth telling
                graph.capture_end()
            raise
        graph.capture_end()
        self._newest = weakref.ref(graph)
        return CudaRecording(graph, output)


class DecodeGraphs:
    """`forward` always reads the same addresses, and writes to them; it is told whom to send signs of life to.

    Whether a collective is part of a graph has to be the same on all ranks: `agree` tells whether a recording came
    about on all of them.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        record: Callable[[Callable[[], Tensor]], Recording],
        agree: Callable[[bool], bool] = bool,
        announce: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._sizes = sorted(set(sizes))
        self._record = record
        self._agree = agree
        self._announce = announce
        self._recordings: dict[int, Recording] = {}
        self._gave_up = False

    def size(self, rows: int) -> int:
        """To how many a step of so many rows is padded: no graph is large enough for more than the largest."""
        i = bisect_left(self._sizes, rows)
        return self._sizes[i] if i < len(self._sizes) else rows

    def run(self, size: int, forward: Forward, on_layer: Signal) -> Tensor:
        """What `forward` returns for so many rows; good until the next run."""
        if recording := self._recordings.get(size):
            recording.replay()
            on_layer()
            return recording.output
        if self._gave_up or size not in self._sizes:
            return forward(on_layer)
        with self._announce():
            output = forward(on_layer)
            self._record_size(size, lambda: forward(on_layer))
        return output

    def clear(self) -> None:
        """The addresses are no longer good."""
        self._recordings.clear()
        self._gave_up = False

    def _record_size(self, size: int, run: Callable[[], Tensor]) -> None:
        reason, recording = "another rank could not record it", None
        try:
            recording = self._record(run)
        except RuntimeError as error:  # torch's own for all that goes wrong on a device, memory that is missing too
            reason = str(error).partition("\n")[0]
        if self._agree(recording is not None) and recording is not None:
            self._recordings[size] = recording
            return
        self._gave_up = True
        log.warning("no CUDA graph for %d rows, steps run without one and slower from here on: %s", size, reason)


def no_graphs() -> DecodeGraphs:
    return DecodeGraphs((), CudaRecorder())
