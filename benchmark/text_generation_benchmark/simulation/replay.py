"""Sends a trace to a real server, and simulates the same trace with a cost model fitted to that server's steps."""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import uvloop

from text_generation_benchmark.load import GenerateStream, StreamTimes, stream_once
from text_generation_benchmark.ours import server_command
from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.process import get, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.simulation.cost import Fit, SimulatedModel, fit, joined, read_log
from text_generation_benchmark.simulation.engine import SimulatedEngine
from text_generation_benchmark.simulation.trace import Floats, LogNormal, Trace, TraceWorkload, generate
from text_generation_router.scheduling.request import Limits

# Prompt and output together fit into the demo model's 2,048 positions.
WORKLOAD = TraceWorkload(LogNormal(120, 0.8, 16, 900), LogNormal(60, 0.7, 2, 400), 400)
MAX_ROWS = 256
PREFILL_TOKENS = 1024
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Played:
    """Times of a trace's requests as its clients measured them."""

    first_token_s: Floats
    token_s: Floats  # mean seconds between tokens, for each request with several tokens
    num_tokens: int
    end_s: float  # time at which the last token came


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    rate: float
    fitted: SimulatedModel
    fit: Fit
    real: Sequence[Played]
    simulated: Sequence[Played]

    def as_markdown(self) -> str:
        rows = []
        for name, figure in FIGURES.items():
            real, simulated = figure(self.real), figure(self.simulated)
            rows.append((name, f"{real:,.1f}", f"{simulated:,.1f}", f"{simulated / real:.2f}"))
        count = sum(len(played.first_token_s) for played in self.real)
        about = (
            f"{count} requests, {self.rate:g} a second ({WORKLOAD}), in {len(self.real)} parts. Before each came"
            f" another trace: the cost of a step was fitted to their {self.fit.num_steps:,} steps (median error"
            f" {self.fit.error:.1%}), and what a first token takes outside the steps to their median:"
            f" {self.fitted.overhead_s * 1e3:.1f} ms."
        )
        return f"{about}\n\n{aligned_table([('', 'real', 'simulated', 'simulated / real'), *rows])}"


def _ms(parts: Sequence[Played], times: str, percent: float) -> float:
    return float(np.percentile(np.concatenate([getattr(part, times) for part in parts]), percent)) * 1e3


FIGURES: dict[str, Callable[[Sequence[Played]], float]] = {
    "output tokens/s": lambda parts: sum(part.num_tokens for part in parts) / sum(part.end_s for part in parts),
    "first token ms, p50": lambda parts: _ms(parts, "first_token_s", 50),
    "first token ms, p90": lambda parts: _ms(parts, "first_token_s", 90),
    "ms per token, p50": lambda parts: _ms(parts, "token_s", 50),
}


def compare_with_server(model: Path, rate: float, duration_s: float, seed: int) -> ReplayComparison:
    """Starts a server on `model`, sends traces to it and simulates them. RuntimeError if the server does not start, or
    refuses a request.

    The machine's speed changes from minute to minute, so traces used for fitting alternate with traces used for
    comparing.
    """
    traces = [
        generate(WORKLOAD, rate, duration_s / ROUNDS, seed * 2 * ROUNDS + i).with_exact_lengths()
        for i in range(2 * ROUNDS)
    ]
    prompts = Prompts(model)
    played, steps = [], []
    with tempfile.TemporaryDirectory(prefix="tgi-replay-") as folder:
        log = Path(folder) / "steps"
        command = server_command(model, Path(folder))
        limits = ["--max-concurrent-requests", str(MAX_ROWS), "--max-batch-prefill-tokens", str(PREFILL_TOKENS)]
        command = replace(command, arguments=[*command.arguments, *limits], environment={"STEP_LOG": str(log)})
        with running(command, Path(folder) / "log"):
            for trace in traces:
                before = len(log.read_text().splitlines()) if log.exists() else 0
                texts = [prompts.make(1, count)[0] for count in trace.prompt_tokens.tolist()]
                played.append(play(command.port, trace, texts))
                steps.append(read_log(log.read_text().splitlines()[before:]))
            slots = int(json.loads(get(command.port, "/info"))["max_batch_total_tokens"])
    fitted = fit(joined(steps[::2]))
    bare = SimulatedModel(model.name, fitted.cost, slots, 0.0, f"fitted to {fitted.num_steps:,} steps of {model.name}")
    within_ms = _ms([_simulate(bare, trace) for trace in traces[::2]], "first_token_s", 50)
    beyond_s = (_ms(played[::2], "first_token_s", 50) - within_ms) / 1e3
    simulated_model = replace(bare, overhead_s=max(0.0, beyond_s))
    simulated = [_simulate(simulated_model, trace) for trace in traces[1::2]]
    return ReplayComparison(rate, simulated_model, fitted, played[1::2], simulated)


def _simulate(model: SimulatedModel, trace: Trace) -> Played:
    limits = Limits(model.slots, MAX_ROWS, PREFILL_TOKENS)
    outcome = SimulatedEngine(trace, model.cost, limits, bucket_s=max(trace.duration_s, 1.0)).run()
    several = trace.output_tokens > 1
    return Played(
        outcome.first_s - trace.arrival_s + model.overhead_s,
        (outcome.last_s - outcome.first_s)[several] / (trace.output_tokens[several] - 1),
        int(trace.output_tokens.sum()),
        outcome.end_s,
    )


def play(port: int, trace: Trace, prompts: Sequence[str]) -> Played:
    """Sends each request at its arrival time. RuntimeError if a request is refused, or makes more or fewer tokens than
    the trace says.
    """

    async def one(started: float, index: int) -> tuple[float, StreamTimes]:
        await asyncio.sleep(started + trace.arrival_s[index] - time.perf_counter())
        sent = time.perf_counter() - started
        return sent, await stream_once(port, GenerateStream(), prompts[index], int(trace.output_tokens[index]))

    async def run() -> list[tuple[float, StreamTimes]]:
        started = time.perf_counter()
        return await asyncio.gather(*(one(started, index) for index in range(len(trace))))

    streams = uvloop.run(run())
    return Played(
        np.array([times.first for _, times in streams]),
        np.array([times.per_token for _, times in streams if times.tokens > 1]),
        sum(times.tokens for _, times in streams),
        max(sent + times.last for sent, times in streams),
    )
