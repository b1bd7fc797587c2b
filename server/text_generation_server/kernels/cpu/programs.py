"""Decode steps as programs: lists of kernel calls, which all threads make without Python in between. On CPUs they are
what CUDA graphs are on GPUs.

The first step of each number of rows runs from Python and is recorded. In the program made of it, tensors lie in an
arena that all programs share; two tensors of a step share bytes if they are not in use at the same time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_server.device.arena import empty
from text_generation_server.kernels.cpu.build import KERNELS, POINTER
from text_generation_server.kernels.cpu.library import Call, Library, Word

log = logging.getLogger("text_generation_server")

Signal = Callable[[], None]

# Between two returns to Python, for a sign of life, a program computes this many layers: a return costs some 50 µs.
LAYERS_AT_ONCE = 8
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """An address in a tensor that the recorded step made."""

    tensor: int  # its number, in the order in which they were made
    offset: int  # bytes from its start


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call, with places instead of the addresses of tensors that the step made: they lie elsewhere in the program."""

    kernel: str
    arguments: dict[str, Word | Place]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernel calls of a step.

    Meanwhile torch may only allocate and view tensors: any other operation would be missing from the program, so it is
    noted in `missed`. Recorded tensors are not kept alive, so an address stands for the tensor allocated there last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []
        self.sizes: list[int] = []  # bytes of each tensor that was made
        self.ends_of_layers: list[int] = []  # how many calls had been recorded at the end of each layer
        self.missed: str | None = None  # an operation of torch that a program cannot repeat
        self._newest: dict[int, int] = {}  # address to number of the tensor that was made there last

    def heard(self, call: Call) -> None:
        codes = KERNELS[call.kernel]
        placed = {
            name: self.place(int(word)) or word if codes[name] == POINTER else word
            for name, word in call.arguments.items()
        }
        self.calls.append(RecordedCall(call.kernel, placed))

    def layer_ended(self) -> None:
        self.ends_of_layers.append(len(self.calls))

    def place(self, address: int) -> Place | None:
        """None where no tensor of the step is at this address: what is there existed before."""
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
    """Whether a view is one: torch also calls `contiguous` a view, which may copy."""
    views = result if isinstance(result, (list, tuple)) else [result]
    memory = argument.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == memory for view in views)


@dataclass(frozen=True, slots=True)
class Program:
    packed: tuple[bytes, ...]  # calls of some layers each; a sign of life follows each
    output: Tensor  # lies in the arena and keeps it alive


class DecodePrograms:
    """Takes the place of `graphs.DecodeGraphs` on CPUs. Rows are not padded: each number of rows has a program of its
    own, since recording one costs no more than the step. `forward` must read its inputs from the same addresses each
    time."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._programs: dict[int, Program] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._gave_up = False

    def size(self, rows: int) -> int:
        return rows

    def run(self, size: int, forward: Callable[[Signal], Tensor], on_layer: Signal) -> Tensor:
        """What `forward` returns for `size` rows; valid until the next run."""
        if program := self._programs.get(size):
            for packed in program.packed:
                self._library.run(packed, self._threads)
                on_layer()
            return program.output
        return forward(on_layer) if self._gave_up else self._record(size, forward, on_layer)

    def clear(self) -> None:
        """Forgets all programs: the addresses that they read are no longer valid."""
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
            # Older programs keep the smaller arena alive, so it grows in large steps.
            self._arena = empty((2 * size,), torch.uint8, torch.device("cpu"))
        # An arena smaller than a huge page may begin at any address.
        base = -self._arena.data_ptr() % ALIGNMENT

        def address(place: Place) -> int:
            return self._arena.data_ptr() + base + offsets[place.tensor] + place.offset

        calls = [
            Call(call.kernel, {n: address(w) if isinstance(w, Place) else w for n, w in call.arguments.items()})
            for call in recorder.calls
        ]
        cuts = [*recorder.ends_of_layers[LAYERS_AT_ONCE - 1 : -1 : LAYERS_AT_ONCE], len(calls)]
        packed = [self._library.pack(calls[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        first = address(made_as) - self._arena.data_ptr()
        there = self._arena[first : first + output.nbytes].view(output.dtype).view(output.shape)
        return Program(tuple(packed), there)


def plan(calls: Sequence[RecordedCall], sizes: Sequence[int], output: int) -> tuple[dict[int, int], int]:
    """Offsets of the tensors in an arena, and the arena's size, in bytes. A tensor may get bytes of another one that no
    later call uses. The output counts as used until the end."""
    uses: dict[int, tuple[int, int]] = {}  # tensor to its first and its last call
    for number, call in enumerate(calls):
        for word in call.arguments.values():
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
    """The lowest offset of `size` bytes that overlap none of the taken (offset, size)."""
    offset = 0
    for start, length in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset
