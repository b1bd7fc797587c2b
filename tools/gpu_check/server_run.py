"""Measures the whole server on a Llama of 8 billion random weights: decode steps and a prefill, as shares of the
ceilings.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_check.ceilings import MATRIX, MEMORY
from gpu_check.findings import Context, Finding
from gpu_check.model import REHEARSED, kv_bytes, prefill_flops, weight_bytes
from gpu_check.windows import Page, Watch, Window, longest_window
from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.load import GenerateStream, LoadResult, run_load
from text_generation_benchmark.process import ServerCommand, free_port, get, running
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_benchmark.workload import Workload

DECODE, PREFILL = "Server: decode", "Server: prefill"
PROGRAMS = {"text-generation-server": "text_generation_server", "text-generation-router": "text_generation_router"}
START_S = 150
PROMPT_RUNS = 3
WARM_UP_PART = 4


@dataclass(frozen=True, slots=True)
class ServerPlan:
    shape: LlamaShape
    decodes: tuple[Workload, ...]
    prompt: Workload
    arguments: tuple[str, ...]


ON_GPU = ServerPlan(
    LLAMA_8B,
    # In the middle of the measured steps, the context is about 1,000 tokens long.
    (Workload(1, 256, 512), Workload(64, 808, 384), Workload(256, 840, 320)),
    Workload(1, 4096, 1),
    ("--max-input-tokens", "4096", "--max-total-tokens", "4608", "--max-batch-prefill-tokens", "4096"),
)
REHEARSAL = ServerPlan(
    REHEARSED,
    (Workload(1, 32, 900), Workload(4, 32, 900)),
    Workload(1, 256, 1),
    ("--max-input-tokens", "256", "--max-total-tokens", "1024", "--max-batch-prefill-tokens", "256"),
)


def measure(context: Context) -> Iterator[Finding]:
    plan = ON_GPU if context.on_gpu else REHEARSAL
    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as name:
        folder = Path(name)
        write_without_weights(folder / "model", plan.shape)
        prompts = Prompts(folder / "model")
        command = server_command(plan, folder)
        with running(command, folder / "log"):
            for workload in plan.decodes:
                yield _decode(context, plan.shape, command.port, prompts, workload)
            yield _prefill(context, plan, command.port, prompts)


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


def _decode(context: Context, shape: LlamaShape, port: int, prompts: Prompts, workload: Workload) -> Finding:
    streams = workload.concurrency
    # A short run comes first, until all streams decode together. After it everything is compiled and recorded.
    short = workload.new_tokens // WARM_UP_PART
    run_load(port, GenerateStream(), prompts.make(streams, workload.input_tokens), short)
    with Watch(port) as watch:
        result = run_load(port, GenerateStream(), prompts.make(streams, workload.input_tokens), workload.new_tokens)
    return decode_finding(context, shape, workload, result, longest_window(watch.pages, streams))


def decode_finding(
    context: Context, shape: LlamaShape, workload: Workload, result: LoadResult, window: Window | None
) -> Finding:
    cells = {"streams": str(workload.concurrency), "tokens/s": f"{result.tokens_per_s:.0f}"}
    if window is None:
        failure = "all streams never decoded together between two readings of the metrics: ask for more tokens"
        return Finding(DECODE, cells, failure=failure)
    step_bytes = weight_bytes(shape) + window.context_tokens * kv_bytes(shape)
    rate = step_bytes / window.step_s
    memory = context.figures.get(MEMORY)
    share = rate / memory if memory else None
    cells |= {
        "context": f"{window.context_tokens / workload.concurrency:.0f}",
        "steps": str(window.steps),
        "step ms": f"{window.step_s * 1e3:.3f}",
        "device ms": f"{window.device_s * 1e3:.3f}",
        "ms per token at the client": f"{result.per_token_s * 1e3:.3f}",
        "GB/s": f"{rate / 1e9:.1f}",
        "of the memory's ceiling": f"{share:.1%}" if share is not None else "–",
        "outside the device": f"{window.outside:.1%}",
    }
    figures = {f"outside at {workload.concurrency}": window.outside, f"gap s at {workload.concurrency}": window.gap_s}
    if share is not None:
        figures[f"decode at {workload.concurrency}"] = share
    return Finding(DECODE, cells, figures)


def _prefill(context: Context, plan: ServerPlan, port: int, prompts: Prompts) -> Finding:
    workload, runs = plan.prompt, []
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
        "tokens": str(workload.input_tokens),
        "device ms": f"{device_s * 1e3:.2f}",
        "first token at the client, ms": f"{client_s * 1e3:.2f}",
        "TFLOP/s": f"{rate / 1e12:.2f}",
        "of the matrix ceiling": f"{rate / matrix:.1%}" if matrix else "–",
    }
    return Finding(PREFILL, cells, {"prefill": rate / matrix} if matrix else {})
