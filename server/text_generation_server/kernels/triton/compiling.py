"""Compiles attention for a GPU that need not be there, by calling the kernels' own launchers on CPU tensors.

Triton keeps what is compiled in its cache on disk, where a process that has such a GPU finds it. Triton's interpreter
must be off.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments
from text_generation_server.kernels.triton.attend_decode import attend_decode_tiled
from text_generation_server.kernels.triton.attend_prefill import attend_prefill_tiled
from text_generation_server.kernels.triton.sass import NO_CODE, MachineCode, read_code
from text_generation_server.kernels.triton.tuning import Tile

# Bytes of shared memory that a program may use, by compute capability, of which 90 stands for 9.0: CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability".
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    120: 99 << 10,
}
TABLE_WIDTH = 8192  # tokens that a row can have
WINDOW = 1024
# The options of attention that a layer of a served model uses together. Each makes a kernel of its own.
SERVED_OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("window",),  # Mistral, Qwen, Phi-3, StarCoder2, SmolLM3, Cohere2, Mixtral
    ("slopes_H",),  # BLOOM, MPT, Falcon RW
    ("softcap",),  # Gemma 2
    ("softcap", "window"),
    ("sinks_H",),  # gpt-oss
    ("sinks_H", "window"),
)


class AbsentGpu:
    """Triton's driver for a GPU of the given capability, 90 for 9.0, that kernels are compiled for and never run on."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Within the context every launch of a kernel compiles it, and adds it to the list, instead of running it."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(kernel)
        return kernel

    driver.set_active(AbsentGpu(capability))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver.set_active(None)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention's kernels are compiled for, besides their tile."""

    capability: int
    dtype: torch.dtype  # type of the queries
    cache: torch.dtype
    group: int
    head_size: int
    kv_heads: int = 2
    options: tuple[str, ...] = ()  # the fields of AttentionOptions that are set

    @property
    def attention_options(self) -> AttentionOptions:
        heads = torch.zeros(self.group * self.kv_heads)
        values: dict[str, Any] = {"softcap": 30.0, "slopes_H": heads, "sinks_H": heads, "window": WINDOW}
        return AttentionOptions(1.0, **{name: values[name] for name in self.options})


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shape: AttentionShape
    tile: Tile
    shared: int = 0  # bytes of a program
    code: MachineCode = NO_CODE
    error: str = ""  # why the compiler refused


def compile_attention(kernel: str, shape: AttentionShape, tile: Tile) -> Compiled:
    """attend_decode's second kernel, which merges splits, is compiled too, and not in the result."""
    try:
        with compiling_for(shape.capability) as kernels:
            {"attend_decode": _decode, "attend_prefill": _prefill}[kernel](shape, tile)
    except (TritonError, RuntimeError) as error:
        return Compiled(kernel, shape, tile, error=f"not compiled: {type(error).__name__}: {str(error)[:200]}")
    first = kernels[0]
    return Compiled(kernel, shape, tile, first.metadata.shared, read_code(first.asm["cubin"]))


def compile_in_parallel(jobs: Iterable[tuple[str, AttentionShape, Tile]], processes: int) -> Iterator[Compiled]:
    """The jobs' kernels, in order, compiled in `processes` processes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile, jobs)


def _compile(job: tuple[str, AttentionShape, Tile]) -> Compiled:
    torch.set_num_threads(1)
    return compile_attention(*job)


def _states(shape: AttentionShape) -> tuple[torch.Tensor, KvLayer]:
    tokens, slots = 2, 2
    q_THD = torch.zeros(tokens, shape.group * shape.kv_heads, shape.head_size, dtype=shape.dtype)
    heads = torch.zeros(slots, 2 * shape.kv_heads, shape.head_size, dtype=shape.cache)
    return q_THD, KvLayer(heads, torch.ones(heads.shape[:2]) if shape.cache.itemsize == 1 else None)


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _decode(shape: AttentionShape, tile: Tile) -> None:
    q_THD, kv = _states(shape)
    table, options = _int32(2, TABLE_WIDTH), shape.attention_options
    attend_decode_tiled(q_THD, kv, table, _int32(2), _int32(2), options, torch.empty_like(q_THD), tile)


def _prefill(shape: AttentionShape, tile: Tile) -> None:
    q_THD, kv = _states(shape)
    segments = Segments(_int32(1), _int32(1), _int32(2), 2)
    table, options = _int32(2, TABLE_WIDTH), shape.attention_options
    attend_prefill_tiled(q_THD, kv, table, segments, options, torch.empty_like(q_THD), tile)
