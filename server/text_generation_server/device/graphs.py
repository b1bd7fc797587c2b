"""CUDA graphs of steps, recorded at warm-up and then replayed.

Each graph has one size: its number of rows or, in steps with prompt chunks, of tokens. A step is padded to the next
larger size. All sizes that the load may need are recorded at warm-up, when no step is in flight: that takes some tenths
of a second for each size, for which a server under load would answer no request. A step of a size that is not recorded
runs without a graph.
"""

import gc
import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

# From about 100 rows on, arithmetic takes more time in a step than reading the weights, so a row of padding costs as
# much as any row. There the sizes are closer together, relative to the number of rows.
DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)

# Tokens of steps with prompt chunks. Few sizes, since each is recorded at warm-up; a step of other sizes runs without a
# graph, which costs little where the device takes longer than the host: from about 200 tokens of an 8B model on.
MIXED_SIZES = (16, 64, 128, 192, 256, 384, 512)

logger = logging.getLogger("text_generation_server")

Signal = Callable[[], None]
Forward = Callable[[Signal], Tensor]
Head = Callable[[Tensor], Tensor | None]


class Recording(Protocol):
    """Recorded work of the device, which can be replayed on the same addresses."""

    output: Tensor

    def replay(self) -> None: ...


class Graphs(Protocol):
    """Runs decode steps: `DecodeGraphs` on GPUs, `kernels.cpu.programs` on CPUs."""

    def size(self, rows: int) -> int:
        """Number of rows to which a step of `rows` rows is padded."""
        ...

    def sizes_to_record(self, rows: int) -> Sequence[int]:
        """Sizes that a warm-up records, where a step has at most `rows` rows."""
        ...

    def record_with_head(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> None: ...

    def run_with_head(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> Tensor | None:
        """What `head` makes of the output of `forward` for `size` rows. Valid until the next run."""
        ...

    def clear(self) -> None: ...


class CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """Records CUDA graphs on the current stream. All graphs share one memory pool. This is possible because they run
    one after the other, and the output of a graph is read before the next graph runs.
    """

    def __init__(self) -> None:
        # A new graph shares the pool of the newest graph that is alive. The pool is freed with its last graph.
        self._newest: weakref.ref[torch.cuda.CUDAGraph] | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []  # kept: torch's allocator may still refer to a broken graph

    def __call__(self, run: Callable[[], Tensor]) -> CudaRecording:
        newest = self._newest() if self._newest else None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Pinned memory that is freed during the capture would get an event on the captured stream, and torch fails when
        # it asks for this event later. So no step is in flight, and no garbage is collected, in any thread.
        with _without_garbage_collection():
            # "thread_local" because other threads, such as NCCL's watchdog, wait for events during the capture.
            graph.capture_begin(pool=newest.pool() if newest else None, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                self._broken.append(graph)
                # The exception of `run` is raised, not the later exception that it causes here.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._newest = weakref.ref(graph)
        return CudaRecording(graph, output)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class DecodeGraphs:
    """Graphs of steps by their size: the rows of decode steps or, in a second object, the tokens of steps with chunks.

    Runs `forward`, which always reads and writes the same addresses, and which calls its argument after each layer
    to show that it makes progress.

    All ranks must replay a graph, or all must run without one, because collectives are part of graphs: `agree` returns
    whether a recording succeeded on all ranks.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        record: Callable[[Callable[[], Tensor]], Recording],
        agree: Callable[[bool], bool] = bool,
        unit: str = "rows",
    ) -> None:
        self._sizes = sorted(set(sizes))
        self._unit = unit
        self._record = record
        self._agree = agree
        self._recordings: dict[int, Recording] = {}

    @property
    def sizes(self) -> list[int]:
        """All sizes, the largest first."""
        return self._sizes[::-1]

    def is_recorded(self, size: int) -> bool:
        return size in self._recordings

    def size(self, rows: int) -> int:
        """Number of rows to which a step of `rows` rows is padded: the next size, or `rows` above the largest size."""
        i = bisect_left(self._sizes, rows)
        return self._sizes[i] if i < len(self._sizes) else rows

    def sizes_to_record(self, rows: int) -> list[int]:
        """The sizes that steps of up to `rows` rows are padded to, or 1 where nothing is recorded. The largest size
        comes first: graphs share their memory, and smaller graphs fit into what the largest graph needs."""
        most = self.size(rows)
        return [size for size in reversed(self._sizes) if size <= most] or [1]

    def record(self, size: int, forward: Forward, on_layer: Signal) -> None:
        """Runs `forward` for `size` rows, which compiles its kernels, and records it if `size` is one of the sizes. No
        step may be in flight."""
        forward(on_layer)
        if size in self._sizes:
            self._record_size(size, lambda: forward(on_layer))

    def run(self, size: int, forward: Forward, on_layer: Signal) -> Tensor:
        """Output of `forward` for `size` rows. Valid until the next run."""
        if recording := self._recordings.get(size):
            recording.replay()
            on_layer()
            return recording.output
        return forward(on_layer)

    def record_with_head(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> None:
        """Records `forward` alone."""
        self.record(size, forward, on_layer)

    def run_with_head(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> Tensor | None:
        return head(self.run(size, forward, on_layer))

    def clear(self) -> None:
        """Drops all graphs. To be called when the addresses that they use have become invalid."""
        self._recordings.clear()

    def _record_size(self, size: int, run: Callable[[], Tensor]) -> None:
        reason, recording = "another rank could not record it", None
        try:
            recording = self._record(run)
        except RuntimeError as error:  # torch raises RuntimeError for all failures of a device, lack of memory included
            reason = str(error).partition("\n")[0]
        if self._agree(recording is not None) and recording is not None:
            self._recordings[size] = recording
        else:
            logger.warning(
                "no CUDA graph for %d %s, whose steps run without one and slower: %s", size, self._unit, reason
            )


def no_graphs() -> DecodeGraphs:
    return DecodeGraphs((), CudaRecorder())
