"""Sends a trace to a real server, and simulates the same trace with a cost model fitted to that server's steps."""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from text_generation_benchmark.load import GenerateStream, StreamTimes, stream_once
from text_generation_benchmark.ours import server_command
from text_generation_benchmark.output import aligned_table
from text_generation_benchmark.process import get, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.simulation.cost import SimulatedModel
from text_generation_benchmark.simulation.engine import SimulatedEngine
from text_generation_benchmark.simulation.fit import Fit, fit, joined, read_log
from text_generation_benchmark.simulation.trace import Floats, Trace
from text_generation_benchmark.simulation.workloads import LogNormal, TraceWorkload, generate
from text_generation_router.scheduling.limits import Limits

# Prompt and output together fit into the demo model's 2,048 positions.
WORKLOAD = TraceWorkload(LogNormal(120, 0.8, 16, 900), LogNormal(60, 0.7, 2, 400), 400)
MAX_ROWS = 256
PREFILL_TOKENS = 1024
ROUNDS = 4
# Prompts.make counts the special tokens that the tokenizer adds at the start of a text. The part of a prompt after a
# shared prefix has no such tokens, so SPARE_TOKENS more words are drawn. This number is at least that of the special
# tokens.
SPARE_TOKENS = 4


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


def _tokens_per_s(parts: Sequence[Played]) -> float:
    return sum(part.num_tokens for part in parts) / sum(part.end_s for part in parts)


def _first_token_ms(parts: Sequence[Played], percent: float) -> float:
    return float(np.percentile(np.concatenate([part.first_token_s for part in parts]), percent)) * 1e3


def _token_ms(parts: Sequence[Played], percent: float) -> float:
    return float(np.percentile(np.concatenate([part.token_s for part in parts]), percent)) * 1e3


FIGURES: dict[str, Callable[[Sequence[Played]], float]] = {
    "output tokens/s": _tokens_per_s,
    "first token ms, p50": partial(_first_token_ms, percent=50),
    "first token ms, p90": partial(_first_token_ms, percent=90),
    "ms per token, p50": partial(_token_ms, percent=50),
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
    texts = PromptTexts(model)
    played, steps = [], []
    with tempfile.TemporaryDirectory(prefix="tgi-replay-") as folder:
        log = Path(folder) / "steps"
        command = server_command(model, Path(folder))
        limits = ["--max-concurrent-requests", str(MAX_ROWS), "--max-batch-prefill-tokens", str(PREFILL_TOKENS)]
        command = replace(command, arguments=[*command.arguments, *limits], environment={"STEP_LOG": str(log)})
        with running(command, Path(folder) / "log"):
            for trace in traces:
                before = len(log.read_text().splitlines()) if log.exists() else 0
                played.append(play(command.port, trace, texts.of(trace)))
                steps.append(read_log(log.read_text().splitlines()[before:]))
            slots = int(json.loads(get(command.port, "/info"))["max_batch_total_tokens"])
    fitted = fit(joined(steps[::2]))
    bare = SimulatedModel(model.name, fitted.cost, slots, 0.0, f"fitted to {fitted.num_steps:,} steps of {model.name}")
    within_ms = _first_token_ms([_simulate(bare, trace) for trace in traces[::2]], 50)
    beyond_s = (_first_token_ms(played[::2], 50) - within_ms) / 1e3
    simulated_model = replace(bare, overhead_s=max(0.0, beyond_s))
    simulated = [_simulate(simulated_model, trace) for trace in traces[1::2]]
    return ReplayComparison(rate, simulated_model, fitted, played[1::2], simulated)


def _simulate(model: SimulatedModel, trace: Trace) -> Played:
    limits = Limits(model.slots, MAX_ROWS, PREFILL_TOKENS)
    outcome = SimulatedEngine(trace, model.cost, limits, bucket_s=max(trace.duration_s, 1.0)).run()
    times = outcome.times
    several = times.output_tokens > 1
    return Played(
        times.first_s - times.arrival_s + model.overhead_s,
        (times.last_s - times.first_s)[several] / (times.output_tokens[several] - 1),
        int(times.output_tokens.sum()),
        outcome.end_s,
    )


class PromptTexts:
    """Makes prompts as texts that have the numbers of tokens and the shared prefixes of a trace."""

    def __init__(self, model: Path) -> None:
        self._prompts = Prompts(model)
        self._prefixes: dict[tuple[int, int], str] = {}

    def of(self, trace: Trace) -> list[str]:
        columns = (trace.prompt_tokens.tolist(), trace.prefix_id.tolist(), trace.prefix_tokens.tolist())
        return [self._text(*lengths) for lengths in zip(*columns, strict=True)]

    def _text(self, prompt_tokens: int, prefix_id: int, prefix_tokens: int) -> str:
        if not prefix_tokens:
            return self._prompts.make(1, prompt_tokens)[0]
        prefix = self._prefixes.get((prefix_id, prefix_tokens))
        if prefix is None:
            prefix = self._prefixes[prefix_id, prefix_tokens] = self._prompts.make(1, prefix_tokens)[0]
        own = prompt_tokens - prefix_tokens
        words = self._prompts.make(1, own + SPARE_TOKENS)[0].split(" ")
        return " ".join([prefix, *words[-own:]])


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
