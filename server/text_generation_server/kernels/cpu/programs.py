"""Decode steps as programs: lists of kernel calls, which all threads make without Python in between. Programs do on
CPUs what CUDA graphs do on GPUs.

The first step of each number of rows runs from Python and is recorded as a program. In the program, tensors lie in an
arena that all programs share; two tensors of a step share bytes if they are not in use at the same time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_server.device.arena import empty
from text_generation_server.device.graphs import Forward, Head, Signal
from text_generation_server.kernels.cpu.build import KERNELS, POINTER
from text_generation_server.kernels.cpu.library import Call, Library, Word

logger = logging.getLogger("text_generation_server")

# Layers that a program computes before it returns to Python to report progress. A return costs about 50 µs.
LAYERS_AT_ONCE = 8
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """An address in a tensor that the recorded step made."""

    tensor: int  # number of the tensor, in the order in which the step made them
    offset: int  # bytes from the tensor's start


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call. Tensors that the step made get other addresses in a program, so their addresses are kept as
    TensorAddress.
    """

    kernel: str
    arguments: dict[str, Word | TensorAddress]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernel calls of a step.

    While it records, torch may only allocate and view tensors: any other operation would be missing from the program,
    so it is noted in `missed`. Recorded tensors are not kept alive, so an address stands for the tensor allocated there
    last.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []
        self.sizes: list[int] = []  # bytes of each tensor that was made
        self.ends_of_layers: list[int] = []  # number of calls recorded at the end of each layer
        self.missed: str | None = None  # a torch operation that a program cannot repeat
        self._newest: dict[int, int] = {}  # number of the tensor that was made last at each address

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch. True would import torch's compiler at the first recording, which takes a second and is never
        used."""
        return False

    def on_call(self, call: Call) -> None:
        codes = KERNELS[call.kernel]
        arguments = {
            name: self.address_in_step(int(word)) or word if codes[name] == POINTER else word
            for name, word in call.arguments.items()
        }
        self.calls.append(RecordedCall(call.kernel, arguments))

    def layer_ended(self) -> None:
        self.ends_of_layers.append(len(self.calls))

    def address_in_step(self, address: int) -> TensorAddress | None:
        """The address as part of a tensor of the step, or None if the memory there existed before the step."""
        for start, tensor in self._newest.items():
            if start <= address < start + self.sizes[tensor]:
                return TensorAddress(tensor, address - start)
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
    """Whether a view lies in its argument's memory. torch also counts `contiguous`, which may copy, as a view."""
    views = result if isinstance(result, (list, tuple)) else [result]
    memory = argument.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == memory for view in views)


@dataclass(frozen=True, slots=True)
class Program:
    packed: tuple[bytes, ...]  # groups of calls, each of some layers; progress is reported after each group
    output: Tensor  # a view of the arena, which keeps the arena alive
    has_head: bool  # whether the output is what the head has made


class DecodePrograms:
    """Runs decode steps on CPUs, in place of `graphs.DecodeGraphs`. Rows are not padded: each number of rows has a
    program of its own, since recording a program costs no more than the step. `forward` must read its inputs from the
    same addresses each time.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._programs: dict[int, Program] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._gave_up = False

    def size(self, rows: int) -> int:
        return rows

    def sizes_to_record(self, rows: int) -> Sequence[int]:
        """One row: programs of other sizes are recorded at their first step, which costs no more than the step."""
        return (1,)

    def record_with_head(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> None:
        self.run_with_head(size, forward, head, on_layer)

    def run_with_head(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> Tensor | None:
        """What `head` makes of the output of `forward` for `size` rows. Valid until the next run."""
        if program := self._programs.get(size):
            for packed in program.packed:
                self._library.run(packed, self._threads)
                on_layer()
            return program.output if program.has_head else head(program.output)
        return head(forward(on_layer)) if self._gave_up else self._record(size, forward, head, on_layer)

    def clear(self) -> None:
        """Drops all programs. To be called when the addresses that they read have become invalid."""
        self._programs.clear()
        self._gave_up = False

    def _record(self, size: int, forward: Forward, head: Head, on_layer: Signal) -> Tensor | None:
        recorder = Recorder()

        def layer_ended() -> None:
            recorder.layer_ended()
            on_layer()

        self._library.observer = recorder
        try:
            with recorder:
                hidden = forward(layer_ended)
                calls, missed = len(recorder.calls), recorder.missed
                made_at = recorder.address_in_step(hidden.data_ptr())
                logits = head(hidden)
        finally:
            self._library.observer = None
        if missed is not None or made_at is None:
            self._gave_up = True
            logger.info("decode steps run kernel by kernel: %s is not one of ours", missed or "their result")
            return logits
        output, has_head = hidden, False
        if logits is not None and recorder.missed is None and logits.is_contiguous():
            logits_at = recorder.address_in_step(logits.data_ptr())
            if logits_at is not None:
                output, has_head, made_at, calls = logits, True, logits_at, len(recorder.calls)
        self._programs[size] = self._program(recorder, calls, output, made_at, has_head)
        return logits

    def _program(
        self, recorder: Recorder, count: int, output: Tensor, made_at: TensorAddress, has_head: bool
    ) -> Program:
        """The program of the first `count` recorded calls."""
        recorded = recorder.calls[:count]
        offsets, size = plan(recorded, recorder.sizes, made_at.tensor)
        if size > len(self._arena):
            # Older programs keep the smaller arena alive, so it grows in large steps.
            self._arena = empty((2 * size,), torch.uint8, torch.device("cpu"))
        # An arena smaller than a huge page may begin at any address.
        base = -self._arena.data_ptr() % ALIGNMENT

        def in_arena(address: TensorAddress) -> int:
            return self._arena.data_ptr() + base + offsets[address.tensor] + address.offset

        calls = [
            Call(
                call.kernel, {n: in_arena(w) if isinstance(w, TensorAddress) else w for n, w in call.arguments.items()}
            )
            for call in recorded
        ]
        cuts = [*recorder.ends_of_layers[LAYERS_AT_ONCE - 1 : -1 : LAYERS_AT_ONCE], len(calls)]
        packed = [self._library.pack(calls[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
        first = in_arena(made_at) - self._arena.data_ptr()
        there = self._arena[first : first + output.nbytes].view(output.dtype).view(output.shape)
        return Program(tuple(packed), there, has_head)


def plan(calls: Sequence[RecordedCall], sizes: Sequence[int], output: int) -> tuple[dict[int, int], int]:
    """Offsets of the tensors in an arena, and the arena's size, in bytes. A tensor may get the bytes of another tensor
    that no later call uses. The output counts as used until the end."""
    uses: dict[int, tuple[int, int]] = {}  # first and last call that use each tensor
    for number, call in enumerate(calls):
        for word in call.arguments.values():
            if isinstance(word, TensorAddress):
                uses[word.tensor] = (uses.get(word.tensor, (number,))[0], number)
    uses[output] = (uses.get(output, (0,))[0], len(calls))
    rounded = {tensor: -(-sizes[tensor] // ALIGNMENT) * ALIGNMENT for tensor in uses}
    offsets: dict[int, int] = {}
    for tensor, (first, _) in sorted(uses.items(), key=lambda use: use[1]):
        beside = [(offsets[other], rounded[other]) for other in offsets if uses[other][1] >= first]
        offsets[tensor] = _first_gap(rounded[tensor], beside)
    return offsets, max(offsets[tensor] + rounded[tensor] for tensor in uses) + ALIGNMENT


def _first_gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """The lowest offset at which `size` bytes overlap no taken (offset, size)."""
    offset = 0
    for start, length in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset
