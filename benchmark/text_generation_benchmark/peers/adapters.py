"""What LoRA adapters cost: this server with 8 of them and without any, in turns, and vLLM's where it is installed."""

import asyncio
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.figures import percentile
from text_generation_benchmark.load import GREEDY, Dialect, Event, GenerateStream, StreamTimes, stream_once
from text_generation_benchmark.ours import running_ours
from text_generation_benchmark.output import table
from text_generation_benchmark.peers.quantized import columns_of, rows_of
from text_generation_benchmark.peers.servers import EVERY_CORE, LIBRARY, WRITER, Folders, run_in, running_vllm
from text_generation_benchmark.process import exit_on_sigterm
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.workload import Run, Workload, loads_on
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import linear_sizes

ADAPTERS, RANK = 8, 16
EACH_ONE = Workload(ADAPTERS, 64, 64)
PROMPTS = Workload(ADAPTERS, 128, 1)  # one prompt of each adapter, all in one step
BFLOAT16, VLLM = "bfloat16", "vLLM-CPU"
KINDS = (BFLOAT16, "Q4_K_M", VLLM)
# For adapters that lie on disk.
CROWD, CROWD_TOKENS, SEGMENTS, PAUSE_S = 16, 256, 8, 0.5


def write_adapters(folder: Path, model: Path, count: int = ADAPTERS) -> dict[str, Path]:
    """Random adapters of all linear layers, as PEFT writes them, in bfloat16: folders by name."""
    numbers = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=numbers) * 0.02).to(torch.bfloat16)

    sizes = linear_sizes(read_config(model))
    targets = sorted({name.rpartition(".")[2] for name in sizes})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    found = {f"adapter{number}": folder / f"adapter{number}" for number in range(count)}
    for adapter in found.values():
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for name, size in sizes.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = made(RANK, size.inputs)
            tensors[f"base_model.model.{name}.lora_B.weight"] = made(size.outputs, RANK)
        save_file(tensors, adapter / "adapter_model.safetensors")
    return found


def lora(adapters: Mapping[str, Path]) -> tuple[str, ...]:
    """vLLM's flags."""
    listed = (f"{name}={path}" for name, path in adapters.items())
    return "--enable-lora", "--max-loras", str(ADAPTERS), "--max-lora-rank", str(RANK), "--lora-modules", *listed


class EachItsOwn:
    """A dialect, with an adapter in each request: one after the other."""

    def __init__(self, dialect: Dialect, adapters: Sequence[str]) -> None:
        self.path, self._dialect, self._next = dialect.path, dialect, itertools.cycle(adapters)

    def body(self, prompt: str, new_tokens: int, sampling: Mapping[str, float] = GREEDY) -> dict[str, Any]:
        body, adapter = self._dialect.body(prompt, new_tokens, sampling), next(self._next)
        if "parameters" in body:
            return body | {"parameters": body["parameters"] | {"adapter_id": adapter}}
        return body | {"model": adapter}

    def read(self, event: dict[str, Any], new_tokens: int) -> Event:
        return self._dialect.read(event, new_tokens)


def beside_no_adapters(model: str, rounds: int, kinds: Sequence[str], folders: Folders) -> str:
    """A table of tokens per second: 8 requests of 8 adapters, or of none, on a server with adapters, and on one
    without. Weights other than bfloat16 need llama.cpp."""
    exit_on_sigterm()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        checkpoint, whole = Path(folder, model), Path(folder, "model.gguf")
        write_checkpoint(checkpoint, SHAPES[model])
        adapters = write_adapters(Path(folder), checkpoint)
        flags = ("--lora-adapters", ",".join(f"{name}={path}" for name, path in adapters.items()))
        for kind in kinds:
            with_some: tuple[int, Dialect]
            without: tuple[int, Dialect]
            with ExitStack() as servers:
                if kind == VLLM:
                    with_some = servers.enter_context(
                        running_vllm(folders.vllm, checkpoint, EVERY_CORE, lora(adapters))
                    )
                    without = servers.enter_context(running_vllm(folders.vllm, checkpoint, EVERY_CORE))
                else:
                    is_whole = kind == BFLOAT16
                    file = checkpoint if is_whole else _quantized(folders.llama_cpp, checkpoint, whole, kind)
                    own = () if is_whole else ("--activations", "model")
                    with_some, without = (
                        (servers.enter_context(running_ours(file, more=(*own, *more))).port, GenerateStream())
                        for more in (flags, ())
                    )
                runs = {
                    "8 adapters": _loads(checkpoint, with_some[0], EachItsOwn(with_some[1], list(adapters))),
                    "no adapter in the step": _loads(checkpoint, *with_some),
                    "without adapters": _loads(checkpoint, *without),
                }
                rows += ((kind, *row) for load in (EACH_ONE, PROMPTS) for row in rows_of(load, runs, rounds))
    return table(("weights", *columns_of(list(runs))), rows)


def _loads(checkpoint: Path, port: int, dialect: Dialect) -> Run:
    return loads_on(port, dialect, Prompts(checkpoint))


def _quantized(environment: Path, checkpoint: Path, whole: Path, kind: str) -> Path:
    if not whole.exists():
        run_in(environment, WRITER, checkpoint, whole)
    run_in(environment, LIBRARY, "quantize", whole, whole.parent, kind)
    return whole.with_stem(f"{whole.stem}-{kind}")


def from_disk(model: str) -> str:
    """A table of the time to the first token of an adapter that is in a slot, and of adapters that are on disk, beside
    streams of the model; and of the gaps of these streams."""
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        checkpoint = Path(folder, model)
        write_checkpoint(checkpoint, SHAPES[model])
        resident, *others = adapters = write_adapters(Path(folder), checkpoint, 40)
        listed = ",".join(f"{name}={path}" for name, path in adapters.items())
        flags = ("--lora-adapters", listed, "--max-loras", "2", "--max-cpu-loras", "1")
        asked = {"in a slot": [resident], "on disk": others}
        dialects = {name: EachItsOwn(GenerateStream(), each) for name, each in asked.items()}
        first: dict[str, list[float]] = {name: [] for name in asked}
        gaps: dict[str, list[float]] = {name: [] for name in asked}
        with running_ours(checkpoint, more=flags) as server:
            prompts = Prompts(checkpoint)
            for number in range(2 * SEGMENTS):
                name = list(asked)[number % 2]
                adapted, streams = uvloop.run(
                    _segment(server.port, prompts, dialects[name], EachItsOwn(GenerateStream(), [resident]))
                )
                first[name] += adapted
                gaps[name] += (gap for stream in streams for gap in stream.gaps)
    rows = [
        (
            name,
            str(len(first[name])),
            *(f"{1000 * percentile(sorted(first[name]), percent):.0f}" for percent in (50, 99)),
            *(f"{1000 * percentile(sorted(gaps[name]), percent):.1f}" for percent in (50, 99)),
        )
        for name in asked
    ]
    return table(("adapter", "requests", "first token ms, median", "p99", "gap of streams ms, median", "p99"), rows)


async def _segment(
    port: int, prompts: Prompts, dialect: Dialect, resident: Dialect
) -> tuple[list[float], list[StreamTimes]]:
    """Times to the first tokens of requests in `dialect`, and streams of the model, during which they were sent. One
    stream of the resident adapter keeps its slot."""
    asked = prompts.make(CROWD + 1, 64)
    async with asyncio.TaskGroup() as tasks:
        holding = tasks.create_task(stream_once(port, resident, asked.pop(), CROWD_TOKENS + 64))
        streams = [tasks.create_task(stream_once(port, GenerateStream(), prompt, CROWD_TOKENS)) for prompt in asked]
        await asyncio.sleep(2 * PAUSE_S)
        first = []
        while not any(stream.done() for stream in (holding, *streams)):
            first.append((await stream_once(port, dialect, prompts.make(1, 16)[0], 1)).first)
            await asyncio.sleep(PAUSE_S)
    return first, [stream.result() for stream in streams]
