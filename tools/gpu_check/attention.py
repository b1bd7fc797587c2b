"""Compares the Triton kernels of attention with the reference, which computes the same rounded numbers in float32."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpu_check.comparing import Check, Comparison, backends, close, findings, type_name
from gpu_check.findings import Context, Finding
from gpu_check.pool import Pool, int32, widened
from text_generation_server.kernels.interface import KvLayer, Segments

TABLE = "Attention against the reference"
# (head size, query heads per key head)
SHAPES = ((128, 4), (128, 1), (128, 8), (64, 4), (64, 7), (80, 8), (80, 1))
FEW_SHAPES = ((128, 4), (64, 7), (80, 1))
REHEARSED = ((80, 7),)
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
# Context lengths around the edges of tiles and splits, and one that needs more than the largest number of splits.
LENGTHS = (1, 2, 63, 64, 65, 128, 255, 256, 257, 1000, 4097, 8500)
FEW_LENGTHS = (65, 1, 257)
# (start, end) of chunks: single tokens, chunks without a cached prefix, chunks with a cached prefix.
SPANS = ((0, 1), (63, 64), (8191, 8192), (0, 2), (0, 65), (1, 3), (63, 320), (0, 1000), (3584, 4097))
FEW_SPANS = ((69, 70), (60, 66))


def in_float16(context: Context) -> Iterator[Finding]:
    return _compare(context, torch.float16, (torch.float16,), SHAPES)


def in_bfloat16(context: Context) -> Iterator[Finding]:
    return _compare(context, torch.bfloat16, (torch.bfloat16,), SHAPES)


def over_8_bits_in_float16(context: Context) -> Iterator[Finding]:
    return _compare(context, torch.float16, EIGHT_BITS, FEW_SHAPES)


def over_8_bits_in_bfloat16(context: Context) -> Iterator[Finding]:
    return _compare(context, torch.bfloat16, EIGHT_BITS, FEW_SHAPES)


def _compare(
    context: Context, dtype: torch.dtype, caches: tuple[torch.dtype, ...], shapes: tuple[tuple[int, int], ...]
) -> Iterator[Finding]:
    # Triton's interpreter computes bfloat16 wrongly, without an error.
    if not context.on_gpu and dtype == torch.bfloat16:
        yield Finding(TABLE, {"kernel": "all", "type": "bfloat16", "shape": "not rehearsed: needs a GPU"})
        return
    for size, group in shapes if context.on_gpu else REHEARSED:
        for cache in caches:
            cells = {"type": type_name(dtype), "cache": type_name(cache), "shape": f"head {size}, group {group}"}
            yield from findings(TABLE, _cases(context, dtype, cache, size, group, cells))


def _cases(
    context: Context, dtype: torch.dtype, cache: torch.dtype, size: int, group: int, cells: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, str], Check]]:
    kv_heads = 8 if context.on_gpu else 2
    lengths, spans = (LENGTHS, SPANS) if context.on_gpu else (FEW_LENGTHS, FEW_SPANS)

    def queries(tokens: int) -> Tensor:
        return torch.randn(tokens, kv_heads * group, size, device=context.device).to(dtype)

    def decode() -> Comparison:
        pool = Pool(lengths, kv_heads, size, cache, context.device)
        layers = (pool.kv, widened(pool.kv))
        rows, own_lengths = pool.decode_arguments(range(len(lengths))[::-1])
        q = queries(len(lengths))
        ours, theirs = (
            kernels.attend(numbers, kv, pool.table, rows, own_lengths, None, pool.scale)
            for kernels, numbers, kv in zip(backends(), (q, q.float()), layers, strict=True)
        )
        return close(ours, theirs, dtype)

    def prefill() -> Comparison:
        pool = Pool([end for _, end in spans], kv_heads, size, cache, context.device)
        layers = (pool.kv, widened(pool.kv))
        segments = pool.segments([(row, start, end) for row, (start, end) in enumerate(spans)])
        q = queries(sum(end - start for start, end in spans))
        no_rows = int32([], context.device)
        ours, theirs = (
            kernels.attend(numbers, kv, pool.table, no_rows, no_rows, segments, pool.scale)
            for kernels, numbers, kv in zip(backends(), (q, q.float()), layers, strict=True)
        )
        return close(ours, theirs, dtype)

    yield {"kernel": "attend_decode", **cells}, decode
    yield {"kernel": "attend_prefill", **cells}, prefill


def beyond_31_bits(context: Context) -> Iterator[Finding]:
    """Checks slots whose numbers come after the first 2^31 of a tensor. The tensor really has this size."""
    cells = {"type": "bfloat16", "cache": "bfloat16", "shape": "1.2 M slots of 2048 numbers"}
    if not context.on_gpu:
        yield Finding(TABLE, {"kernel": "all", **cells, "shape": "not rehearsed: needs a GPU's memory"})
        return
    kv_heads, size, slots, length = 8, 128, 1_200_000, 700
    group = 4
    heads = torch.zeros((slots + 1, 2 * kv_heads, size), dtype=torch.bfloat16, device=context.device)
    order = torch.randperm(slots // 20, device=context.device)[:length].int() + slots - slots // 20
    kv, table = KvLayer(heads), order.unsqueeze(0)
    triton, reference = backends()
    qkv = torch.randn(length, (kv_heads * group + 2 * kv_heads) * size, device=context.device).bfloat16()
    positions = torch.arange(length, dtype=torch.int32, device=context.device)
    still = (
        torch.ones(length, size // 2, device=context.device),
        torch.zeros(length, size // 2, device=context.device),
    )
    row, ends = int32([0], context.device), int32([0, length], context.device)
    segments = Segments(row, row, ends, length)

    def stored() -> Comparison:
        triton.rope_and_store_kv(qkv.clone(), (kv_heads * group, kv_heads), still, positions, kv, order)
        written = qkv.view(length, -1, size)[:, kv_heads * group :]
        return close(heads[order], written, torch.bfloat16)

    def decoded() -> Comparison:
        q = torch.randn(1, kv_heads * group, size, device=context.device).bfloat16()
        arguments = (kv, table, row, int32([length], context.device), None, size**-0.5)
        return close(triton.attend(q, *arguments), reference.attend(q.float(), *arguments), torch.bfloat16)

    def filled() -> Comparison:
        q = torch.randn(length, kv_heads * group, size, device=context.device).bfloat16()
        arguments = (kv, table, row[:0], row[:0], segments, size**-0.5)
        return close(triton.attend(q, *arguments), reference.attend(q.float(), *arguments), torch.bfloat16)

    checks = {"rope_and_store_kv": stored, "attend_decode": decoded, "attend_prefill": filled}
    yield from findings(TABLE, (({"kernel": name, **cells}, check) for name, check in checks.items()))
