"""Bytes and operations per second of kernels, at the shapes of a Llama of 8 billion parameters, beside the ceilings.

A kernel runs over enough copies of its inputs that none is still in the cache when it is used again. A model behaves
like this too, because other layers run in between. Bytes are the least that the work must move, not what a kernel
really reads.
"""

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from gpu_check.device import DEVICE, DTYPE, GPU, SHAPE, Call, Measured, seconds_per_call
from torch import Tensor
from weight_forms import random_weight  # type: ignore[import-not-found]

from text_generation_benchmark.roofline import Ceilings, StepPart
from text_generation_common.quantized.tensors.splits import on_tensors
from text_generation_server.kernels import triton
from text_generation_server.kernels.interface import AttentionOptions, Kernels, KvLayer, Segments
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense
from text_generation_server.models.kv_cache import SCALED

COLD_BYTES = 512 << 20 if GPU else 1  # bytes of inputs read before one input is used again: several times a GPU's cache
MAX_COPIES = 128
FP8, INT8 = torch.float8_e4m3fn, torch.int8
HEADS, SIZE = SHAPE.heads, SHAPE.head_size
KERNELS = cast(Kernels, triton)
OPTIONS = AttentionOptions(SIZE**-0.5)

Roofline = Callable[[StepPart, Callable[[], Call]], None]


# Rows, tokens of each, positions of their table (a server makes it as wide as its longest request may become), type of
# the cache, key heads: wide tables, long contexts, 8 bits, and one key head, as on a rank of a 70B model on eight GPUs.
DECODES = [
    *((rows, 1000, width, DTYPE, 8) for rows in (1, 64, 256) for width in (1000, 8192, 131_072)),
    (1, 131_072, 131_072, DTYPE, 8), (8, 32_768, 131_072, DTYPE, 8),
    (64, 1000, 8192, FP8, 8), (64, 1000, 8192, INT8, 8),
    (1, 131_072, 131_072, DTYPE, 1), (64, 1000, 131_072, DTYPE, 1),
] if GPU else [(2, 70, 70, DTYPE, 2), (1, 70, 600, INT8, 2)]  # fmt: skip
# (first position, position after the last, type of the cache)
PREFILLS = (
    [(0, 4096, DTYPE), (0, 4096, FP8), (3584, 4096, DTYPE), (28_672, 32_768, DTYPE)] if GPU else [(20, 40, DTYPE)]
)
# (name, outputs, inputs)
LAYERS = [
    ("qkv", (HEADS + 2 * SHAPE.kv_heads) * SIZE, SHAPE.hidden), ("o", SHAPE.hidden, HEADS * SIZE),
    ("gate and up, silu", 2 * SHAPE.intermediate, SHAPE.hidden), ("down", SHAPE.hidden, SHAPE.intermediate),
    ("head", SHAPE.vocabulary, SHAPE.hidden),
]  # fmt: skip
# A prompt needs the logits of its last token only.
PRODUCTS = [(layer, tokens) for layer in LAYERS for tokens in (1, 64, 4096) if layer[0] != "head" or tokens <= 64]
# (layer, tokens, form of the weight, inputs of a group)
CODES = [
    *((layer, tokens, "int4", 128) for layer in LAYERS[:4] for tokens in (1, 16, 64, 4096)),
    *((LAYERS[2], tokens, form, size) for tokens in (1, 16) for form, size in (
        ("int4 zeros", 128), ("int4", 32), ("int4 order", 128), ("int8", SHAPE.hidden), ("fp8", 128), ("table4", 64),
    )),
] if GPU else [(LAYERS[0], 2, form, 64) for form in ("int4 zeros", "int8", "fp8", "table4")]  # fmt: skip

pytestmark = pytest.mark.limit(60)


@pytest.fixture
def roofline(ceilings: Ceilings, measured: Measured) -> Roofline:
    """Measures calls, each with a copy of the inputs of its own."""

    def measure(work: StepPart, make: Callable[[], Call]) -> None:
        copies = max(1, min(MAX_COPIES, COLD_BYTES // work.bytes))
        seconds = seconds_per_call([make() for _ in range(copies)])
        cells = {"work": work.name, "µs": f"{1e6 * seconds:.1f}", "GB/s": f"{work.bytes / seconds / 1e9:.0f}"}
        cells |= {"TFLOP/s": f"{work.flops / seconds / 1e12:.1f}", "limit": work.binds(ceilings)}
        measured("Roofline", cells | {"of the limit": f"{work.least_s(ceilings) / seconds:.0%}"})

    return measure


def test_ceilings(ceilings: Ceilings, measured: Measured) -> None:
    rates = {"memory, GB/s": f"{ceilings.bandwidth / 1e9:.0f}", "products, TFLOP/s": f"{ceilings.flops / 1e12:.1f}"}
    measured("Ceilings, measured with plain torch", rates)


@pytest.mark.parametrize(("rows", "length", "width", "cache", "kv_heads"), DECODES)
def test_decode_attention(
    rows: int, length: int, width: int, cache: torch.dtype, kv_heads: int, roofline: Roofline
) -> None:
    slots, heads = rows * length, HEADS // SHAPE.kv_heads * kv_heads

    def make() -> Call:
        numbers, lengths, table = int32(*range(rows)), int32(*[length] * rows), random_table(rows, length, width)
        q, kv = random_numbers(rows, heads, SIZE), random_layer(slots, kv_heads, cache)
        return lambda: KERNELS.attend(q, kv, table, numbers, lengths, segments=None, options=OPTIONS)

    moved = slots * (slot_bytes(kv_heads, cache) + 4) + 2 * DTYPE.itemsize * rows * heads * SIZE
    said = f"{rows} rows of {length}, table {width} wide, {kv_heads} key heads, {str(cache)[6:]}"
    roofline(StepPart(f"decode attention: {said}", moved, 4 * slots * heads * SIZE), make)


@pytest.mark.parametrize(("start", "end", "cache"), PREFILLS)
def test_prefill_attention(start: int, end: int, cache: torch.dtype, roofline: Roofline) -> None:
    tokens = end - start

    def make() -> Call:
        segments, none = Segments(int32(0), int32(start), int32(0, tokens), tokens), int32()
        q, table = random_numbers(tokens, HEADS, SIZE), random_table(1, end, end)
        kv = random_layer(end, SHAPE.kv_heads, cache)
        return lambda: KERNELS.attend(q, kv, table, none, none, segments=segments, options=OPTIONS)

    moved = end * slot_bytes(SHAPE.kv_heads, cache) + 2 * DTYPE.itemsize * tokens * HEADS * SIZE
    # Each token sees itself and all before it.
    pairs = math.comb(end + 1, 2) - math.comb(start + 1, 2)
    name = f"prefill attention: positions {start} to {end}, {str(cache)[6:]}"
    roofline(StepPart(name, moved, 4 * HEADS * SIZE * pairs), make)


@pytest.mark.parametrize(("layer", "tokens"), PRODUCTS if GPU else PRODUCTS[::5], ids=str)
def test_products(layer: tuple[str, int, int], tokens: int, roofline: Roofline) -> None:
    """The linear layers as the model makes them: torch's layers, unless the backend has its own."""
    (name, outputs, inputs), gated = layer, layer[0].startswith("gate")
    written = torch.float32 if name == "head" else DTYPE  # logits are float32

    def make() -> Call:
        weight, x = dense(random_numbers(outputs, inputs)), random_numbers(tokens, inputs)
        linear = make_linear(KERNELS, weight, gated=gated, y_type=written)
        return lambda: linear(x)

    moved = DTYPE.itemsize * inputs * (outputs + tokens) + written.itemsize * tokens * outputs // (1 + gated)
    roofline(StepPart(f"product, {name}: {tokens} tokens", moved, 2 * tokens * outputs * inputs), make)


@pytest.mark.parametrize(("layer", "tokens", "form", "size"), CODES, ids=str)
def test_products_by_codes(layer: tuple[str, int, int], tokens: int, form: str, size: int, roofline: Roofline) -> None:
    """The bytes are those of the codes, their scales and zero points."""
    (name, outputs, inputs), gated = layer, layer[0].startswith("gate")
    read: list[int] = []

    def counted(part: Tensor) -> Tensor:
        read.append(part.nbytes)
        return part.to(DEVICE)

    weight = on_tensors(random_weight(form, outputs, inputs, size), counted)
    moved = sum(read) + DTYPE.itemsize * tokens * (inputs + outputs // (1 + gated))

    def make() -> Call:
        x, mine = random_numbers(tokens, inputs), on_tensors(weight, torch.clone)
        linear = make_linear(KERNELS, mine, gated=gated, x_type=DTYPE)
        return lambda: linear(x)

    work = StepPart(f"product, {name}, {form} in {size}: {tokens} tokens", moved, 2 * tokens * outputs * inputs)
    roofline(work, make)


def slot_bytes(kv_heads: int, cache: torch.dtype) -> int:
    """Bytes of a slot in one layer, scales included."""
    return 2 * kv_heads * (SIZE * cache.itemsize + (4 if cache in SCALED else 0))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def random_layer(slots: int, kv_heads: int, cache: torch.dtype) -> KvLayer:
    heads = torch.randn((slots + 1, 2 * kv_heads, SIZE), device=DEVICE)
    if cache not in SCALED:
        return KvLayer(heads.to(cache))
    return KvLayer((heads * 30).to(cache), torch.rand(heads.shape[:2], device=DEVICE) / 50)


def random_table(rows: int, length: int, width: int) -> Tensor:
    """int32 [rows, width]: each row's first `length` entries are slots 0 … rows · length - 1 in random order."""
    table = torch.zeros((rows, width), dtype=torch.int32, device=DEVICE)
    table[:, :length] = torch.randperm(rows * length, device=DEVICE).int().view(rows, length)
    return table
