"""The server beside its peers and the machine's ceilings, on one machine, in one run, in turns."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from text_generation_benchmark.ceilings import Meter, with_ceilings
from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.ours import read_overlap, running_ours
from text_generation_benchmark.output import say
from text_generation_benchmark.peers.servers import TRAINED, Contender, Folders, llama_cpp, transformers, vllm
from text_generation_benchmark.process import exit_on_sigterm, get
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.report import Compared, Report, Row, machine_of
from text_generation_benchmark.roofline import Ceilings, LoadWork, load_work
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import LONG_PREFILL, PREFILL, Workload, loads_on, take_turns
from text_generation_common.model_files import demo_directory

OURS = "this server"
WORKLOADS = {
    TRAINED: (Workload(1), Workload(16), Workload(64)),
    "m100": (Workload(1), Workload(16), Workload(16, is_sampled=True), Workload(64), PREFILL, LONG_PREFILL),
    "m1b": (Workload(1), Workload(8)),
}


def last_line(error: Exception) -> str:
    """The last line of an error, without characters that end a line of code in Markdown."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).replace("`", "'")


def beside_peers(
    name: str, model: Path, contenders: Sequence[Contender], works: Mapping[Workload, LoadWork], meter: Meter
) -> Compared:
    """Measures one model on all servers. They run the whole time and take turns, so a slow phase of the machine affects
    all of them alike. A peer that does not start, or does not answer a short run, is left out, and its error is kept.
    """
    largest = max(works, key=lambda workload: workload.concurrency * workload.new_tokens)
    rows, pages, errors = [], [], {}
    with ExitStack() as servers:
        say(f"{name}: starting {OURS}")
        ours = servers.enter_context(running_ours(model))
        measured: list[Ceilings] = []
        runs = {OURS: with_ceilings(loads_on(ours.port, GenerateStream(), Prompts(model)), meter, measured)}
        for contender in contenders:
            if contender.start is not None and name not in contender.lacks:
                say(f"{name}: starting {contender.peer.name}")
                try:
                    run = servers.enter_context(contender.start(model))
                    run(Workload(1, input_tokens=64, new_tokens=4))
                except (OSError, RuntimeError) as error:
                    say(str(error))
                    errors[contender.peer.name] = last_line(error)
                else:
                    runs[contender.peer.name] = run
        max_streams = {contender.peer.name: contender.max_streams for contender in contenders}
        for workload, work in works.items():
            say(f"{name}: {workload}")
            able = {n: run for n, run in runs.items() if workload.concurrency <= max_streams.get(n, sys.maxsize)}
            before = get(ours.port, "/metrics")
            results = take_turns(able, workload)
            if workload == largest:
                pages = [before, get(ours.port, "/metrics")]
            own = results.pop(OURS)
            rows.append(Row(name, workload, own, results, work, measured[-len(own) :]))
    return Compared(rows, ours.kernels, read_overlap(name, *pages), errors)


def compare(folders: Folders, only: Sequence[str] = ()) -> Report:
    """Measures all models, or those in `only`. ValueError for a model that does not exist."""
    if unknown := set(only) - set(WORKLOADS):
        raise ValueError(f"{', '.join(unknown)}: not one of the models {', '.join(WORKLOADS)}")
    exit_on_sigterm()
    contenders = [*vllm(folders.vllm), llama_cpp(folders.llama_cpp), transformers()]
    meter, compared = Meter(), []
    for name in only or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
            model = demo_directory()
            if name in SHAPES:
                model = Path(folder) / name
                write_checkpoint(model, SHAPES[name])
            works = {workload: load_work(model, workload) for workload in WORKLOADS[name]}
            compared.append(beside_peers(name, model, contenders, works, meter))
    rows = [row for each in compared for row in each.rows]
    said = f"{machine_of({each.kernels for each in compared}, rows)}."
    overlaps = [each.overlap for each in compared if each.overlap]
    return Report(said, [contender.peer for contender in contenders], rows, overlaps)
