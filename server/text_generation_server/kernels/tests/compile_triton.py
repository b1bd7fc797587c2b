"""Compiles the Triton kernels for GPUs, without a GPU. Prints one line of JSON for each launch.

This is a script and not a test, because Triton's interpreter must be off in its process. Its arguments are jobs, each
of which is named in a line before its launches. `types-90`: all kernels in all forms, for types of numbers that GPUs of
compute capability 9.0 serve; `each-90`: one form of each kernel in types other than bfloat16; `products-90`: one form
of those kernels that multiply matrices; `serving`: what Triton would compile for steps of many sizes, without compiling
it.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch
from triton import knobs

from text_generation_common.models.architecture import Activation, ClampedGate
from text_generation_common.quantized.values import Dense, Fp8, Groups, Int4, Int8, Table4, Weight
from text_generation_server.kernels import triton as kernels
from text_generation_server.kernels.interface import (
    AdaptedPairs,
    AdapterMatrices,
    Allowed,
    AttentionOptions,
    Bans,
    Bias,
    Choices,
    ExpertWeights,
    HeadNorms,
    KvLayer,
    Masks,
    Segments,
)
from text_generation_server.kernels.triton.codes import WIDE_ROWS
from text_generation_server.kernels.triton.compiling import (
    AttentionShape,
    compile_attention,
    compiling_for,
    fault,
    read_code,
    table_jobs,
)
from text_generation_server.kernels.triton.sample_masks import apply_masks

FP32, FP16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
KV_HEADS = 2
Case = tuple[torch.dtype, torch.dtype, int, int]
# By compute capability: (type of the model, type of the cache, group, head size).
ATTENTION: dict[int, list[Case]] = {
    80: [(BF16, BF16, 4, 128), (FP32, INT8, 3, 128)],
    89: [(FP16, FP8, 3, 80), (BF16, INT8, 4, 128)],
    90: [(BF16, BF16, 4, 128), (FP16, FP16, 7, 96), (FP32, FP32, 3, 128), (BF16, INT8, 4, 128), (FP16, FP8, 3, 80)],
    100: [(BF16, BF16, 4, 128), (BF16, FP8, 4, 128)],
}
# Cases with options of attention. `make compile-gpu` compiles all options that served models use, for all shapes.
OPTIONS: dict[int, list[tuple[Case, tuple[str, ...]]]] = {
    80: [((BF16, BF16, 4, 128), ("window",)), ((BF16, BF16, 1, 64), ("slopes_H",))],
    89: [((BF16, FP8, 4, 128), ("window",))],
    90: [((BF16, BF16, 2, 256), ("softcap", "window")), ((BF16, BF16, 8, 64), ("sinks_H", "window"))],
    100: [((BF16, BF16, 4, 128), ("softcap",)), ((BF16, INT8, 8, 64), ("sinks_H",))],
}
# Cases that differ in the cache's type only. What a warp runs for one key is printed for these.
EQUAL_SHAPES = [(BF16, cache, 4, 128) for cache in (BF16, INT8, FP8)]
PLAIN = AttentionOptions(0.1)
# Accesses to spilled registers in the loop of products by codes, of about 250 instructions: 2 for 4 bits on capability
# 10.0, none elsewhere.
CODES_SPILLS = 2


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def show(kernel: Any) -> None:
    shown = {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, "hash": kernel.hash}
    if kernel.metadata.name == "_multiply_codes":
        shown["fault"] = (spills := read_code(kernel.asm["cubin"]).spills_in_loops) > CODES_SPILLS and spills
    print(json.dumps(shown))


def compile_rope(dtype: torch.dtype, cache: torch.dtype, group: int, size: int) -> None:
    heads = (group * KV_HEADS, KV_HEADS)
    scales = torch.zeros(65, 2 * KV_HEADS) if cache in (INT8, FP8) else None
    kv = KvLayer(torch.zeros(65, 2 * KV_HEADS, size, dtype=cache), scales)
    rotary = (torch.zeros(99, size // 2), torch.zeros(99, size // 2))
    qkv = torch.zeros(8, (group + 2) * KV_HEADS * size, dtype=dtype)
    kernels.rope_and_store_kv(qkv, heads, rotary, int32(8), kv, int32(8))
    for weights_type in {dtype, FP32}:
        norm = torch.zeros(size, dtype=weights_type)
        kernels.rope_and_store_kv(qkv, heads, rotary, int32(8), kv, int32(8), HeadNorms(norm, norm, 1e-5))


def compile_others(dtype: torch.dtype, every_form: bool) -> None:
    x = torch.zeros(5, 96, dtype=dtype)
    kernels.embed(int32(5), x)
    kernels.rms_norm(x, x[0], 1e-5)
    kernels.add_rms_norm(x, x, x[0], 1e-5)
    kernels.rms_norm_part(x, range(32, 96), torch.zeros(64), 1e-5)
    kernels.layer_norm(x, x[0], None, 1e-5)
    kernels.add_layer_norm(x, x, x[0], x[0], 1e-5)
    kernels.silu_mul(x)
    for activation in Activation if every_form else [Activation.gelu]:
        kernels.activate(x, activation, gated=activation == Activation.gelu)


def compile_adapters(dtype: torch.dtype, every_form: bool) -> None:
    x, down, up = (torch.zeros(shape, dtype=dtype) for shape in ((5, 96), (3, 40, 96), (3, 20, 320)))
    matrices = AdapterMatrices(down, up, int32(3, 2), int32(2), (64, 320))
    kernels.adapt(x, int32(5), matrices)
    if every_form:
        kernels.adapt(x, int32(5), replace(matrices, bias=torch.zeros(3, 320)))
    of_ids = AdapterMatrices(
        torch.zeros(3, 9, 16, dtype=dtype), up[:, :16, :96].contiguous(), int32(3, 1), int32(1), (96,)
    )
    kernels.adapt_embeddings(x, int32(5), int32(5), of_ids)


def compile_experts(dtype: torch.dtype, every_form: bool) -> None:
    x, gate_up, down = (torch.zeros(shape, dtype=dtype) for shape in ((5, 96), (6, 160, 96), (6, 96, 80)))
    routes = kernels.route(torch.zeros(5, 32, dtype=dtype)[:, :6], 2, False)
    kernels.experts(x, routes, ExpertWeights(Dense(gate_up), Dense(down)))
    kernels.add_scored(x, x, x, x[0])
    slots = kernels.pair_slots(int32(5), routes)
    if every_form:
        sizes = ((96, (80, 160)), (80, (96,)))
        matrices = [
            AdapterMatrices(
                torch.zeros(18, 8 * len(ends), inputs, dtype=dtype), torch.zeros(18, 8, ends[-1], dtype=dtype),
                int32(18, len(ends)), int32(len(ends)), ends,
            )
            for inputs, ends in sizes
        ]  # fmt: skip
        adapted = AdaptedPairs(kernels, slots, *matrices)
        kernels.experts(x, routes, ExpertWeights(Dense(gate_up), Dense(down)), adapted)
        kernels.add_scored(x, x, x, x[0], torch.zeros(5, 32))
        kernels.route(x, 3, True)
        biases = gate_up[:, :, 0].contiguous(), down[:, :, 0].contiguous()
        biased = ExpertWeights(Dense(gate_up), Dense(down), *biases)
        kernels.experts(x, routes, replace(biased, clamped=ClampedGate(7.0, 1.702)))


def weights_in_codes(capability: int) -> list[Weight]:
    """One for each way of the kernels, with the groups of usual checkpoints. GPUs below 8.9 have fp8 as bytes."""
    outputs, inputs = 128, 1024
    bytes_, halves = (torch.zeros(outputs, count, dtype=torch.uint8) for count in (inputs, inputs // 2))

    def groups(size: int, shifts: torch.dtype | None = None) -> Groups:
        scales = torch.zeros(outputs, inputs // size, dtype=FP16)
        if shifts == INT8:
            return Groups(size, scales, zeros=scales.to(INT8))
        return Groups(size, scales, offsets=None if shifts is None else scales)

    few: list[Weight] = [
        Int4(halves, groups(128)), Int8(bytes_.view(INT8), groups(inputs)), Table4(halves, groups(64), torch.zeros(16)),
        Fp8(bytes_ if capability < 89 else bytes_.view(FP8), groups(128)),
    ]  # fmt: skip
    others = [Int4(halves, groups(32, INT8), int32(inputs)), Int4(halves, groups(128, FP16))]
    return few + others * (capability == 90)


def compile_codes(capability: int) -> None:
    for weight in weights_in_codes(capability):
        linear = kernels.linear(weight, None, gated=False, x_type=BF16, y_type=BF16)
        for rows in (5, WIDE_ROWS):
            linear(torch.zeros(rows, 1024, dtype=BF16))
    weight = weights_in_codes(capability)[0]
    linear = kernels.linear(weight, torch.zeros(128), gated=True, x_type=FP16, y_type=FP16)
    linear(torch.zeros(5, 1024, dtype=FP16), addend=torch.zeros(5, 128))


def compile_sample() -> None:
    floats = [torch.ones(3) for _ in range(7)]
    temperature, top_p, min_p, typical_p, repetition, frequency, presence = floats
    choices = Choices(
        int32(3), int32(4, 64), int32(4), int32(3), torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64),
        temperature, int32(3), top_p, min_p, typical_p, repetition, frequency, presence,
        Bias(int32(3, 2), torch.zeros(3, 2)), Allowed(int32(2), int32(2, 9)),
        Bans(int32(4), int32(4), int32(4), int32(5), int32(7)),
        any_draws=True, any_penalties=True, any_cuts=True, any_typical=True, masks=Masks(int32(2), int32(2, 4008)),
    )  # fmt: skip
    kernels.sample(torch.zeros(3, 128_256), choices)
    only_draws = replace(choices, bias=None, allowed=None, bans=None, masks=None, any_penalties=False, any_cuts=False)
    part = kernels.reduce_part(torch.zeros(3, 16_384), only_draws, range(114_688, 128_256))
    kernels.merge_parts([part] * 8, 128_256)


def model_types(capability: int) -> tuple[torch.dtype, ...]:
    return (FP32, FP16, BF16) if capability == 90 else (BF16,)


def compile_products(capability: int, what: str) -> None:
    for dtype in model_types(capability):
        every_form = has_every_form(dtype, what)
        compile_experts(dtype, every_form)
        compile_adapters(dtype, every_form)
    if capability != 89:
        compile_codes(capability)


def has_every_form(dtype: torch.dtype, what: str) -> bool:
    return what == "types" or (what == "each" and dtype == BF16)


def compile_further(capability: int, what: str) -> None:
    """All kernels without products of matrices."""
    kernels.place(int32(5), int32(5), int32(4, 64), int32(4, 64), int32(4))
    kernels.advance(int32(4, 64), int32(4), int32(5), int32(5))
    for dtype in model_types(capability):
        compile_others(dtype, has_every_form(dtype, what))
    if capability != 89:
        compile_sample()
    for case in ATTENTION[capability]:
        compile_rope(*case)


def compile_types(capability: int, what: str) -> None:
    with compiling_for(capability) as compiled:
        compile_products(capability, what)
        if what != "products":
            compile_further(capability, what)
    for kernel in compiled:
        show(kernel)
    for case, options in [*((case, ()) for case in ATTENTION[capability]), *OPTIONS[capability]]:
        for job in table_jobs(AttentionShape(capability, *case, options=options)):
            one = compile_attention(*job)
            shown = {"kernel": one.kernel, "shared": one.shared, "fault": fault(one), "job": str(job)}
            if case in EQUAL_SHAPES and not options:
                shown["per_key"] = {str(one.shape.cache): one.code.tiles[0] / one.tile.columns}
            print(json.dumps(shown))


def show_form(*, key: str, fn: Any, **_: Any) -> bool:
    """`key` has everything for which Triton makes a form of the kernel of its own."""
    print(json.dumps({"kernel": fn.name.rpartition(".")[2], "hash": key}))
    return True  # Triton does not compile the kernel.


def compile_serving() -> None:
    knobs.runtime.jit_cache_hook = show_form
    with compiling_for(90):
        for tokens in (1, 2, 3, 16, 33):
            for first in (0, 1):  # vectors at an address that is a multiple of 16 bytes, and at another address
                rows, slots = (int32(tokens + 1 + first)[first : first + tokens] for _ in range(2))
                compile_step(rows, slots, int32(tokens + 1 + first)[first:])
                compile_masks(rows)
        for width in (2000, 2001):  # the tables are as wide as the longest row that fits, whatever that is
            compile_step(int32(2), int32(2), int32(3), width)


def compile_step(rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, width: int = 2048) -> None:
    tokens = len(rows)
    table = int32(40, width)
    ids, positions, lengths = kernels.place(rows, slots, table, table, int32(40))
    weight = torch.zeros(50, 96, dtype=BF16)
    x = kernels.embed(ids, weight)
    kernels.rms_norm(x, weight[0], 1e-5)
    kernels.add_rms_norm(x, x, weight[0], 1e-5)
    kernels.silu_mul(x)
    kernels.linear(Int8(torch.zeros(50, 96, dtype=INT8), Groups(96, torch.zeros(50, 1))), None,
                   gated=False, x_type=BF16, y_type=BF16)(x)  # fmt: skip
    kv = KvLayer(torch.zeros(65, 2 * KV_HEADS, 16, dtype=BF16))
    rotary = (torch.zeros(99, 8), torch.zeros(99, 8))
    qkv = torch.zeros(tokens, 6 * KV_HEADS * 16, dtype=BF16)
    q = kernels.rope_and_store_kv(qkv, (4 * KV_HEADS, KV_HEADS), rotary, positions, kv, slots)
    kernels.attend(q, kv, table, rows, lengths, None, PLAIN)
    kernels.attend(q, kv, table, rows, lengths, Segments(rows, positions, offsets, tokens), PLAIN)
    kernels.advance(table, int32(40), rows, ids)


def compile_masks(rows: torch.Tensor) -> None:
    logits = torch.zeros(40, 1000)
    for words in (32, 33):  # a mask may be wider than the vocabulary
        whole = int32(len(rows) + 1, words).view(-1)
        for first in (0, 1):
            bits = whole[first : first + len(rows) * words].view(len(rows), words)
            apply_masks(logits, Masks(rows, bits))


def run(job: str) -> None:
    what, _, capability = job.partition("-")
    if what == "serving":
        compile_serving()
    else:
        compile_types(int(capability), what)
    sys.stdout.flush()


if __name__ == "__main__":
    for job in sys.argv[1:]:
        print(json.dumps({"of": job}), flush=True)
        # A process of its own: what Triton keeps of one job would be found by the next.
        if not (child := os.fork()):
            run(job)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
