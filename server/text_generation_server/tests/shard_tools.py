"""Small checkpoints with random weights, and a runner over them, for the tests of the shard."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from text_generation_common.flags.kinds import ActivationType
from text_generation_common.models.quantized_layers import quantized_layers
from text_generation_common.sampling import Sampling
from text_generation_server.device.graphs import no_graphs
from text_generation_server.distributed import Alone, Group
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.kernels.interface import Kernels
from text_generation_server.layers.weights import WeightFormat, dense
from text_generation_server.models import get_model, read_any_config
from text_generation_server.models.adapters import AdapterBank
from text_generation_server.models.stored_codes import packed_layers
from text_generation_server.platforms import Platform
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.rows import PromptChunk, StepBatch
from text_generation_server.weights.gguf_files import open_files

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CPU = torch.device("cpu")
ALONE = Group(0, 1, Alone())
BATCH = 1
SAMPLED = Sampling(
    do_sample=True, temperature=0.8, top_k=40, top_p=0.95, typical_p=0.98, repetition_penalty=1.1,
    frequency_penalty=0.2, seed=2**64 - 3, watermark=True, top_n_tokens=3, presence_penalty=0.1, logit_bias=((7, 1.5),),
    allowed_token_ids=tuple(range(3, 300)), bad_words_ids=((9,), (20, 21)), min_new_tokens=5, end_token_ids=(7, 30),
)  # fmt: skip


def random_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed))


def make_checkpoint(path: Path, **changes: Any) -> "LlamaForCausalLM":
    """Writes a tiny Llama under `path` and returns transformers' own model of it, in float32."""
    # Imported here, because the ranks' processes import this file and do not need transformers.
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(
        vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(path)
    return model


def make_runner(
    path: Path,
    dtype: torch.dtype = torch.float32,
    max_total_tokens: int = 512,
    group: Group = ALONE,
    on_tensor: Callable[[], None] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
    kernels: Kernels | None = None,
    weight_format: WeightFormat = dense,
    kv_dtype: torch.dtype | None = None,
    with_families: bool = True,
    constraints: Constraints | None = None,
    adapters: AdapterBank | None = None,
    wrap: Callable[[Any], Any] = lambda model: model,
    **recording: Any,
) -> ModelRunner:
    """`with_families`: False if transformers is to compute the model. `wrap`: gets the model, and returns the one that
    runs. `recording`: the platform's device, graphs or moments."""
    platform = make_platform(kernels, group, **recording)
    config, files = read_any_config(path, with_families=with_families), open_files(path)
    layers = quantized_layers(path, files.describe)
    packed = None if layers is None else packed_layers(layers, files)
    model = get_model(
        files, config, platform, dtype, max_total_tokens, on_tensor, weight_format, packed, adapters=adapters
    )
    sampler = Sampler(platform.kernels, 0.5, 2.0)
    return ModelRunner(
        wrap(model), platform, sampler, on_progress, kv_dtype, constraints=constraints, adapters=adapters
    )


def usable_kernels(target: str | None = None) -> CpuKernels:
    """The compiled kernels for a target, or the best ones; skips the test where the processor cannot run them."""
    import pytest

    if (kernels := load_kernels(target)) is None:
        processor = f"a processor with {target}, and " if target else ""
        pytest.skip(f"needs {processor}a C compiler (cc) when the package is installed")
    return kernels


def make_platform(
    kernels: Kernels | None = None, group: Group = ALONE, device: torch.device = CPU, **recording: Any
) -> Platform:
    return Platform(device, kernels or select_backend(device).kernels, group, **recording)


def warm_runner(path: Path, **options: Any) -> ModelRunner:
    runner = make_runner(path, **options)
    runner.warmup(512, None, 16, None)
    return runner


@dataclass
class Client:
    """Calls one runner as the router would: assigns slots, and collects tokens."""

    runner: ModelRunner
    slots: torch.Tensor  # int32; free slots, taken from the front
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def take(self, count: int) -> torch.Tensor:
        taken, self.slots = self.slots[:count], self.slots[count:]
        return taken

    def first_chunk(
        self, request_id: int, ids: torch.Tensor, end: int | None = None, prompt_length: int | None = None,
        parameters: Sampling | None = None, start: int = 0, prompt_logprobs: int | None = None,
    ) -> PromptChunk:  # fmt: skip
        end = len(ids) if end is None else end
        return PromptChunk(
            request_id, start, end, end == len(ids), ids.int(), self.take(len(ids)), prompt_length or len(ids),
            parameters or Sampling(), prompt_logprobs,
        )  # fmt: skip

    def launch(self, decode_ids: list[int], chunks: list[PromptChunk] | None = None) -> Pending[StepOutput]:
        decoding = [StepBatch(BATCH, decode_ids)] if decode_ids else []
        return self.runner.step(decoding, self.take(len(decode_ids)), BATCH, chunks or [])

    def step(self, decode_ids: list[int], chunks: list[PromptChunk] | None = None) -> StepOutput:
        output = self.launch(decode_ids, chunks).wait()
        for request_id, token, logprob in zip(
            output.request_ids, output.token_ids.tolist(), output.logprobs.tolist(), strict=True
        ):
            self.tokens.setdefault(request_id, []).append(token)
            self.logprobs.setdefault(request_id, []).append(logprob)
        return output


def scattered_slots(runner: ModelRunner, seed: int = 0) -> torch.Tensor:
    count = runner._kv_cache[0].heads.shape[0] - 1
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).int()


def fresh_client(runner: ModelRunner) -> Client:
    """A client of a runner from which all rows are gone."""
    runner.clear(None)
    return Client(runner, scattered_slots(runner))


def generate(runner: ModelRunner, ids: torch.Tensor, new: int, parameters: Sampling | None = None) -> Client:
    """Runs one request alone."""
    client = fresh_client(runner)
    client.step([], [client.first_chunk(7, ids, parameters=parameters)])
    for _ in range(new - 1):
        client.step([7])
    return client


def assert_decode_steps_are_recorded(path: Path, activations: ActivationType = ActivationType.model) -> None:
    """The first decode step of each number of rows is recorded. From then on no step calls the model: programs compute
    all of it and the head, and say what steps of single calls say."""
    import pytest

    kernels = load_kernels(activations=activations)
    if kernels is None or not kernels.library.has("gemm"):
        pytest.skip("needs compiled products of bfloat16")
    programs, texts = DecodePrograms(kernels.library, kernels.threads), list[object]()
    for graphs, calls in ((programs, 0), (no_graphs(), 4)):
        runner = warm_runner(path, dtype=torch.bfloat16, kernels=kernels, graphs=graphs)
        client = fresh_client(runner)
        client.step([], [client.first_chunk(1, random_ids(24, 1)), client.first_chunk(2, random_ids(9, 2))])
        client.step([1, 2])
        called = count_forwards(runner._model)
        for rows in ([1, 2], [1], [1, 2], [2]):
            client.step(rows)
        assert len(called) == calls
        texts.append((client.tokens, client.logprobs))
    assert texts[0] == texts[1]
    assert programs._programs.keys() == {1, 2} and all(each.has_head for each in programs._programs.values())


def count_forwards(model: Any) -> list[None]:
    """A list that gets an item whenever the model computes from now on."""
    called, forward = list[None](), model.forward

    def forward_and_count(*inputs: Any) -> torch.Tensor:
        called.append(None)
        made: torch.Tensor = forward(*inputs)
        return made

    model.forward = forward_and_count
    return called
