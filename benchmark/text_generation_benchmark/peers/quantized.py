"""This server and llama.cpp's on the same GGUF file, in turns: `text-generation-benchmark gguf`."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.figures import percentile
from text_generation_benchmark.load import GenerateStream, LoadResult
from text_generation_benchmark.ours import running_ours
from text_generation_benchmark.output import table
from text_generation_benchmark.peers.servers import LIBRARY, WRITER, llama_server, run_in
from text_generation_benchmark.process import exit_on_sigterm
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import PREFILL, Run, Workload, loads_on, take_turns

WORKLOADS = Workload(1, 64, 64), Workload(8, 64, 64), Workload(16, 64, 64), PREFILL
COLUMNS = ("type", "load", "ours", "llama.cpp", "ratio", "quartiles")


def beside_llama_cpp(environment: Path, model: str, kinds: Sequence[str], rounds: int) -> str:
    """A table of tokens per second, of the prompt where it is the load. The checkpoint has random weights."""
    exit_on_sigterm()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        checkpoint, whole = Path(folder, model), Path(folder, "model.gguf")
        write_checkpoint(checkpoint, SHAPES[model])
        run_in(environment, WRITER, checkpoint, whole)
        for kind in kinds:
            run_in(environment, LIBRARY, "quantize", whole, folder, kind)
            file = Path(folder, f"model-{kind}.gguf")
            rows += _rows(environment, checkpoint, file, rounds)
            file.unlink()
    return table(COLUMNS, rows)


def _rows(environment: Path, checkpoint: Path, file: Path, rounds: int) -> list[tuple[str, ...]]:
    streams = max(workload.concurrency for workload in WORKLOADS)
    with ExitStack() as servers:
        ours = servers.enter_context(running_ours(file))
        theirs = servers.enter_context(llama_server(environment, file, checkpoint, streams))
        runs: dict[str, Run] = {"ours": loads_on(ours.port, GenerateStream(), Prompts(checkpoint)), "theirs": theirs}
        return [row_of(file.stem, workload, runs, rounds) for workload in WORKLOADS]


def row_of(kind: str, workload: Workload, runs: dict[str, Run], rounds: int) -> tuple[str, ...]:
    """The medians of both servers, and of the ratios of the rounds."""

    def speed(result: LoadResult) -> float:
        return result.tokens_per_s if workload.new_tokens > 1 else workload.input_tokens / result.first_token_s

    results = take_turns(runs, workload, rounds)
    ours, theirs = (sorted(map(speed, results[name])) for name in runs)
    pairs = zip(results["ours"], results["theirs"], strict=True)
    ratios = sorted(speed(first) / speed(second) for first, second in pairs)
    load = f"{workload.concurrency} streams" if workload.new_tokens > 1 else f"a prompt of {workload.input_tokens}"
    quartiles = f"{percentile(ratios, 25):.2f} to {percentile(ratios, 75):.2f}"
    return (
        kind.removeprefix("model-"),
        load,
        f"{median(ours):.1f}",
        f"{median(theirs):.1f}",
        f"{median(ratios):.2f}",
        quartiles,
    )
