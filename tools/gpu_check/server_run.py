"""Measures the whole server on a Llama of 8 billion random weights: decode steps and a prefill, as shares of the
ceilings.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from gpu_check.ceilings import MATRIX, MEMORY
from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED, kv_bytes, prefill_flops, weight_bytes
from gpu_check.plans import STOP_S
from gpu_check.windows import Page, Watch, Window, longest_window
from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.load import GenerateStream, LoadResult, run_load
from text_generation_benchmark.process import ServerCommand, free_port, get, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_benchmark.workload import Workload

# Less than a stage gets to end, so that a server that hangs never outlives its stage.
SERVER_STOP_S = STOP_S - 5
START, DECODE, PREFILL, BESIDE = "Server: start", "Server: decode", "Server: prefill", "Server: a prompt beside streams"
PROGRAMS = {"text-generation-server": "text_generation_server", "text-generation-router": "text_generation_router"}
START_S = 150
PROMPT_RUNS = 3
PROBES = 7  # short prompts that are sent beside running streams
WARM_UP_PART = 4
LOG_LINES = 60


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """`beside`: the streams, and the short prompt that is sent while they decode."""

    shape: LlamaShape
    decodes: tuple[Workload, ...]
    prompt: Workload | None
    beside: tuple[Workload, Workload] | None
    arguments: tuple[str, ...]
    cache: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.cache} cache".removeprefix("torch.")


# Without the ratio, requests join in groups, and only the measured run has all 256 rows together, graphs unrecorded.
LIMITS = ("--max-input-tokens", "4096", "--max-total-tokens", "4608", "--max-batch-prefill-tokens", "4096",
          "--waiting-served-ratio", "0")  # fmt: skip
# In the middle of the measured steps, the context is about 1,000 tokens long.
STREAMS_1, STREAMS_64, STREAMS_256 = Workload(1, 256, 512), Workload(64, 808, 384), Workload(256, 840, 320)
FULL = ServerPlan(
    LLAMA_8B, (STREAMS_64, STREAMS_1, STREAMS_256), Workload(1, 4096, 1), (STREAMS_64, Workload(1, 64, 1)), LIMITS
)
EIGHT_BITS = replace(
    FULL, decodes=(STREAMS_64, STREAMS_256), prompt=None, beside=None, cache=torch.float8_e4m3fn,
    arguments=(*LIMITS, "--kv-cache-dtype", "fp8_e4m3fn"),
)  # fmt: skip
AGAIN = replace(FULL, beside=None)
REHEARSAL = ServerPlan(
    REHEARSED, (Workload(4, 32, 900),), Workload(1, 256, 1), (Workload(2, 32, 900), Workload(1, 16, 1)),
    ("--max-input-tokens", "256", "--max-total-tokens", "1024", "--max-batch-prefill-tokens", "256",
     "--waiting-served-ratio", "0"),
)  # fmt: skip
REHEARSAL_AGAIN = replace(
    REHEARSAL, prompt=None, beside=None, cache=torch.float8_e4m3fn,
    arguments=(*REHEARSAL.arguments, "--kv-cache-dtype", "fp8_e4m3fn"),
)  # fmt: skip


def measure(context: Context) -> Iterator[Case]:
    for plan in (FULL, EIGHT_BITS) if context.on_gpu else (REHEARSAL,):
        yield from served(context, plan)


def measure_again(context: Context) -> Iterator[Case]:
    """After the tuning: the same targets."""
    return served(context, AGAIN if context.on_gpu else REHEARSAL_AGAIN)


def served(context: Context, plan: ServerPlan) -> Iterator[Case]:
    """Starts a server, and measures it case by case. If it does not start, there are no further cases."""
    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as name, ExitStack() as stack:
        folder = Path(name)
        write_without_weights(folder / "model", plan.shape)
        prompts = Prompts(folder / "model")
        command = server_command(plan, folder)
        stack.callback(_print_end_of, folder / "log")

        started = []

        def start() -> Iterable[Measured]:
            started_s = time.perf_counter()
            stack.enter_context(running(command, folder / "log", SERVER_STOP_S))
            started.append(True)
            seconds = time.perf_counter() - started_s
            yield Measured({"s": f"{seconds:.1f}"}, {f"s to start, {plan.name}": seconds})

        server = {"server": plan.name}
        yield Case(START, server | {"until": "it answers"}, start)
        if not started:
            return
        for workload in plan.decodes:
            cells = server | {"streams": str(workload.concurrency)}
            yield Case(DECODE, cells, partial(_decode, context, plan, command.port, prompts, workload=workload))
        if plan.prompt:
            cells = server | {"tokens": str(plan.prompt.input_tokens)}
            yield Case(PREFILL, cells, partial(_prefill, context, plan, command.port, prompts, workload=plan.prompt))
        if plan.beside:
            cells = server | {"streams": f"{plan.beside[0].concurrency}, and a prompt"}
            yield Case(BESIDE, cells, partial(_beside, command.port, prompts, *plan.beside))


def server_command(plan: ServerPlan, folder: Path) -> ServerCommand:
    """The command that runs the launcher's module. Small scripts replace the programs that it starts, so nothing has to
    be installed.
    """
    scripts = folder / "programs"
    scripts.mkdir()
    for program, package in PROGRAMS.items():
        script = scripts / program
        script.write_text(f"#!{sys.executable}\nfrom {package}.cli import main\n\nmain()\n")
        script.chmod(0o755)
    start = (
        f"from pathlib import Path; from text_generation_launcher.cli import main; main(None, [Path({str(scripts)!r})])"
    )
    port = free_port()
    arguments = [
        sys.executable, "-c", start, "--model-id", str(folder / "model"), "--load-format", "dummy",
        "--dtype", "bfloat16", "--num-shard", "1", "--hostname", "127.0.0.1", "--port", str(port),
        "--shard-uds-path", str(folder / "shard"), "--max-concurrent-requests", "300",
        "--graceful-termination-timeout", "1", *plan.arguments,
    ]  # fmt: skip
    return ServerCommand("the server", arguments, port, "/health", START_S)


def _print_end_of(log: Path) -> None:
    """Into the stage's log, which is kept if a case fails."""
    if log.exists():
        print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]))


def _decode(context: Context, plan: ServerPlan, port: int, prompts: Prompts, workload: Workload) -> Iterable[Measured]:
    streams = workload.concurrency
    # A short run comes first, until all streams decode together. After it everything is compiled and recorded.
    short = workload.new_tokens // WARM_UP_PART
    run_load(port, GenerateStream(), prompts.make(streams, workload.input_tokens), short)
    with Watch(port) as watch:
        result = run_load(port, GenerateStream(), prompts.make(streams, workload.input_tokens), workload.new_tokens)
    yield decode_figures(context, plan, workload, result, longest_window(watch.pages, streams))


def decode_figures(
    context: Context, plan: ServerPlan, workload: Workload, result: LoadResult, window: Window | None
) -> Measured:
    cells = {"tokens/s": f"{result.tokens_per_s:.0f}"}
    if window is None:
        failure = "all streams never decoded together between two readings of the metrics: ask for more tokens"
        return Measured(cells, failure=failure)
    step_bytes = weight_bytes(plan.shape) + window.context_tokens * kv_bytes(plan.shape, plan.cache)
    rate = step_bytes / window.step_s
    memory = context.figures.get(MEMORY)
    share = rate / memory if memory else None
    cells |= {
        "context": f"{window.context_tokens / workload.concurrency:.0f}",
        "steps": str(window.steps),
        "step ms": f"{window.step_s * 1e3:.3f}",
        "device ms": f"{window.device_s * 1e3:.3f}",
        "ms per token at the client": f"{result.per_token_s * 1e3:.3f}",
        "99% of gaps ≤ ms": f"{result.gap_s(0.99) * 1e3:.2f}",
        "GB/s": f"{rate / 1e9:.1f}",
        "of the memory's ceiling": f"{share:.1%}" if share is not None else "–",
        "outside the device": f"{window.outside:.1%}",
    }
    suffix = f"at {workload.concurrency}" + ("" if plan.cache == torch.bfloat16 else f", {plan.name}")
    figures = {f"outside {suffix}": window.outside, f"gap s {suffix}": window.gap_s}
    if share is not None:
        figures[f"decode {suffix}"] = share
    return Measured(cells, figures)


def _prefill(context: Context, plan: ServerPlan, port: int, prompts: Prompts, workload: Workload) -> Iterable[Measured]:
    runs = []
    for _ in range(1 + PROMPT_RUNS):  # one more, because the first run warms up
        before = Page(0, get(port, "/metrics"))
        result = run_load(port, GenerateStream(), prompts.make(1, workload.input_tokens), workload.new_tokens)
        after = Page(0, get(port, "/metrics"))
        series = 'tgi_batch_forward_duration_sum{method="prefill"}'
        runs.append((after.value(series) - before.value(series), result.first_token_s))
    device_s, client_s = sorted(runs[1:])[PROMPT_RUNS // 2]
    rate = prefill_flops(plan.shape, workload.input_tokens) / device_s
    matrix = context.figures.get(MATRIX)
    cells = {
        "device ms": f"{device_s * 1e3:.2f}",
        "first token at the client, ms": f"{client_s * 1e3:.2f}",
        "TFLOP/s": f"{rate / 1e12:.2f}",
        "of the matrix ceiling": f"{rate / matrix:.1%}" if matrix else "–",
    }
    yield Measured(cells, {"prefill": rate / matrix} if matrix else {})


def _beside(port: int, prompts: Prompts, crowd: Workload, short: Workload) -> Iterable[Measured]:
    """The time to the first token of short prompts, one after the other, while a crowd of streams decodes."""
    with ThreadPoolExecutor(1) as executor:
        texts = prompts.make(crowd.concurrency, crowd.input_tokens)
        load = executor.submit(run_load, port, GenerateStream(), texts, crowd.new_tokens)
        while not load.done() and not Page(0, get(port, "/metrics")).is_decoding(crowd.concurrency):
            time.sleep(0.01)
        waits = []
        for text in prompts.make(PROBES, short.input_tokens):
            waits.append(run_load(port, GenerateStream(), [text], short.new_tokens).first_token_s)
        too_late = load.done()
        result = load.result()
    waits.sort()
    cells = {
        "prompt": f"{short.input_tokens} tokens",
        "first token ms": f"{1e3 * waits[0]:.1f} to {1e3 * waits[-1]:.1f}, median {1e3 * waits[PROBES // 2]:.1f}",
        "the streams' 99% of gaps ≤ ms": f"{result.gap_s(0.99) * 1e3:.2f}",
    }  # fmt: skip
    yield Measured(cells, failure="the streams had ended before the last prompt" if too_late else "")
