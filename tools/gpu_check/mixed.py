"""Mixed steps: a decoding row has the same bits beside a prompt's chunk as alone, and what such a step costs."""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch

from gpu_check.comparing import equal, worst
from gpu_check.findings import Case, Context, Measured
from gpu_check.runners import SPARE, Player, RowByRow, RunnerLoad, make_runner
from gpu_check.states import backends
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_server.kernels.interface import Kernels

BITS, COST = "A row alone and beside a chunk, to the bit", "Mixed steps"
STEPS = 3
REHEARSED = LlamaShape(
    hidden=64, intermediate=96, layers=1, heads=4, kv_heads=2, vocabulary=2000, max_positions=1024, tied=False
)


@dataclass(frozen=True, slots=True)
class Crowd:
    rows: int
    context: int  # tokens of each row
    chunk: int  # prompt tokens beside them


# Chunks of 100 tokens are those of a chat; the second load shows what a long prompt costs rows with long contexts.
CROWDS = (Crowd(1, 1000, 100), Crowd(64, 1000, 100), Crowd(64, 1000, 4096), Crowd(8, 32_000, 4096))
FEW = (Crowd(2, 20, 5),)


def measure(context: Context) -> Iterator[Case]:
    lengths = (70, 1000, 5000) if context.on_gpu else (70,)
    for length in lengths:

        def compare(length: int = length) -> Iterable[Measured]:
            yield same_bits(context, length)

        yield Case(BITS, {"row of": f"{length} tokens", "beside": "a chunk of 100 tokens"}, compare)
    for crowd in CROWDS if context.on_gpu else FEW:

        def cost(crowd: Crowd = crowd) -> Iterable[Measured]:
            yield step_times(context, crowd)

        cells = {"rows": f"{crowd.rows} of {crowd.context} tokens", "chunk": f"{crowd.chunk} tokens"}
        yield Case(COST, cells, cost)


def same_bits(context: Context, length: int) -> Measured:
    """Two tokens after a context, decoded alone, and with the second of them beside another request's chunk."""
    chunk, dtype = (100, torch.bfloat16) if context.on_gpu else (9, torch.float16)
    shape = replace(LLAMA_8B, layers=2) if context.on_gpu else REHEARSED
    load = RunnerLoad(
        shape=shape,
        rows=2,
        longest=length + 200,
        chunk=chunk + 1,
        slots=length + chunk + 1 + 2 * SPARE,
        dtype=dtype,
        graphs=False,
    )
    triton, _ = backends()
    with fixed_order(context):
        runner = make_runner(load, context.device, cast(Kernels, RowByRow(triton)))
        results = []
        for beside in (False, True):
            runner.clear(None)
            torch.manual_seed(length)
            player = Player(runner, load)
            player.fill_cache()
            player.join_all(1, length)
            # The chunk is not its prompt's last, so that one row is sampled in both cases.
            chunks = [player.chunk(1, chunk + 1, end=chunk)] if beside else []
            out = player.launch([0], chunks).wait()
            results.append((out.token_ids, out.logprobs))
    return worst(*(equal(ours, theirs) for ours, theirs in zip(*results, strict=True)))


def fixed_order(context: Context) -> AbstractContextManager[None]:
    if context.on_gpu:
        return nullcontext()
    from text_generation_server.kernels.triton.interpreter import products_in_fixed_order

    return products_in_fixed_order()


def step_times(context: Context, crowd: Crowd) -> Measured:
    """Means of STEPS steps, each after a step that compiled: decode steps, and the same rows beside a chunk."""
    shape = replace(LLAMA_8B, max_positions=131_072) if context.on_gpu else REHEARSED
    chunks = STEPS + 1
    slots = crowd.rows * (crowd.context + SPARE) + chunks * (crowd.chunk + 1 + SPARE)
    longest = max(crowd.context, crowd.chunk + 1) + SPARE
    load = RunnerLoad(shape, crowd.rows + chunks, longest, crowd.chunk, slots)
    player = Player(make_runner(load, context.device), load)
    player.fill_cache()
    rows = player.join_all(crowd.rows, crowd.context)
    decode = [timed(player, rows, False, crowd, number) for number in range(chunks)][1:]
    mixed = [timed(player, rows, True, crowd, number) for number in range(chunks)][1:]
    cells: dict[str, str] = {}
    for name, times in (("decode", decode), ("mixed", mixed)):
        host, wall, device = (1e3 * sum(column) / STEPS for column in zip(*times, strict=True))
        cells |= {f"{name}: device ms": f"{device:.2f}", f"{name}: wall ms": f"{wall:.2f}"}
        cells |= {f"{name}: host ms": f"{host:.2f}"}
        if name == "mixed":
            cells["mixed: host µs a layer"] = f"{1e3 * host / shape.layers:.0f}"
    return Measured(cells)


def timed(player: Player, rows: list[int], mixed: bool, crowd: Crowd, number: int) -> tuple[float, float, float]:
    """(seconds of the call, until the result is there, on the device) of one step."""
    request = len(rows) + number
    chunks = [player.chunk(request, crowd.chunk + 1, end=crowd.chunk)] if mixed else []
    started = time.perf_counter()
    pending = player.launch(rows, chunks)
    launched = time.perf_counter()
    out = pending.wait()
    done = time.perf_counter()
    return launched - started, done - started, (out.forward_ns + out.sampling_ns) / 1e9
