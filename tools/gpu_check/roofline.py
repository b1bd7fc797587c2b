"""Compares each kernel's speed with the device's ceilings, at the shapes of a Llama of 8 billion parameters.

A kernel runs over enough copies of its inputs that none is still in the cache when it is used again. A model behaves
like this too, because other layers run in between. Bytes are the least that the work must move, not what a kernel
really reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_check.ceilings import MATRIX, MEMORY
from gpu_check.comparing import backends, reason
from gpu_check.findings import Context, Finding
from gpu_check.model import REHEARSED, attention_flops
from gpu_check.pool import int32, random_layer
from gpu_check.sampling import neutral, variants
from gpu_check.timing import Call, seconds_per_call
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_server.kernels.interface import Choices, Kernels, Segments
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense

TABLE = "Roofline"
COLD_BYTES = 512 << 20  # bytes of inputs read before one input is used again: several times a GPU's cache
MAX_COPIES = 128
TYPE = torch.bfloat16
REHEARSED_TYPE = torch.float16  # because Triton's interpreter computes bfloat16 wrongly


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


def measure(context: Context) -> Iterator[Finding]:
    triton, _ = backends()
    if context.on_gpu:
        bench = Bench(triton, LLAMA_8B, TYPE, context.device)
        works = all_works(bench, batches=(1, 16, 64, 256), context_tokens=1000, prompt=4096)
    else:
        bench = Bench(triton, REHEARSED, REHEARSED_TYPE, context.device)
        works = all_works(bench, batches=(1, 2), context_tokens=70, prompt=40)
    for work in works:
        copies = work.copies if context.on_gpu else 1
        try:
            seconds = seconds_per_call([work.make() for _ in range(copies)], context.device)
        except Exception as error:  # any error of a kernel is reported as a result of the check
            yield Finding(TABLE, {"kernel": work.kernel, "shape": work.shape}, failure=reason(error))
            continue
        yield _finding(work, seconds, context)


def _finding(work: Work, seconds: float, context: Context) -> Finding:
    memory, matrix = (context.figures.get(name) for name in (MEMORY, MATRIX))
    by_memory = work.num_bytes / memory if memory else 0.0
    by_matrix = work.flops / matrix if matrix else 0.0
    limit = max(by_memory, by_matrix)
    share = limit / seconds
    cells = {
        "kernel": work.kernel,
        "shape": work.shape,
        "µs": f"{seconds * 1e6:.1f}",
        "GB/s": f"{work.num_bytes / seconds / 1e9:.0f}",
        "TFLOP/s": f"{work.flops / seconds / 1e12:.1f}",
        "limit": "memory" if by_memory >= by_matrix else "matrix",
        "of the limit": f"{share:.0%}" if limit and context.on_gpu else "–",
    }
    return Finding(TABLE, cells, {f"roofline: {work.kernel}, {work.shape}": share} if limit else {})


def all_works(bench: Bench, batches: tuple[int, ...], context_tokens: int, prompt: int) -> Iterator[Work]:
    for batch in batches:
        yield decode_attention(bench, batch, context_tokens)
    yield prefill_attention(bench, prompt)
    for tokens in (batches[-2], prompt):
        yield from row_kernels(bench, tokens)
    for tokens in sorted({1, batches[-2], prompt}):
        yield from products(bench, tokens)
    yield from samples(bench, batches[-2], context_tokens)


def decode_attention(bench: Bench, batch: int, length: int) -> Work:
    shape, device = bench.shape, bench.device
    size, slots = shape.head_size, batch * length
    table = torch.randperm(slots, device=device).int().view(batch, length)
    rows, lengths = torch.arange(batch, dtype=torch.int32, device=device), int32([length] * batch, device)
    item = bench.dtype.itemsize

    def make() -> Call:
        q = bench.numbers(batch, shape.heads, size)
        kv = random_layer(slots, shape.kv_heads, size, bench.dtype, device)
        return lambda: bench.kernels.attend(q, kv, table, rows, lengths, None, size**-0.5)

    moved = item * (slots * 2 * shape.kv_heads * size + 2 * batch * shape.heads * size) + 4 * slots
    return Work("attend_decode", f"{batch} rows of {length}", moved, 4 * slots * shape.heads * size, make)


def prefill_attention(bench: Bench, tokens: int) -> Work:
    shape, device = bench.shape, bench.device
    size = shape.head_size
    table = torch.randperm(tokens, device=device).int().unsqueeze(0)
    row, offsets = int32([0], device), int32([0, tokens], device)
    segments = Segments(row, row, offsets, tokens)

    def make() -> Call:
        q = bench.numbers(tokens, shape.heads, size)
        kv = random_layer(tokens, shape.kv_heads, size, bench.dtype, device)
        return lambda: bench.kernels.attend(q, kv, table, row[:0], row[:0], segments, size**-0.5)

    moved = bench.dtype.itemsize * tokens * (2 * shape.kv_heads + 2 * shape.heads) * size
    return Work("attend_prefill", f"a prompt of {tokens}", moved, attention_flops(shape, tokens), make)


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
        return lambda: kernels.rope_and_store_kv(qkv, heads, rotary, positions, kv, slots)

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

        def make(outputs: int = outputs, inputs: int = inputs, gated: bool = gated) -> Call:
            linear = make_linear(bench.kernels, dense(bench.numbers(outputs, inputs)), gated=gated)
            x = bench.numbers(tokens, inputs)
            return lambda: linear(x)

        moved = bench.dtype.itemsize * (outputs * inputs + tokens * (inputs + outputs))
        yield Work(f"linear: {name}", f"{tokens} tokens", moved, 2 * tokens * outputs * inputs, make)


def samples(bench: Bench, rows: int, length: int) -> Iterator[Work]:
    """Sampling with several options. Cuts and penalties overwrite the logits, so their calls copy the logits first."""
    vocabulary, device = bench.shape.vocabulary, bench.device
    logits_bytes = 4 * rows * vocabulary
    wanted = ("greedy", "draws", "top-p", "typical-p", "repetition penalty", "all together")
    for name, choices in variants(neutral(rows, length, vocabulary, device), vocabulary):
        if name not in wanted:
            continue
        changes = name not in ("greedy", "draws")

        def make(choices: Choices = choices, changes: bool = changes) -> Call:
            logits = torch.randn(rows, vocabulary, device=device) * 3
            if not changes:
                return lambda: bench.kernels.sample(logits, choices)
            scratch = torch.empty_like(logits)
            return lambda: bench.kernels.sample(scratch.copy_(logits), choices)

        moved = 3 * logits_bytes if changes else logits_bytes
        said = f"{rows} rows of {vocabulary}{', and a copy' if changes else ''}"
        yield Work(f"sample: {name}", said, moved, 0, make)
