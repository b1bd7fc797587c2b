"""Compiles every Triton kernel for GPUs, without a GPU, by calling the kernels' own launchers on CPU tensors.

This is a script and not a test, because Triton's interpreter must be off in its process. Prints one line of JSON for
each launch, with the hash of the compiled kernel. `types`: all kernels for all types of numbers; `serving`: steps of
many sizes.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from text_generation_server.kernels import triton as kernels
from text_generation_server.kernels.interface import Bias, Choices, KvLayer, Segments

FP32, FP16, BF16, INT8, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
KV_HEADS = 2
# (compute capability, type of the model, type of the cache, group, head size)
ATTENTION = [
    (80, BF16, BF16, 4, 128),
    (90, BF16, BF16, 4, 128),
    (90, FP16, FP16, 7, 96),
    (90, FP32, FP32, 3, 16),
    (90, BF16, INT8, 4, 128),
    (90, FP16, FP8, 3, 80),
]


class NoDriver:
    """Stands in for the driver of a GPU of the given kind: kernels are compiled for this GPU and never run."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


launch = JITFunction.run


def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    print(
        json.dumps({"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, "hash": kernel.hash}), flush=True
    )
    return kernel


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def compile_attention(dtype: torch.dtype, cache: torch.dtype, group: int, size: int) -> None:
    heads = (group * KV_HEADS, KV_HEADS)
    scales = torch.zeros(65, 2 * KV_HEADS) if cache in (INT8, FP8) else None
    kv = KvLayer(torch.zeros(65, 2 * KV_HEADS, size, dtype=cache), scales)
    rotary = (torch.zeros(99, size // 2), torch.zeros(99, size // 2))
    qkv = torch.zeros(8, (group + 2) * KV_HEADS * size, dtype=dtype)
    q = kernels.rope_and_store_kv(qkv, heads, rotary, int32(8), kv, int32(8))
    segments = Segments(int32(2), int32(2), int32(3), 4)
    kernels.attend(q, kv, int32(16, 2048), int32(4), int32(4), segments, 0.1)


def compile_others(dtype: torch.dtype) -> None:
    x = torch.zeros(5, 96, dtype=dtype)
    kernels.embed(int32(5), x)
    kernels.rms_norm(x, x[0], 1e-5)
    kernels.add_rms_norm(x, x, x[0], 1e-5)
    kernels.silu_mul(x)


def compile_sample() -> None:
    floats = [torch.ones(3) for _ in range(6)]
    temperature, top_p, min_p, typical_p, repetition, frequency = floats
    choices = Choices(
        int32(3), int32(4, 64), int32(4), int32(3), torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64),
        temperature, int32(3), top_p, min_p, typical_p, repetition, frequency, Bias(int32(3, 2), torch.zeros(3, 2)),
        any_draws=True, any_penalties=True, any_cuts=True, any_typical=True,
    )  # fmt: skip
    kernels.sample(torch.zeros(3, 128_256), choices)


def compile_types() -> None:
    driver.set_active(NoDriver(90))
    kernels.place(int32(5), int32(5), int32(4, 64), int32(4, 64), int32(4))
    kernels.advance(int32(4, 64), int32(4), int32(5), int32(5))
    for dtype in (FP32, FP16, BF16):
        compile_others(dtype)
    for capability, *case in ATTENTION:
        driver.set_active(NoDriver(capability))
        compile_attention(*case)
    for capability in (80, 90):
        driver.set_active(NoDriver(capability))
        compile_sample()


def compile_serving() -> None:
    driver.set_active(NoDriver(90))
    for tokens in (1, 2, 3, 16, 33):
        for first in (0, 1):  # vectors at an address that is a multiple of 16 bytes, and at another address
            rows, slots = (int32(tokens + 1 + first)[first : first + tokens] for _ in range(2))
            compile_step(rows, slots, int32(tokens + 1 + first)[first:])


def compile_step(rows: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor) -> None:
    tokens = len(rows)
    table = int32(40, 2048)
    ids, positions, lengths = kernels.place(rows, slots, table, table, int32(40))
    weight = torch.zeros(50, 96, dtype=BF16)
    x = kernels.embed(ids, weight)
    kernels.rms_norm(x, weight[0], 1e-5)
    kernels.add_rms_norm(x, x, weight[0], 1e-5)
    kernels.silu_mul(x)
    kv = KvLayer(torch.zeros(65, 2 * KV_HEADS, 16, dtype=BF16))
    rotary = (torch.zeros(99, 8), torch.zeros(99, 8))
    qkv = torch.zeros(tokens, 6 * KV_HEADS * 16, dtype=BF16)
    q = kernels.rope_and_store_kv(qkv, (4 * KV_HEADS, KV_HEADS), rotary, positions, kv, slots)
    kernels.attend(q, kv, table, rows, lengths, None, 0.1)
    kernels.attend(q, kv, table, rows, lengths, Segments(rows, positions, offsets, tokens), 0.1)
    kernels.advance(table, int32(40), rows, ids)


if __name__ == "__main__":
    JITFunction.run = compile_only
    {"types": compile_types, "serving": compile_serving}[sys.argv[1]]()
