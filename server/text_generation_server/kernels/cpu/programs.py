"""Decode steps as programs: the kernels' calls of a step, recorded once for each number of rows, and made again by all
threads without Python in between, which is to a CPU what a CUDA graph is to a GPU.

A step is recorded while it runs for the first time. Its tensors then move into an arena that all programs share, each
only for as long as it is used.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_server.arena import empty
from text_generation_server.kernels.cpu.library import POINTER, WORDS, Call, Library, Word

log = logging.getLogger("text_generation_server")

Signal = Callable[[], None]

# Layers between two signs of life: a call from Python costs some 50 µs.
LAYERS_AT_ONCE = 8
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes from the start of the so-many-th tensor that the step made."""

    tensor: int
    offset: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call, with places instead of the addresses that will be others."""

    kernel: str
    words: tuple[Word | Place, ...]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the calls of a step, and what torch does beside them.

    That may be making tensors and looking at them in another way; all else would be missing from a program. No tensor
    is kept: where one lay, the next one may lie.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []
        self.sizes: list[int] = []  # bytes of the tensors that were made
        self.ends_of_layers: list[int] = []  # numbers of calls
        self.missed: str | None = None  # what no program could do again
        self._newest: dict[int, int] = {}  # by address, the tensor that was made there last

    def heard(self, call: Call) -> None:
        words = zip(WORDS[call.kernel], call.words, strict=True)
        placed = (self.place(int(word)) or word if kind == POINTER else word for kind, word in words)
        self.calls.append(RecordedCall(call.kernel, tuple(placed)))

    def layer_ended(self) -> None:
        self.ends_of_layers.append(len(self.calls))

    def place(self, address: int) -> Place | None:
        """None: it was there before the step."""
        for start, tensor in self._newest.items():
            if start <= address < start + self.sizes[tensor]:
                return Place(tensor, address - start)
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like):
            self._made(result)
        elif not (func.is_view and _share_memory(result, args[0])):
            self.missed = self.missed or func.name()
        return result

    def _made(self, tensor: Tensor) -> None:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        gone = [at for at, old in self._newest.items() if at < end and start < at + self.sizes[old]]
        for at in gone:
            del self._newest[at]
        self._newest[start] = len(self.sizes)
        self.sizes.append(tensor.nbytes)


def _share_memory(result: Any, argument: Tensor) -> bool:
    """What torch calls a view may be a copy, such as that of `contiguous`."""
    views = result if isinstance(result, (list, tuple)) else [result]
    memory = argument.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == memory for view in views)


@dataclass(frozen=True, slots=True)
class Program:
    packed: tuple[bytes, ...]  # to be run one after the other, with a sign of life after each
    output: Tensor  # in the arena, which it keeps alive


class DecodePrograms:
    """Takes the place of `graphs.DecodeGraphs` on CPUs: no padding, since a program of any size costs nothing to make.
    `forward` always reads the same addresses."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._programs: dict[int, Program] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._gave_up = False

    def size(self, rows: int) -> int:
        return rows

    def run(self, size: int, forward: Callable[[Signal], Tensor], on_layer: Signal) -> Tensor:
        """What `forward` returns for so many rows; good until the next run."""
        if program := self._programs.get(size):
            for packed in program.packed:
                self._library.run(packed, self._threads)
                on_layer()
            return program.output
        return forward(on_layer) if self._gave_up else self._record(size, forward, on_layer)

    def clear(self) -> None:
        """The addresses are no longer good."""
        self._programs.clear()
        self._gave_up = False

    def _record(self, size: int, forward: Callable[[Signal], Tensor], on_layer: Signal) -> Tensor:
        recorder = Recorder()

        def layer_ended() -> None:
            recorder.layer_ended()
            on_layer()

        self._library.listener = recorder
        try:
            with recorder:
                output = forward(layer_ended)
        finally:
            self._library.listener = None
        place = recorder.place(output.data_ptr())
        if recorder.missed is None and place is not None:
            self._programs[size] = self._program(recorder, output, place)
        else:
            self._gave_up = True
            log.info("decode steps run kernel by kernel: %s is not one of ours", recorder.missed or "their result")
        return output

    def _program(self, recorder: Recorder, output: Tensor, made_as: Place) -> Program:
        offsets, size = plan(recorder.calls, recorder.sizes, made_as.tensor)
        if size > len(self._arena):
            # The programs before this one keep the smaller arena, so it grows in large steps.
            self._arena = empty((2 * size,), torch.uint8, torch.device("cpu"))
        # Smaller ones than a huge page begin anywhere.
        base = -self._arena.data_ptr() % ALIGNMENT

        def address(place: Place) -> int:
            return self._arena.data_ptr() + base + offsets[place.tensor] + place.offset

        calls = [
            Call(call.kernel, tuple(address(word) if isinstance(word, Place) else word for word in call.words))
            for call in recorder.calls
        ]
        cuts = [*recorder.ends_of_layers[LAYERS_AT_ONCE - 1 : -1 : LAYERS_AT_ONCE], len(calls)]
        packed = [self._library.pack(calls[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        first = address(made_as) - self._arena.data_ptr()
        there = self._arena[first : first + output.nbytes].view(output.dtype).view(output.shape)
        return Program(tuple(packed), there)


def plan(calls: Sequence[RecordedCall], sizes: Sequence[int], output: int) -> tuple[dict[int, int], int]:
    """Offsets of the tensors in an arena, and its size, in bytes: a tensor may lie where others were that no later call
    uses. The output is used until the end."""
    uses: dict[int, tuple[int, int]] = {}  # the first call and the last
    for number, call in enumerate(calls):
        for word in call.words:
            if isinstance(word, Place):
                uses[word.tensor] = (uses.get(word.tensor, (number,))[0], number)
    uses[output] = (uses.get(output, (0,))[0], len(calls))
    rounded = {tensor: -(-sizes[tensor] // ALIGNMENT) * ALIGNMENT for tensor in uses}
    offsets: dict[int, int] = {}
    for tensor, (first, _) in sorted(uses.items(), key=lambda use: use[1]):
        beside = [(offsets[other], rounded[other]) for other in offsets if uses[other][1] >= first]
        offsets[tensor] = _first_gap(rounded[tensor], beside)
    return offsets, max(offsets[tensor] + rounded[tensor] for tensor in uses) + ALIGNMENT


def _first_gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """The lowest offset with so many bytes that none of the (offset, size) reach into."""
    offset = 0
    for start, length in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset
