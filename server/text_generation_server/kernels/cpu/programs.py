"""Decode steps as programs: the kernels' calls of a step, recorded once for each number of rows, and made again by all
threads without Python in between, which is to a CPU what a CUDA graph is to a GPU.

A step is recorded while it runs for the first time. Its tensors then move into an arena that all programs share, each
only for as long as it is used.
"""

import logging
from bisect import bisect_right
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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the calls of a step, and what torch does beside them.

    That may be making tensors and looking at them in another way; all else would be missing from a program.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.tensors: list[Tensor] = []  # made during the step
        self.ends_of_layers: list[int] = []  # numbers of calls
        self.missed: str | None = None  # what no program could do again

    def heard(self, call: Call) -> None:
        self.calls.append(call)

    def layer_ended(self) -> None:
        self.ends_of_layers.append(len(self.calls))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like):
            self.tensors.append(result)
        elif not func.is_view:
            self.missed = self.missed or func.name()
        return result


@dataclass(frozen=True, slots=True)
class Program:
    """`ends_of_layers` are numbers of calls; `output` lies in the arena, which it keeps alive."""

    calls: tuple[Call, ...]
    packed: tuple[bytes, ...]  # to be run one after the other, with a sign of life after each
    output: Tensor


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
        if recorder.missed is None:
            self._programs[size] = self._program(recorder, output)
        else:
            self._gave_up = True
            log.info("decode steps run kernel by kernel: %s is not one of ours", recorder.missed)
        return output

    def _program(self, recorder: Recorder, output: Tensor) -> Program:
        moves = plan(recorder.calls, recorder.tensors, output)
        if moves.size > len(self._arena):
            # The programs before this one keep the smaller arena, so it grows in large steps.
            self._arena = empty((2 * moves.size,), torch.uint8, torch.device("cpu"))
        base = -self._arena.data_ptr() % ALIGNMENT
        calls = [Call(c.kernel, moves.applied(c, self._arena.data_ptr() + base)) for c in recorder.calls]
        cuts = [*recorder.ends_of_layers[LAYERS_AT_ONCE - 1 : -1 : LAYERS_AT_ONCE], len(calls)]
        packed = [self._library.pack(calls[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        offset = base + moves.offset(output.data_ptr())
        place = self._arena[offset : offset + output.nbytes].view(output.dtype)
        return Program(tuple(calls), tuple(packed), place.view(output.shape))


class Moves:
    """Where tensors go: from addresses to offsets in an arena of `size` bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sized = sorted((t.data_ptr(), t.nbytes) for t in tensors if t.nbytes)
        self._starts = [start for start, _ in sized]
        self._sizes = [-(-size // ALIGNMENT) * ALIGNMENT for _, size in sized]
        self._offsets = [0] * len(sized)
        self.size = 0

    def which(self, address: int) -> int | None:
        i = bisect_right(self._starts, address) - 1
        return i if i >= 0 and address < self._starts[i] + self._sizes[i] else None

    def offset(self, address: int) -> int:
        i = self.which(address)
        if i is None:
            raise ValueError("the step returned a tensor that was not made in it")
        return self._offsets[i] + address - self._starts[i]

    def put(self, tensor: int, beside: Sequence[int]) -> None:
        """Into the first gap between the tensors that are in use at the same time."""
        offset = 0
        for start, size in sorted((self._offsets[other], self._sizes[other]) for other in beside):
            if offset + self._sizes[tensor] <= start:
                break
            offset = max(offset, start + size)
        self._offsets[tensor] = offset
        self.size = max(self.size, offset + self._sizes[tensor])

    def applied(self, call: Call, base: int) -> tuple[Word, ...]:
        return tuple(
            base + self.offset(int(word)) if kind == POINTER and self.which(int(word)) is not None else word
            for kind, word in zip(WORDS[call.kernel], call.words, strict=True)
        )


def plan(calls: Sequence[Call], tensors: Sequence[Tensor], output: Tensor) -> Moves:
    """Tensors lie where others were that no later call uses. The output is used until the end."""
    moves = Moves(tensors)
    uses: dict[int, tuple[int, int]] = {}  # the first call and the last
    for number, call in enumerate(calls):
        for kind, word in zip(WORDS[call.kernel], call.words, strict=True):
            if kind == POINTER and (tensor := moves.which(int(word))) is not None:
                uses[tensor] = (uses.get(tensor, (number,))[0], number)
    made = moves.which(output.data_ptr())
    if made is not None:
        uses[made] = (uses[made][0], len(calls))
    placed: list[int] = []
    for tensor, (first, _) in uses.items():
        moves.put(tensor, [other for other in placed if uses[other][1] >= first])
        placed.append(tensor)
    return moves
