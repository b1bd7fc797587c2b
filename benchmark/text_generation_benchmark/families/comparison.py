"""Models of four families with random weights: beside a Llama of equal bytes, and beside peers, in turns."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from text_generation_benchmark.ceilings import Meter, with_ceilings
from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.compare import OURS, beside_peers
from text_generation_benchmark.families.report import BesideLlama, llama_table, peer_table
from text_generation_benchmark.family_shapes import FAMILIES, llama_of, write_family
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.ours import running_ours
from text_generation_benchmark.output import say
from text_generation_benchmark.peers.servers import Folders, llama_cpp, vllm
from text_generation_benchmark.process import exit_on_sigterm
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.report import Compared, Row
from text_generation_benchmark.roofline import Ceilings, load_work, weight_bytes
from text_generation_benchmark.workload import Workload, loads_on, take_turns
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config

WORKLOADS = (Workload(1, 64, 64), Workload(16, 64, 64))
COMPARISONS = ("llama", "peers")
STEPS = 16
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


def mean_experts_read(model: Path, workload: Workload) -> float:
    """The experts of a layer that the rows of a decode step have together: the mean over layers and the first STEPS
    decode steps, with the first prompts that the servers get."""
    from transformers import AutoModelForCausalLM

    served = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    counts: list[int] = []

    def count(module: Any, inputs: Any, outputs: Any) -> None:
        _, _, chosen_TK = outputs
        if len(chosen_TK) == workload.concurrency:  # the prompts' step has more tokens
            counts.append(len(chosen_TK.unique()))

    for layer in served.model.layers:
        layer.mlp.gate.register_forward_hook(count)
    tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = Prompts(model).make(workload.concurrency, workload.input_tokens)
    ids = torch.tensor([tokenizer.encode(text).ids for text in texts])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_length": None}
    with torch.inference_mode():
        served.generate(ids, max_new_tokens=1 + STEPS, min_new_tokens=1 + STEPS, **options)
    return sum(counts) / len(counts)


def beside_llama(written: Written, meter: Meter) -> list[BesideLlama]:
    found = []
    with ExitStack() as servers:
        ceilings: dict[Path, list[Ceilings]] = {model: [] for model in (written.model, *written.llamas.values())}
        runs = {}
        for model, measured in ceilings.items():
            say(f"{written.name}: starting {OURS} on {model.name}")
            ours = servers.enter_context(running_ours(model))
            load_on = loads_on(ours.port, GenerateStream(), Prompts(model))
            runs[model] = with_ceilings(load_on, meter, measured)
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


def compare_families(
    folder: Path, peers: Folders, only: Sequence[str], against: Sequence[str], show: Callable[[str, str], None]
) -> None:
    """Measures all families, or those in `only`: first beside Llamas (`llama`), then beside the peers (`peers`). `show`
    gets the table of what has been measured after each family. Checkpoints stay in `folder`. ValueError for a family or
    a comparison that does not exist."""
    for asked, known in ((only, FAMILIES), (against, COMPARISONS)):
        if unknown := set(asked) - set(known):
            raise ValueError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    exit_on_sigterm()
    load = f"{WORKLOADS[0].input_tokens} tokens in, {WORKLOADS[0].new_tokens} out"
    meter = Meter()
    models = [write_models(folder, name) for name in only or FAMILIES]
    llamas: list[BesideLlama] = []
    for written in models if "llama" in against else ():
        llamas += beside_llama(written, meter)
        show("llama", llama_table(load, llamas))
    contenders = [*vllm(peers.vllm), llama_cpp(peers.llama_cpp)]
    beside: list[Compared] = []
    for written in models if "peers" in against else ():
        works = {each: load_work(written.model, each, written.experts_read[each]) for each in WORKLOADS}
        beside.append(beside_peers(written.name, written.model, contenders, works, meter))
        show("peers", peer_table(load, [contender.peer for contender in contenders], beside))
