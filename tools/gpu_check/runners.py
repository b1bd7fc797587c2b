"""A runner without a router: rows whose context was never computed, decode steps, and prompts beside them."""

import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.models.config import read_config
from text_generation_common.sampling import Sampling
from text_generation_server.device.graphs import DEFAULT_SIZES, MIXED_SIZES, CudaRecorder, DecodeGraphs, no_graphs
from text_generation_server.device.transfers import moments_of, use_own_stream
from text_generation_server.distributed import Alone, Group
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.interface import Kernels
from text_generation_server.models import get_model
from text_generation_server.models.loading import DummyFiles
from text_generation_server.platforms import Platform
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.rows import PromptChunk, StepBatch

BATCH = 1
SPARE = 16  # tokens that a request may decode
GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class RunnerLoad:
    """Sizes of a runner: rows of up to `longest` tokens in `slots` slots, and steps of up to `chunk` prompt tokens."""

    shape: LlamaShape
    rows: int
    longest: int
    chunk: int
    slots: int
    dtype: torch.dtype = torch.bfloat16
    graphs: bool = True


def make_runner(
    load: RunnerLoad, device: torch.device, kernels: Kernels | None = None, constraints: Constraints | None = None
) -> ModelRunner:
    """With random weights, warmed up. `kernels`: other kernels than the device's own."""
    gc.collect()  # frees the memory of runners whose objects refer to each other
    use_own_stream(device)
    with tempfile.TemporaryDirectory(prefix="tgi-gpu-check-") as folder:
        write_without_weights(Path(folder), load.shape)
        config = read_config(Path(folder))
    graphs = mixed_graphs = no_graphs()
    if load.graphs and device.type == "cuda":
        recorder = CudaRecorder()
        graphs, mixed_graphs = DecodeGraphs(DEFAULT_SIZES, recorder), DecodeGraphs(MIXED_SIZES, recorder, unit="tokens")
    own = kernels or select_backend(device).kernels
    platform = Platform(
        device=device,
        kernels=own,
        group=Group(0, 1, Alone()),
        graphs=graphs,
        mark=moments_of(device),
        mixed_graphs=mixed_graphs,
    )
    files = DummyFiles(config, device, load.dtype)
    model = get_model(files, config, platform, dtype=load.dtype, max_total_tokens=load.longest, on_tensor=_nothing)
    runner = ModelRunner(model, platform, Sampler(own, 0.5, 2.0), _nothing, constraints=constraints)
    runner.warmup(load.chunk, load.longest, load.rows, load.slots)
    return runner


@dataclass
class Player:
    """Plays the router for one runner. A request owns slots for its first tokens and SPARE more, in random order."""

    runner: ModelRunner
    load: RunnerLoad
    lengths: dict[int, int] = field(default_factory=dict)  # tokens of each request whose keys are in slots
    sampling: Mapping[int, Sampling] = field(default_factory=dict)  # by request; greedy where there is none

    def __post_init__(self) -> None:
        self._free = torch.randperm(self.load.slots, generator=torch.Generator().manual_seed(1)).int()
        self._slots: dict[int, Tensor] = {}

    def fill_cache(self) -> None:
        """Random keys and values in all slots, so that rows may begin behind a context that was never computed."""
        for layer in self.runner._kv_cache:
            if layer.scales is None:
                layer.heads.normal_()
            else:
                layer.heads.copy_(torch.randint(-100, 100, layer.heads.shape[1:], device=layer.heads.device).float())
                layer.scales.fill_(0.02)

    def chunk(
        self, request: int, tokens: int, start: int = 0, end: int | None = None, logprobs: int | None = None
    ) -> PromptChunk:
        """The first chunk of a history of `tokens` tokens: positions start … end - 1. `logprobs`: as in PromptChunk."""
        end = tokens if end is None else end
        generator = torch.Generator().manual_seed(request)
        ids = torch.randint(3, self.load.shape.vocabulary, (tokens,), generator=generator).int()
        sampling = self.sampling.get(request, GREEDY)
        own, self._free = self._free.tensor_split([tokens + SPARE])
        self._slots[request] = own
        return PromptChunk(
            request_id=request,
            start=start,
            end=end,
            last=end == tokens,
            ids=ids,
            slots=own[:tokens],
            prompt_length=tokens,
            sampling=sampling,
            prompt_logprobs=logprobs,
        )

    def launch(self, decoding: Sequence[int], chunks: Sequence[PromptChunk] = ()) -> Pending[StepOutput]:
        """One step: a token for each request of `decoding`, and the chunks."""
        slots = [int(self._slots[request][self.lengths[request]]) for request in decoding]
        held = [StepBatch(BATCH, list(decoding))] if self.lengths else []
        pending = self.runner.step(held, torch.tensor(slots, dtype=torch.int32), BATCH, list(chunks))
        for request in decoding:
            self.lengths[request] += 1
        self.lengths |= {chunk.request_id: chunk.end for chunk in chunks}
        return pending

    def join_all(self, requests: int, context: int) -> list[int]:
        """Requests 0 … requests - 1 join behind a context that the cache already holds."""
        for request in range(requests):
            self.launch([], [self.chunk(request, context, start=context - 1)]).wait()
        return list(range(requests))


class RowByRow:
    """The kernels of another backend, with linear layers that compute every token alone, by one and the same call. A
    library's products of several rows promise no bits, so differences that remain are those of our kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def linear(
        self, weight: Tensor, bias: Tensor | None, scales_N: Tensor | None, gated: bool, dtype: torch.dtype
    ) -> object:
        def product(x: Tensor) -> Tensor:
            y = torch.stack([torch.mv(weight, row) for row in x])
            y = y if bias is None else y + bias
            return (self._kernels.silu_mul(y) if gated else y).to(dtype)

        return product


def _nothing() -> None:
    pass
