"""Checks that decode steps replayed from CUDA graphs give the same results as kernels launched one by one."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from gpu_check.comparing import Check, Comparison, equal, findings, worst
from gpu_check.findings import Context, Finding
from gpu_check.model import REHEARSED
from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_common.sampling import Sampling
from text_generation_server.device.graphs import DEFAULT_SIZES, CudaRecorder, DecodeGraphs, no_graphs
from text_generation_server.device.transfers import moments_of, use_own_stream
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import select_backend
from text_generation_server.models import get_model
from text_generation_server.models.config import read_config
from text_generation_server.models.dummy import DummyFiles
from text_generation_server.platforms import Platform
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.step.rows import PromptChunk, StepBatch

TABLE = "Decode steps from graphs, to the bit"
BATCH, PROMPT, STEPS = 1, 40, 12
LONGEST, SLOTS = 256, 16384
DEVICE = torch.device("cuda", 0)


def compare_replay(context: Context) -> Iterator[Finding]:
    rows = (1, 8, 64) if context.on_gpu else (2,)
    if not context.on_gpu:
        yield Finding(TABLE, {"steps": "not rehearsed: needs a GPU; without one both runs launch kernels one by one"})
    yield from findings(TABLE, _cases(context, rows))


def _cases(context: Context, rows: tuple[int, ...]) -> Iterator[tuple[Mapping[str, str], Check]]:
    device = DEVICE if context.on_gpu else context.device
    use_own_stream(device)
    for count in rows:

        def compare(count: int = count) -> Comparison:
            graphs = DecodeGraphs(DEFAULT_SIZES, CudaRecorder()) if context.on_gpu else no_graphs()
            runs = [decode(device, count, some) for some in (graphs, no_graphs())]
            return worst(*(equal(ours, theirs) for ours, theirs in zip(*runs, strict=True)))

        yield {"steps": f"{STEPS} of {count} rows, half of them greedy"}, compare


def decode(device: torch.device, rows: int, graphs: DecodeGraphs) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, log-probabilities) of STEPS decode steps after prompts of random ids, the same in every call."""
    shape = replace(LLAMA_8B, layers=2) if device.type == "cuda" else REHEARSED
    runner = make_runner(device, shape, graphs)
    runner.warmup(rows * PROMPT, LONGEST, max(rows, 2), SLOTS)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).int()
    ids = torch.randint(3, shape.vocabulary, (rows, PROMPT), generator=torch.Generator().manual_seed(2)).int()
    chunks = [
        PromptChunk(
            i, 0, PROMPT, True, ids[i], slots[i * PROMPT : (i + 1) * PROMPT], PROMPT,
            Sampling(do_sample=i % 2 == 1, temperature=0.8, seed=i),
        )
        for i in range(rows)
    ]  # fmt: skip
    outputs = [runner.step([], slots[:0], BATCH, chunks).wait()]
    slots = slots[rows * PROMPT :]
    for step in range(STEPS):
        own = slots[step * rows : (step + 1) * rows]
        outputs.append(runner.step([StepBatch(BATCH, list(range(rows)))], own, BATCH, []).wait())
    return torch.cat([out.token_ids for out in outputs]), torch.cat([out.logprobs for out in outputs])


def make_runner(device: torch.device, shape: LlamaShape, graphs: DecodeGraphs) -> ModelRunner:
    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as folder:
        write_without_weights(Path(folder), shape)
        config = read_config(Path(folder))
    kernels, group = select_backend(device).kernels, Group(0, 1, Alone())
    platform = Platform(device, kernels, group, graphs, moments_of(device))
    files = DummyFiles(config, device, torch.bfloat16)
    model = get_model(files, config, platform, torch.bfloat16, LONGEST, _nothing)
    return ModelRunner(model, platform, Sampler(kernels, 0.5, 2.0), _nothing)


def _nothing() -> None:
    pass
