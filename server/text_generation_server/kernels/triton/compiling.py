"""Compiles attention for a GPU that need not be there, by calling the kernels' own launchers on CPU tensors. Its
machine code shows registers, spilled registers and the length of loops, and so which tiles a GPU can run well.

Triton keeps what is compiled in its cache on disk, where a process that has such a GPU finds it. Triton's interpreter
must be off.
"""

import re
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments
from text_generation_server.kernels.triton.attend_decode import attend_decode_tiled
from text_generation_server.kernels.triton.attend_prefill import attend_prefill_tiled
from text_generation_server.kernels.triton.tuning import Gpu, Tile, attention_dtype, find_tile_for

# A line of nvdisasm: an instruction behind its address, whose first word may be a predicate, or a label.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
LABEL = re.compile(r"^(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that has no other loop within it."""

    instructions: int
    exponentials: int
    spills: int  # loads from local memory and stores to it


@dataclass(frozen=True, slots=True)
class MachineCode:
    registers: int  # registers of a thread
    stack: int  # bytes of local memory of a thread
    instructions: int
    spills: int
    loops: tuple[Loop, ...]

    @property
    def spills_in_loops(self) -> int:
        return sum(loop.spills for loop in self.loops)

    @property
    def tiles(self) -> list[int]:
        """Instructions that a warp runs for one tile of attention, in each loop over tiles: they have exponentials."""
        return [loop.instructions for loop in self.loops if loop.exponentials]


NO_CODE = MachineCode(0, 0, 0, 0, ())


def read_code(cubin: bytes) -> MachineCode:
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
        text = _run(knobs.nvidia.nvdisasm.path, "--print-code", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return parse(text, int(found[1]), int(found[2]))


def _run(*command: str | Path) -> str:
    # A large kernel takes seconds, and beside the compilers of `make compile-gpu` on a busy machine more than a minute.
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def parse(text: str, registers: int, stack: int) -> MachineCode:
    """`text` is the listing of one kernel."""
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[str, int]] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := INSTRUCTION.match(line):
            names.append(instruction[2])
            if instruction[2].startswith("BRA") and (target := TARGET.search(instruction[3])):
                jumps.append((target[1], len(names)))
    # The loop that a kernel's end is padded with jumps to itself.
    back = {(labels[label], end) for label, end in jumps if label in labels and labels[label] < end - 1}
    loops = [_loop(names[start:end]) for start, end in sorted(back) if _is_innermost(start, end, back)]
    return MachineCode(registers, stack, len(names), _loop(names).spills, tuple(loops))


def _is_innermost(start: int, end: int, loops: set[tuple[int, int]]) -> bool:
    """The last one of several jumps back to one place ends the loop."""
    within = any(start < other and last <= end for other, last in loops)
    return not within and not any(start == other and last > end for other, last in loops)


def _loop(names: list[str]) -> Loop:
    exponentials = names.count("MUFU.EX2")
    return Loop(len(names), exponentials, sum(name.startswith(("LDL", "STL")) for name in names))


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
    attend_decode_tiled(
        q_THD, kv, table, _int32(2), _int32(2), options=options, out_THD=torch.empty_like(q_THD), tile=tile
    )


def _prefill(shape: AttentionShape, tile: Tile) -> None:
    q_THD, kv = _states(shape)
    segments = Segments(_int32(1), _int32(1), _int32(2), 2)
    table, options = _int32(2, TABLE_WIDTH), shape.attention_options
    attend_prefill_tiled(q_THD, kv, table, segments, options, out_THD=torch.empty_like(q_THD), tile=tile)


# Loads of keys wait for the load of their slots, and half of the stages go to the slots: 3 stages keep one tile of keys
# in flight, 5 two and 7 three. With 2 stages the slots' loads are not in flight at all.
DECODE_TILES = [
    Tile(warps=warps, stages=stages, columns=columns, split=split)
    for warps, stages, columns, split in product((2, 4, 8), (3, 5), (32, 64, 128), (128, 256, 512))
]
PREFILL_TILES = [
    Tile(warps=warps, stages=stages, rows=rows, columns=columns)
    for warps, stages, rows, columns in product((4, 8), (3, 5, 7), (64, 128), (32, 64, 128))
]
CANDIDATES = {"attend_decode": DECODE_TILES, "attend_prefill": PREFILL_TILES}


def jobs(shape: AttentionShape) -> list[tuple[str, AttentionShape, Tile]]:
    return [(kernel, shape, tile) for kernel, tiles in CANDIDATES.items() for tile in tiles]


def table_jobs(shape: AttentionShape) -> list[tuple[str, AttentionShape, Tile]]:
    """The tiles that GPUs of the shape's capability use where `tune` has not run."""
    gpu, dtype = Gpu("", shape.capability), attention_dtype(shape.dtype, shape.cache)
    return [(kernel, shape, find_tile_for(kernel, shape.group, shape.head_size, dtype, gpu)) for kernel in CANDIDATES]


def fault(compiled: Compiled) -> str | None:
    """Why the GPU cannot run the kernel, or would run it several times slower than needed."""
    if compiled.error:
        return compiled.error
    limit = SHARED_MEMORY[compiled.shape.capability]
    if compiled.shared > limit:
        return f"{compiled.shared} bytes of shared memory, of {limit}"
    if spills := compiled.code.spills_in_loops:
        return f"{spills} accesses to spilled registers in loops"
    return None
