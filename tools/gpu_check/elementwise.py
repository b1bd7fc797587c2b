"""Compares the kernels other than attention and sampling with the reference on the same device."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gpu_check.comparing import (
    Check,
    Comparison,
    backends,
    close,
    equal,
    findings,
    type_name,
    within,
    worst,
)  # fmt: skip
from gpu_check.findings import Context, Finding
from gpu_check.pool import SCALED, random_layer
from text_generation_server.kernels.interface import KvLayer

TABLE = "The other kernels against the reference"
TOKENS, FEW_TOKENS = (1, 7, 1030), (1, 5)
HIDDEN, FEW_HIDDEN = (4096, 2880), (96,)
# (query heads, key heads, head size)
HEADS, FEW_HEADS = ((32, 8, 128), (8, 8, 64), (28, 4, 80)), ((6, 2, 24),)
# Tolerances of 8-bit numbers. Two roundings may differ by one step: of the scale for int8, of the last of three
# mantissa bits for fp8.
FP8_STEP = 0.13
# A rehearsal has no fp8: Triton's interpreter loses carries when it rounds to fp8.
REHEARSED_CACHES = (torch.float16, torch.int8)


def compare_all(context: Context) -> Iterator[Finding]:
    for dtype in (torch.float16, torch.bfloat16) if context.on_gpu else (torch.float16,):
        yield from findings(TABLE, _cases(context, dtype))
    yield from findings(TABLE, _bookkeeping(context))


def _cases(context: Context, dtype: torch.dtype) -> Iterator[tuple[Mapping[str, str], Check]]:
    tokens, widths, heads = (TOKENS, HIDDEN, HEADS) if context.on_gpu else (FEW_TOKENS, FEW_HIDDEN, FEW_HEADS)
    for T in tokens:
        for H in widths:
            for name, check in _row_kernels(context, dtype, T, H).items():
                yield {"kernel": name, "type": type_name(dtype), "shape": f"{T} × {H}"}, check
    for shape in heads:
        for cache in (dtype, *SCALED) if context.on_gpu else REHEARSED_CACHES:
            cells = {"kernel": "rope_and_store_kv", "type": f"{type_name(dtype)}, cache {type_name(cache)}"}
            yield (
                {**cells, "shape": f"{max(tokens)} tokens, heads {shape}"},
                _rope(context, dtype, cache, max(tokens), shape),
            )


def _row_kernels(context: Context, dtype: torch.dtype, tokens: int, hidden: int) -> dict[str, Check]:
    triton, reference = backends()

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=context.device).to(dtype)

    def rms_norm() -> Comparison:
        x, weight = numbers(tokens, hidden), numbers(hidden)
        return close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)

    def add_rms_norm() -> Comparison:
        x, residual, weight = numbers(tokens, hidden), numbers(tokens, hidden), numbers(hidden)
        ours = triton.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        theirs = reference.add_rms_norm(x, residual, weight, 1e-5)
        return worst(close(ours[0], theirs[0], dtype), equal(ours[1], theirs[1]))

    def silu_mul() -> Comparison:
        x = numbers(tokens, 2 * hidden)
        return close(triton.silu_mul(x), reference.silu_mul(x.float()), dtype)

    def embed() -> Comparison:
        weight = numbers(999, hidden)
        ids = torch.randint(0, 999, (tokens,), dtype=torch.int32, device=context.device)
        return equal(triton.embed(ids, weight), reference.embed(ids, weight))

    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul, "embed": embed}


def _rope(
    context: Context, dtype: torch.dtype, cache: torch.dtype, tokens: int, shape: tuple[int, int, int]
) -> Callable[[], Comparison]:
    heads, kv_heads, size = shape
    device = context.device

    def check() -> Comparison:
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device).to(dtype)
        positions = torch.randint(0, 3000, (tokens,), dtype=torch.int32, device=device)
        slots = torch.randperm(tokens + 50, device=device)[:tokens].int()
        frequencies = 1 / 10000 ** (torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(3000.0, device=device), frequencies)
        rotary = (angles.cos(), angles.sin())
        empty = random_layer(tokens + 50, kv_heads, size, cache, device)
        # The reference runs on the CPU, because torch cannot scatter fp8 on every device.
        reference_device = torch.device("cpu") if cache == torch.float8_e4m3fn else device
        results = []
        for kernels, where in zip(backends(), (device, reference_device), strict=True):
            kv = copied(empty, where)
            turned = (rotary[0].to(where), rotary[1].to(where))
            q = kernels.rope_and_store_kv(
                qkv.to(where, copy=True), (heads, kv_heads), turned, positions.to(where), kv, slots.to(where)
            )
            results.append((q.to(device), copied(kv, device)))
        (q, kv), (expected_q, expected_kv) = results
        return worst(close(q, expected_q, dtype), _same_states(kv, expected_kv, slots, dtype))

    return check


def copied(kv: KvLayer, device: torch.device) -> KvLayer:
    scales = None if kv.scales is None else kv.scales.to(device, copy=True)
    return KvLayer(kv.heads.to(device, copy=True), scales)


def _same_states(kv: KvLayer, expected: KvLayer, slots: Tensor, dtype: torch.dtype) -> Comparison:
    if kv.scales is None or expected.scales is None:
        return close(kv.heads[slots], expected.heads[slots], dtype)
    scales, expected_scales = kv.scales[slots], expected.scales[slots]
    numbers, expected_numbers = (layer.heads.float()[slots] for layer in (kv, expected))
    step = torch.ones_like(expected_numbers)
    if kv.heads.dtype.is_floating_point:
        step = FP8_STEP * expected_numbers.abs() + 2.0**-9
    states = within(
        numbers * scales.unsqueeze(2),
        expected_numbers * expected_scales.unsqueeze(2),
        1.01 * step * scales.unsqueeze(2),
    )
    return worst(states, within(scales, expected_scales, 2e-2 * expected_scales))


def _bookkeeping(context: Context) -> Iterator[tuple[Mapping[str, str], Check]]:
    rows, width = (1030, 300) if context.on_gpu else (9, 12)
    device = context.device

    def state() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        index = torch.randperm(rows + 5)[:rows].int()
        lengths = torch.randint(1, width, (rows + 5,), dtype=torch.int32)
        history, table = (torch.randint(0, 10**6, (rows + 5, width), dtype=torch.int32) for _ in range(2))
        values = torch.randint(0, 2**31 - 1, (rows,), dtype=torch.int32)
        return tuple(t.to(device) for t in (index, values, history, table, lengths))

    def place() -> Comparison:
        compared = []
        for kernels in backends():
            index, values, history, table, lengths = state()
            compared.append((*kernels.place(index, values, history, table, lengths), table))
        return worst(*(equal(ours, theirs) for ours, theirs in zip(*compared, strict=True)))

    def advance() -> Comparison:
        compared = []
        for kernels in backends():
            index, values, history, _, lengths = state()
            kernels.advance(history, lengths, index, values)
            compared.append((history, lengths))
        return worst(*(equal(ours, theirs) for ours, theirs in zip(*compared, strict=True)))

    yield {"kernel": "place", "type": "int32", "shape": f"{rows} rows"}, place
    yield {"kernel": "advance", "type": "int32", "shape": f"{rows} rows"}, advance
