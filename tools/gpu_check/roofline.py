"""Compares each kernel's speed with the device's ceilings, at the shapes of a Llama of 8 billion parameters.

A kernel runs over enough copies of its inputs that none is still in the cache when it is used again. A model behaves
like this too, because other layers run in between. Bytes are the least that the work must move, not what a kernel
really reads.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_check.ceilings import MATRIX, MEMORY
from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED, attention_flops
from gpu_check.states import backends, int32, neutral, random_layer, random_table, variants
from gpu_check.timing import Call, seconds_per_call
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_server.kernels.interface import AttentionOptions, Choices, Kernels, Segments
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense
from text_generation_server.models.kv_cache import SCALED

TABLE = "Roofline"
COLD_BYTES = 512 << 20  # bytes of inputs read before one input is used again: several times a GPU's cache
MAX_COPIES = 128
TYPE = torch.bfloat16
REHEARSED_TYPE = torch.float16  # because Triton's interpreter computes bfloat16 wrongly
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Work:
    """One line of the table, with the least bytes and operations that the work needs."""

    kernel: str
    shape: str
    num_bytes: int
    flops: int
    make: Callable[[], Call]  # makes a copy of the inputs, and returns a call that computes with it

    @property
    def copies(self) -> int:
        return max(1, min(MAX_COPIES, COLD_BYTES // max(1, self.num_bytes)))


@dataclass(frozen=True, slots=True)
class Bench:
    kernels: Kernels
    shape: LlamaShape
    dtype: torch.dtype
    device: torch.device

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """`width`: positions of the rows' table, which a server makes as wide as its longest request may become."""

    rows: int
    length: int
    width: int
    cache: torch.dtype = TYPE
    kv_heads: int = 8


# In the order of their value: what a server meets first, then wide tables, long contexts, 8 bits, and one key head, as
# on a rank of a 70B model that is split over eight GPUs.
DECODES = (
    *(DecodeLoad(rows, 1000, width) for rows in (64, 256, 1, 16) for width in (1000, 8192, 131_072)),
    DecodeLoad(1, 8192, 8192), DecodeLoad(1, 131_072, 131_072), DecodeLoad(8, 32_768, 131_072),
    *(DecodeLoad(64, 1000, 8192, cache) for cache in (FP8, torch.int8)), DecodeLoad(8, 32_768, 131_072, FP8),
    *(DecodeLoad(rows, length, 131_072, kv_heads=1) for rows, length in ((1, 32_768), (1, 131_072), (64, 1000))),
)  # fmt: skip
PREFILLS = ((0, 4096, TYPE), (0, 4096, FP8), (3584, 4096, TYPE), (28_672, 32_768, TYPE))
FEW_DECODES = (DecodeLoad(2, 70, 70, REHEARSED_TYPE, 2), DecodeLoad(1, 70, 600, torch.int8, 2))
FEW_PREFILLS = ((20, 40, REHEARSED_TYPE),)


def measure(context: Context) -> Iterator[Case]:
    triton, _ = backends()
    if context.on_gpu:
        bench = Bench(triton, LLAMA_8B, TYPE, context.device)
        works = all_works(bench, DECODES, PREFILLS, rows=64, prompt=4096)
    else:
        bench = Bench(triton, REHEARSED, REHEARSED_TYPE, context.device)
        works = all_works(bench, FEW_DECODES, FEW_PREFILLS, rows=2, prompt=40)
    for work in works:
        yield Case(TABLE, {"kernel": work.kernel, "shape": work.shape}, partial(time_of, work, context))


def time_of(work: Work, context: Context) -> Iterable[Measured]:
    copies = work.copies if context.on_gpu else 1
    seconds = seconds_per_call([work.make() for _ in range(copies)], context.device)
    memory, matrix = (context.figures.get(name) for name in (MEMORY, MATRIX))
    by_memory = work.num_bytes / memory if memory else 0.0
    by_matrix = work.flops / matrix if matrix else 0.0
    limit = max(by_memory, by_matrix)
    share = limit / seconds
    cells = {
        "µs": f"{seconds * 1e6:.1f}",
        "GB/s": f"{work.num_bytes / seconds / 1e9:.0f}",
        "TFLOP/s": f"{work.flops / seconds / 1e12:.1f}",
        "limit": "memory" if by_memory >= by_matrix else "matrix",
        "of the limit": f"{share:.0%}" if limit and context.on_gpu else "–",
    }
    yield Measured(cells, {f"roofline: {work.kernel}, {work.shape}": share} if limit else {})


def all_works(
    bench: Bench,
    decodes: tuple[DecodeLoad, ...],
    prefills: tuple[tuple[int, int, torch.dtype], ...],
    rows: int,
    prompt: int,
) -> Iterator[Work]:
    for load in decodes:
        yield decode_attention(bench, load)
    for start, end, cache in prefills:
        yield prefill_attention(bench, start, end, cache)
    yield from samples(bench, rows, 1000)
    for tokens in sorted({1, rows, prompt}):
        yield from products(bench, tokens)
    for tokens in (rows, prompt):
        yield from row_kernels(bench, tokens)


def slot_bytes(bench: Bench, kv_heads: int, cache: torch.dtype) -> int:
    """Bytes of a slot in one layer, scales included."""
    return 2 * kv_heads * (bench.shape.head_size * cache.itemsize + (4 if cache in SCALED else 0))


def decode_attention(bench: Bench, load: DecodeLoad) -> Work:
    device, size, slots = bench.device, bench.shape.head_size, load.rows * load.length
    heads = bench.shape.heads // bench.shape.kv_heads * load.kv_heads

    def make() -> Call:
        table = random_table(load.rows, load.length, load.width, device)
        rows, lengths = (
            torch.arange(load.rows, dtype=torch.int32, device=device),
            int32([load.length] * load.rows, device),
        )
        q = bench.numbers(load.rows, heads, size)
        kv = random_layer(slots, load.kv_heads, size, load.cache, device)
        return lambda: bench.kernels.attend(
            q, kv, table, rows_R=rows, lengths_R=lengths, segments=None, options=AttentionOptions(size**-0.5)
        )

    queries = 2 * bench.dtype.itemsize * load.rows * heads * size
    moved = slots * (slot_bytes(bench, load.kv_heads, load.cache) + 4) + queries
    said = (
        f"{load.rows} rows of {load.length}, table {load.width} wide, {load.kv_heads} key heads, {name_of(load.cache)}"
    )
    return Work("attend: decode", said, moved, 4 * slots * heads * size, make)


def prefill_attention(bench: Bench, start: int, end: int, cache: torch.dtype) -> Work:
    shape, device, tokens = bench.shape, bench.device, end - start
    size = shape.head_size

    def make() -> Call:
        table = random_table(1, end, end, device)
        row, starts, offsets = int32([0], device), int32([start], device), int32([0, tokens], device)
        segments, none = Segments(row, starts, offsets, tokens), int32([], device)
        q = bench.numbers(tokens, shape.heads, size)
        kv = random_layer(end, shape.kv_heads, size, cache, device)
        return lambda: bench.kernels.attend(
            q, kv, table, rows_R=none, lengths_R=none, segments=segments, options=AttentionOptions(size**-0.5)
        )

    moved = end * slot_bytes(bench, shape.kv_heads, cache) + 2 * bench.dtype.itemsize * tokens * shape.heads * size
    flops = attention_flops(shape, end) - attention_flops(shape, start)
    return Work("attend: prefill", f"positions {start} to {end}, {name_of(cache)}", moved, flops, make)


def row_kernels(bench: Bench, tokens: int) -> Iterator[Work]:
    shape, kernels, device = bench.shape, bench.kernels, bench.device
    hidden, size, item = shape.hidden, shape.head_size, bench.dtype.itemsize
    said = f"{tokens} tokens"

    table = bench.numbers(shape.vocabulary, hidden)  # all copies share the table and have different ids

    def embed() -> Call:
        ids = torch.randint(0, shape.vocabulary, (tokens,), dtype=torch.int32, device=device)
        return lambda: kernels.embed(ids, table)

    def norm() -> Call:
        x, residual, weight = bench.numbers(tokens, hidden), bench.numbers(tokens, hidden), bench.numbers(hidden)
        return lambda: kernels.add_rms_norm(x, residual, weight, 1e-5)

    def silu() -> Call:
        x = bench.numbers(tokens, 2 * shape.intermediate)
        return lambda: kernels.silu_mul(x)

    def rope() -> Call:
        qkv = bench.numbers(tokens, (shape.heads + 2 * shape.kv_heads) * size)
        kv = random_layer(tokens, shape.kv_heads, size, bench.dtype, device)
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        slots = torch.randperm(tokens, device=device).int()
        rotary = (torch.ones(tokens, size // 2, device=device), torch.zeros(tokens, size // 2, device=device))
        heads = (shape.heads, shape.kv_heads)
        return lambda: kernels.rope_and_store_kv(qkv, heads, rotary, positions_T=positions, kv=kv, slots_T=slots)

    yield Work("embed", said, 2 * item * tokens * hidden, 0, embed)
    yield Work("add_rms_norm", said, 4 * item * tokens * hidden, 0, norm)
    yield Work("silu_mul", said, 3 * item * tokens * shape.intermediate, 0, silu)
    states = 2 * (shape.heads + 2 * shape.kv_heads) * size
    yield Work("rope_and_store_kv", said, item * tokens * states, 0, rope)


def products(bench: Bench, tokens: int) -> Iterator[Work]:
    """The linear layers as the model makes them: torch's layers, unless the backend has its own."""
    shape, size = bench.shape, bench.shape.head_size
    layers = {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * size, shape.hidden, False),
        "o": (shape.hidden, shape.heads * size, False),
        "gate and up, silu": (2 * shape.intermediate, shape.hidden, True),
        "down": (shape.hidden, shape.intermediate, False),
        "head": (shape.vocabulary, shape.hidden, False),
    }
    for name, (outputs, inputs, gated) in layers.items():
        if name == "head" and tokens > 64:
            continue  # not measured, because a prompt needs the logits of its last token only

        written = torch.float32 if name == "head" else bench.dtype  # logits are float32

        def make(
            outputs: int = outputs, inputs: int = inputs, gated: bool = gated, written: torch.dtype = written
        ) -> Call:
            weight = dense(bench.numbers(outputs, inputs))
            linear = make_linear(bench.kernels, weight, gated=gated, dtype=written)
            x = bench.numbers(tokens, inputs)
            return lambda: linear(x)

        moved = bench.dtype.itemsize * inputs * (outputs + tokens) + written.itemsize * tokens * outputs
        yield Work(f"linear: {name}", f"{tokens} tokens", moved, 2 * tokens * outputs * inputs, make)


def samples(bench: Bench, rows: int, length: int) -> Iterator[Work]:
    """Sampling with several options. Cuts and penalties overwrite the logits, so their calls copy the logits first. In
    peaked logits, as trained models give them, a few tokens have nearly all of the likelihood."""
    vocabulary, device = bench.shape.vocabulary, bench.device
    logits_bytes = 4 * rows * vocabulary
    for name, choices in variants(neutral(rows, length, vocabulary, device), vocabulary):
        changes = name not in ("greedy", "draws")
        for peaked in (False, True) if name in ("top-k", "top-p") else (False,):

            def make(choices: Choices = choices, changes: bool = changes, peaked: bool = peaked) -> Call:
                logits = torch.randn(rows, vocabulary, device=device) * 3
                if peaked:
                    logits[:, :10] += torch.linspace(20, 12, 10, device=device)
                if not changes:
                    return lambda: bench.kernels.sample(logits, choices)
                scratch = torch.empty_like(logits)
                return lambda: bench.kernels.sample(scratch.copy_(logits), choices)

            moved = 3 * logits_bytes if changes else logits_bytes
            said = f"{rows} rows of {vocabulary}{', peaked' if peaked else ''}{', and a copy' if changes else ''}"
            yield Work(f"sample: {name}", said, moved, 0, make)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
