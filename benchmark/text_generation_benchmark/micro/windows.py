"""Attention of a layer with a window, at several contexts: whether its time follows the window or the context.

One layer of the shape m1b, in bfloat16, on this machine's compiled kernels. A decode step has one query for each row,
at the last position of the context; a chunk is 512 tokens of one prompt, which begins where the context ends. For every
context, keys and values before the window are NaN and lie in slots of their own, and those in the window lie in the
same slots. So all contexts read the same memory, unless a kernel reads what lies before the window.
"""

import time
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from text_generation_benchmark.shapes import SHAPES, LlamaShape
from text_generation_server.device.arena import empty
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.library import Library, choose_target
from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments

WINDOW = 1024
CHUNK = 512
# The window of the third context begins in the middle of a tile of keys, the others with a tile.
CONTEXTS = (1024, 8192, 8192 + 32, 32768)
ROUNDS = 100
CPU = torch.device("cpu")
NO_ROWS = torch.empty(0, dtype=torch.int32)
Attend = Callable[[], Tensor]


class WindowedLayer:
    """Keys and values of `rows` rows: in their windows random numbers, before them NaN."""

    def __init__(self, shape: LlamaShape, rows: int, window: int, chunk: int, longest: int) -> None:
        self._shape = shape
        self._rows = rows
        self._window = window
        self._chunk = chunk
        self._each = window + chunk  # slots of each row that some query sees
        size = (rows * (self._each + longest) + 1, 2 * shape.kv_heads, shape.head_size)
        heads = empty(size, torch.bfloat16, CPU)
        heads[: rows * self._each].normal_(generator=torch.Generator().manual_seed(0))
        heads[rows * self._each :] = torch.nan
        self.kv = KvLayer(heads)
        self.options = AttentionOptions(shape.head_size**-0.5, window=window)

    def table(self, first_seen: int, end: int) -> Tensor:
        """The slots of each row's positions 0 … end - 1, of which those from `first_seen` on are not NaN."""
        longest = (len(self.kv.heads) - 1) // self._rows - self._each
        slots = torch.empty((self._rows, end), dtype=torch.int32)
        for row in range(self._rows):
            hidden = self._rows * self._each + row * longest
            slots[row, :first_seen] = torch.arange(hidden, hidden + first_seen)
            slots[row, first_seen:] = torch.arange(end - first_seen) + row * self._each
        return slots

    def queries(self, count: int) -> Tensor:
        size = (count, self._shape.heads, self._shape.head_size)
        return torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16()

    def decode(self, kernels: CpuKernels, context: int) -> Attend:
        """One query of each row, at the last of `context` positions."""
        q_THD, slots = self.queries(self._rows), self.table(max(0, context - self._window), context)
        rows = torch.arange(self._rows, dtype=torch.int32)
        lengths = torch.full((self._rows,), context, dtype=torch.int32)
        return lambda: kernels.attend(q_THD, self.kv, slots, rows, lengths, None, self.options)

    def chunk(self, kernels: CpuKernels, context: int) -> Attend:
        """A chunk of the first row's prompt, at the positions from `context` on."""
        q_THD = self.queries(self._chunk)
        slots = self.table(max(0, context - self._window + 1), context + self._chunk)
        row, start = torch.tensor([0], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
        run = Segments(row, start, torch.tensor([0, self._chunk], dtype=torch.int32), self._chunk)
        return lambda: kernels.attend(q_THD, self.kv, slots, NO_ROWS, NO_ROWS, run, self.options)


def in_turns(attends: dict[int, Attend], rounds: int) -> dict[str, list[float]]:
    """Each round measures all contexts, in an order drawn by a seed. RuntimeError if a result is not finite, as it is
    when a key or value before the window has been read."""
    for context, attend in attends.items():
        if not bool(attend().isfinite().all()):
            raise RuntimeError(f"attention at {context} tokens: a result is not finite")
    seconds: dict[int, list[float]] = {context: [] for context in attends}
    order, random = list(attends), Random(0)
    for _ in range(rounds):
        random.shuffle(order)
        for context in order:
            started = time.perf_counter()
            attends[context]()
            seconds[context].append(time.perf_counter() - started)
    return {f"{context:,} tokens": times for context, times in seconds.items()}


def decode(
    rows: int = 16, window: int = WINDOW, contexts: tuple[int, ...] = CONTEXTS, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """A decode step at each context. RuntimeError if no kernels were compiled."""
    kernels, layer = compiled_kernels(), WindowedLayer(SHAPES["m1b"], rows, window, CHUNK, max(contexts))
    return in_turns({context: layer.decode(kernels, context) for context in contexts}, rounds)


def chunk(
    tokens: int = CHUNK, window: int = WINDOW, contexts: tuple[int, ...] = CONTEXTS, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """A chunk of a prompt at each context. RuntimeError if no kernels were compiled."""
    kernels, layer = compiled_kernels(), WindowedLayer(SHAPES["m1b"], 1, window, tokens, max(contexts))
    return in_turns({context: layer.chunk(kernels, context) for context in contexts}, rounds)


def compiled_kernels() -> CpuKernels:
    choice = choose_target()
    if choice.target is None:
        raise RuntimeError(f"no kernels to measure: {choice.reason}")
    return CpuKernels(Library(choice.target), torch.get_num_threads())
