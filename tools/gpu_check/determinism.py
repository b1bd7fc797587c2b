"""Checks that each kernel gives a row the same result, to the bit, alone, with other rows and at another position in
the batch.

Linear layers are left out: a GPU's library for matrix products does not promise this for different numbers of rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace

import torch
from torch import Tensor

from gpu_check.comparing import Check, Comparison, backends, equal, findings, type_name, worst
from gpu_check.findings import Context, Finding
from gpu_check.pool import Pool
from gpu_check.sampling import neutral, variants
from text_generation_server.kernels.interface import Bias, Choices
from text_generation_server.kernels.triton.interpreter import products_in_fixed_order

TABLE = "A row alone and in a batch, to the bit"
LENGTHS = (1, 64, 257, 1000, 2049, 77, 5000, 300)
FEW_LENGTHS = (5, 64, 257)
RUNS = ((0, 999, 1000), (1, 0, 3), (2, 0, 700), (3, 300, 450))
FEW_RUNS = ((0, 64, 65), (1, 0, 3), (2, 30, 40))


def compare_all(context: Context) -> Iterator[Finding]:
    with nullcontext() if context.on_gpu else products_in_fixed_order():
        yield from _compare_all(context)


def _compare_all(context: Context) -> Iterator[Finding]:
    for dtype in (torch.float16, torch.bfloat16) if context.on_gpu else (torch.float16,):
        caches = (dtype, torch.int8) if context.on_gpu else (dtype,)
        for cache in caches:
            cells = {"type": type_name(dtype), "cache": type_name(cache)}
            yield from findings(TABLE, _attention(context, dtype, cache, cells))
        yield from findings(TABLE, _rows(context, dtype, {"type": type_name(dtype), "cache": ""}))
    yield from findings(TABLE, _sampling(context))


def _attention(
    context: Context, dtype: torch.dtype, cache: torch.dtype, cells: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, str], Check]]:
    kv_heads, group, size = (8, 4, 128) if context.on_gpu else (2, 3, 16)
    lengths, runs = (LENGTHS, RUNS) if context.on_gpu else (FEW_LENGTHS, FEW_RUNS)
    triton, _ = backends()

    def queries(tokens: int) -> Tensor:
        return torch.randn(tokens, kv_heads * group, size, device=context.device).to(dtype)

    def decode() -> Comparison:
        pool = Pool(lengths, kv_heads, size, cache, context.device)
        q = queries(len(lengths))

        def attend(rows: list[int]) -> Tensor:
            return triton.attend(
                q[rows].contiguous(), pool.kv, pool.table, *pool.decode_arguments(rows), None, pool.scale
            )

        together = attend(list(range(len(lengths))))
        backwards = attend(list(range(len(lengths)))[::-1]).flip(0)
        alone = torch.cat([attend([row]) for row in range(len(lengths))])
        return worst(equal(alone, together), equal(backwards, together))

    def prefill() -> Comparison:
        pool = Pool([end for _, _, end in runs], kv_heads, size, cache, context.device)
        parts = [queries(end - start) for _, start, end in runs]

        def attend(q: Tensor, some: list[tuple[int, int, int]]) -> Tensor:
            no_rows = pool.decode_arguments([])
            return triton.attend(q, pool.kv, pool.table, *no_rows, pool.segments(some), pool.scale)

        together = attend(torch.cat(parts), list(runs))
        alone = torch.cat([attend(part, [run]) for part, run in zip(parts, runs, strict=True)])
        row, start, end = runs[-1]
        middle = start + 3
        cut = attend(parts[-1], [(row, start, middle), (row, middle, end)])
        return worst(equal(alone, together), equal(cut, together[-len(cut) :]))

    yield {"kernel": "attend_decode", **cells}, decode
    yield {"kernel": "attend_prefill, cut elsewhere too", **cells}, prefill


def _rows(context: Context, dtype: torch.dtype, cells: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], Check]]:
    tokens, hidden = (64, 4096) if context.on_gpu else (3, 96)
    triton, _ = backends()

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=context.device).to(dtype)

    def norm() -> Comparison:
        x, residual, weight = numbers(tokens, hidden), numbers(tokens, hidden), numbers(hidden)

        def run(rows: slice) -> Tensor:
            return triton.add_rms_norm(x[rows].clone(), residual[rows].clone(), weight, 1e-5)[0]

        return equal(torch.cat([run(slice(i, i + 1)) for i in range(tokens)]), run(slice(None)))

    def silu() -> Comparison:
        x = numbers(tokens, 2 * hidden)
        return equal(torch.cat([triton.silu_mul(row) for row in torch.split(x, 1)]), triton.silu_mul(x))

    yield {"kernel": "add_rms_norm", **cells}, norm
    yield {"kernel": "silu_mul", **cells}, silu


def _sampling(context: Context) -> Iterator[tuple[Mapping[str, str], Check]]:
    rows, length, vocabulary = (16, 300, 128256) if context.on_gpu else (3, 20, 500)
    triton, _ = backends()
    base = neutral(rows, length, vocabulary, context.device)
    *_, (_, choices) = variants(base, vocabulary)

    def sample() -> Comparison:
        logits = torch.randn(rows, vocabulary, device=context.device) * 3
        alone = [triton.sample(logits[i : i + 1].clone(), only(choices, i)) for i in range(rows)]
        together = triton.sample(logits, choices)
        return worst(
            equal(torch.cat([chosen.ids_R for chosen in alone]), together.ids_R),
            equal(torch.cat([chosen.logprobs_R for chosen in alone]), together.logprobs_R),
        )

    yield {"kernel": "sample, every option", "type": "float32", "cache": ""}, sample


def only(choices: Choices, i: int) -> Choices:
    """The choices of row `i` as choices of a single row."""
    columns = {f.name: getattr(choices, f.name)[i : i + 1].clone() for f in fields(choices) if f.name.endswith("_R")}
    bias = choices.bias
    if bias is not None:
        bias = Bias(bias.tokens_RB[i : i + 1].clone(), bias.values_RB[i : i + 1].clone())
    return replace(choices, bias=bias, **columns)
