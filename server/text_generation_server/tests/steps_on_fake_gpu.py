"""Runs steps with the Triton kernels' launchers on a GPU that is not there. No kernel is compiled and none runs.

This is a script and not a test, because Triton's interpreter must be off in its process. Prints one line of JSON for
each way to serve: what the host waited for while it launched steps, and which kernels would have been compiled after
the warm-up.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fake_gpu import CPU, GPU, AwaitedMoment, FakeGpu, pretend
from grammar_tools import byte_level_tokenizer, regex_grammar, tokens_of
from shard_tools import BATCH, random_ids
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from text_generation_common.models.config import read_config
from text_generation_common.sampling import NAMES, NEUTRAL, Sampling
from text_generation_server import runner as runner_module
from text_generation_server.device.graphs import DecodeGraphs
from text_generation_server.distributed import Alone, Group
from text_generation_server.grammars.compiler import GrammarCompiler
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.triton.layers import UnroundedProduct
from text_generation_server.layers.weights import WeightFormat, dense, int8
from text_generation_server.models import get_model
from text_generation_server.models.loading import DummyFiles
from text_generation_server.platforms import Platform
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.rows import PromptChunk, StepBatch
from text_generation_server.step.warmup import EVERY_OPTION

MODEL_LIMIT = 2048
LLAMA = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": MODEL_LIMIT, "rms_norm_eps": 1e-6,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 2048, "n_embd": 256, "n_head": 8, "n_layer": 1, "n_positions": MODEL_LIMIT,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 100,
}  # fmt: skip
SLOTS = 1000  # fewer than MODEL_LIMIT, and 16 does not divide it
REQUESTS = 40
PREFILL_TOKENS = 300
SIZES = (1, 2, 4, 8, 16, 32)
# With these options the host waits for the step before.
AWAITING = {"watermark": True, "grammar": regex_grammar("(.|\n)*")}
NOT_AWAITING = replace(EVERY_OPTION, watermark=False, grammar="")


class AbsentDriver:
    """Stands in for Triton's driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Pair(Alone):
    """The transport of rank 0 of two, where the other rank does the same."""

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype == torch.int64:
            x += x.flip(0)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return [x, x]


class Rerun:
    """A recording that runs the recorded function again."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.output = run()

    def replay(self) -> None:
        self.output.copy_(self._run())


@dataclass
class VariedLoad:
    """Plays the router for one runner."""

    gpu: FakeGpu
    runner: ModelRunner

    def prompt(
        self, request_id: int, length: int, sampling: Sampling, end: int | None = None, logprobs: int | None = None
    ) -> PromptChunk:
        end, ids = end or length, random_ids(length).int()
        slots = torch.arange(length, dtype=torch.int32)
        return PromptChunk(request_id, 0, end, end == length, ids, slots, length, sampling, logprobs)

    def step(self, decoding: list[int], *chunks: PromptChunk) -> None:
        self.launch(decoding, *chunks).wait()

    def launch(self, decoding: list[int], *chunks: PromptChunk) -> Pending[StepOutput]:
        batches = [StepBatch(BATCH, decoding)] if decoding else []
        slots = torch.arange(len(decoding), dtype=torch.int32)
        with self.gpu.launching():
            return self.runner.step(batches, slots, BATCH, list(chunks))

    def options(self, sampling: Sampling) -> None:
        """A prompt, a token that is launched before the prompt's step is read, a prompt beside a decoding row, and a
        decode step."""
        self.runner.clear(None)
        for step in [self.launch([], self.prompt(1, 5, sampling)), self.launch([1])]:
            step.wait()
        self.step([1], self.prompt(2, 16, NEUTRAL), self.prompt(3, 33, sampling))
        self.step([3, 1])

    def sizes(self) -> None:
        """Steps of many numbers of rows, and of many lengths of chunks and histories."""
        for rows in (1, 2, 3, 17, REQUESTS):
            self.runner.clear(None)
            ids = list(range(rows))
            self.step([], *(self.prompt(i, 1 + i % 5, NEUTRAL) for i in ids))
            self.step(ids)
            self.step(ids[::-1][: rows - 1] or ids)
        self.runner.clear(None)
        for i, length in enumerate((1, 2, 15, 16, 17, 127, 128, 129, 300)):
            self.step(list(range(i)), self.prompt(i, length, NOT_AWAITING if i % 2 else NEUTRAL))
        self.step([0, 1], self.prompt(20, 700, NEUTRAL, end=100))
        self.step([0, 1], PromptChunk(20, 100, 116, False))
        self.step([], PromptChunk(20, 116, 700, True))
        self.step([0, 20, 1])
        self.step([0, 1], self.prompt(21, 150, NEUTRAL, logprobs=0), self.prompt(22, 40, NEUTRAL, 30, logprobs=5))


class KernelForms:
    """The kernels that Triton would have compiled: a name and everything for which it makes a form of its own."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.forms: set[tuple[str, str]] = set()
        self._gpu = gpu
        knobs.runtime.jit_cache_hook = self

    def __call__(self, *, key: str, fn: Any, **_: Any) -> bool:
        self.forms.add((fn.name.rpartition(".")[2], key))
        self._gpu.launched += 1
        return True  # Triton neither compiles the kernel nor launches it.


@contextmanager
def warm_runner(
    gpu: FakeGpu,
    model_config: dict[str, Any],
    ranks: int,
    sizes: tuple[int, ...],
    kv: torch.dtype,
    weight_format: WeightFormat = dense,
) -> Iterator[ModelRunner]:
    group = Group(0, ranks, Pair() if ranks > 1 else Alone())
    kernels = select_backend(GPU).kernels
    platform = Platform(GPU, kernels, group, DecodeGraphs(sizes, Rerun), lambda: AwaitedMoment(gpu))
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config))
        config = read_config(Path(folder))
    with gpu:
        files = DummyFiles(config, CPU, torch.bfloat16)
        model = get_model(files, config, platform, torch.bfloat16, MODEL_LIMIT, lambda: None, weight_format)
        tokens = tokens_of(byte_level_tokenizer(), config.vocab_size)
        constraints = Constraints(GrammarCompiler(tokens), GPU)
        sampler = Sampler(kernels, 0.5, 2.0)
        runner = ModelRunner(model, platform, sampler, lambda: None, kv, constraints=constraints)
        runner_module.available_bytes = lambda *_: SLOTS * model.bytes_per_slot(kv)
        runner.warmup(PREFILL_TOKENS, None, REQUESTS, None)
        yield runner


def served(*case: Any, alone: Iterable[str] = NAMES) -> dict[str, Any]:
    """`alone`: options that are tried alone, besides all together."""
    gpu = FakeGpu()
    compiled = KernelForms(gpu)
    with warm_runner(gpu, *case) as runner:
        assert runner.row_state.batches.rows.length == SLOTS
        warm, compiled.forms = compiled.forms, set()
        load = VariedLoad(gpu, runner)
        for name in alone:
            if name not in AWAITING:
                load.options(replace(NEUTRAL, **{name: getattr(EVERY_OPTION, name)}))
        load.options(NOT_AWAITING)
        load.sizes()
        waits: dict[str, list[str]] = {"": list(gpu.waits)}
        for name in AWAITING:
            gpu.waits = {}
            load.options(replace(NEUTRAL, **{name: AWAITING[name]}))
            load.options(replace(NOT_AWAITING, **{name: AWAITING[name]}))
            waits[name] = list(gpu.waits)
        load.options(replace(EVERY_OPTION, **AWAITING))
    late = sorted(f"{name}: {form}" for name, form in compiled.forms - warm)
    return {"launched": len(warm), "waits": waits, "compiled": late}


def multiply(self: UnroundedProduct, x: Tensor, bias: Tensor | None) -> Tensor:
    """As `UnroundedProduct`, which torch cannot compute on a CPU."""
    return torch.nn.functional.linear(x, self._weight, bias).float()


if __name__ == "__main__":
    pretend()
    UnroundedProduct.__call__ = multiply  # type: ignore[method-assign]
    driver.set_active(AbsentDriver())
    print(json.dumps(served(LLAMA, 2, SIZES, torch.bfloat16)), flush=True)
    print(json.dumps(served(GPT2, 1, (), torch.int8, int8)), flush=True)
    # What samples is that of the GPT-2.
    print(json.dumps(served(MIXTRAL, 1, (), torch.bfloat16, alone=())), flush=True)
