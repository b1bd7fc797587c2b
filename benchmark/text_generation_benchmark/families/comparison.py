"""Models of four families with random weights: beside a Llama of equal bytes, and beside peers, in turns."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from text_generation_benchmark.bytes_read import weight_bytes
from text_generation_benchmark.ceilings import Meter, with_ceilings
from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.compare import OURS, Contender, Folders, llama_cpp, vllm
from text_generation_benchmark.families.against import Against
from text_generation_benchmark.families.experts_read import mean_experts_read
from text_generation_benchmark.families.report import (
    BesideLlama,
    BesidePeers,
    last_line,
    llama_table,
    peer_table,
)
from text_generation_benchmark.families.shapes import FAMILIES, llama_of, write_family
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.ours import Served, running_ours
from text_generation_benchmark.output import say
from text_generation_benchmark.process import exit_on_sigterm
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.report import Row
from text_generation_benchmark.roofline import Ceilings, load_work
from text_generation_benchmark.workload import Run, Workload, loads_on, take_turns
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config

WORKLOADS = (Workload(1, 64, 64), Workload(16, 64, 64))
WRITTEN = "written"  # a file that says that a checkpoint is whole


@dataclass(frozen=True, slots=True)
class Written:
    """A family's checkpoint, the experts that a step reads (by load), and the folders of its Llamas (by load)."""

    name: str
    model: Path
    experts_read: Mapping[Workload, float | None]
    llamas: Mapping[Workload, Path]


def write_models(folder: Path, name: str) -> Written:
    """Writes the family's checkpoint and its Llamas into `folder`, unless they are there. Loads that read other
    numbers of experts have Llamas of other sizes."""
    model = folder / name
    if not (model / WRITTEN).exists():
        say(f"{name}: writing {model}")
        write_family(model, FAMILIES[name])
        config = read_config(model)
        counts = [_experts_read(model, config, load) for load in WORKLOADS]
        (model / WRITTEN).write_text(json.dumps(counts))
    config = read_config(model)
    experts = dict(zip(WORKLOADS, json.loads((model / WRITTEN).read_text()), strict=True))
    llamas = {}
    for load, count in experts.items():
        shape = llama_of(config, weight_bytes(config, count))
        llama = folder / f"llama-{shape.hidden}-{shape.intermediate}-{shape.layers}-{shape.vocabulary}"
        if not (llama / WRITTEN).exists():
            say(f"{name}: writing {llama}")
            write_checkpoint(llama, shape)
            (llama / WRITTEN).touch()
        llamas[load] = llama
    return Written(name, model, experts, llamas)


def _experts_read(model: Path, config: ModelConfig, load: Workload) -> float | None:
    if config.moe is None or load.concurrency == 1:
        return None if config.moe is None else config.moe.chosen
    return mean_experts_read(model, load)


def beside_llama(written: Written, meter: Meter) -> list[BesideLlama]:
    found = []
    with ExitStack() as servers:
        ceilings: dict[Path, list[Ceilings]] = {model: [] for model in (written.model, *written.llamas.values())}
        runs = {}
        for model, measured in ceilings.items():
            say(f"{written.name}: starting {OURS} on {model.name}")
            ours = servers.enter_context(running_ours(model))
            runs[model] = with_ceilings(_loads(ours, model), meter, measured)
        for load in WORKLOADS:
            say(f"{written.name} beside a Llama: {load}")
            llama, count = written.llamas[load], written.experts_read[load]
            results = take_turns({str(model): runs[model] for model in (written.model, llama)}, load)
            rows = []
            for model, experts in ((written.model, count), (llama, None)):
                own = results[str(model)]
                work = load_work(model, load, experts)
                rows.append(Row(written.name, load, own, {}, work, ceilings[model][-len(own) :]))
            found.append(BesideLlama(rows[0], rows[1], count, ours.kernels))
    return found


def _loads(ours: Served, model: Path) -> Run:
    return loads_on(ours.port, GenerateStream(), Prompts(model))


def beside_peers(written: Written, contenders: Sequence[Contender], meter: Meter) -> list[BesidePeers]:
    """A peer that does not start, or does not answer a short run, is left out, and its error is kept."""
    errors: dict[str, str] = {}
    found = []
    with ExitStack() as servers:
        ours = servers.enter_context(running_ours(written.model))
        measured: list[Ceilings] = []
        runs = {OURS: with_ceilings(_loads(ours, written.model), meter, measured)}
        for contender in contenders:
            if contender.start is None:
                continue
            say(f"{written.name}: starting {contender.peer.name}")
            try:
                run = servers.enter_context(contender.start(written.model))
                run(replace(WORKLOADS[0], new_tokens=4))
            except (OSError, RuntimeError) as error:
                say(str(error))
                errors[contender.peer.name] = last_line(error)
            else:
                runs[contender.peer.name] = run
        most_streams = {contender.peer.name: contender.most_streams for contender in contenders}
        for load in WORKLOADS:
            say(f"{written.name} beside peers: {load}")
            able = {name: run for name, run in runs.items() if load.concurrency <= (most_streams.get(name) or 10**6)}
            results = take_turns(able, load)
            own = results.pop(OURS)
            work = load_work(written.model, load, written.experts_read[load])
            row = Row(written.name, load, own, results, work, measured[-len(own) :])
            found.append(BesidePeers(row, errors, ours.kernels))
    return found


def compare_families(
    folder: Path, peers: Folders, only: Sequence[str], against: Sequence[Against], show: Callable[[Against, str], None]
) -> None:
    """Measures all families, or those in `only`: first beside Llamas, then beside the peers. `show` gets the table of
    what has been measured after each family. Checkpoints stay in `folder`. ValueError for a family that does not exist.
    """
    if unknown := set(only) - set(FAMILIES):
        raise ValueError(f"{', '.join(unknown)}: not one of the models {', '.join(FAMILIES)}")
    exit_on_sigterm()
    load = f"{WORKLOADS[0].input_tokens} tokens in, {WORKLOADS[0].new_tokens} out"
    meter = Meter()
    models = [write_models(folder, name) for name in only or FAMILIES]
    llamas: list[BesideLlama] = []
    for written in models if Against.llama in against else ():
        llamas += beside_llama(written, meter)
        show(Against.llama, llama_table(load, llamas))
    contenders = [*vllm(peers.vllm), llama_cpp(peers.llama_cpp)]
    beside: list[BesidePeers] = []
    for written in models if Against.peers in against else ():
        beside += beside_peers(written, contenders, meter)
        show(Against.peers, peer_table(load, [contender.peer for contender in contenders], beside))
