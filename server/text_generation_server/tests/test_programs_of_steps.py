"""Decode steps as programs on the CPU: the same tokens and log-probabilities, to the bit, as with single kernel
calls."""

from pathlib import Path

import pytest
import torch
from family_checkpoints import make_family
from shard_tools import CPU, SAMPLED, Client, make_checkpoint, make_runner, random_ids, scattered_slots
from torch import Tensor

import text_generation_server
from text_generation_common.flags.kinds import ActivationType, Dtype
from text_generation_common.flags.model import ComputeFlags, ShardFlags
from text_generation_common.sampling import Sampling
from text_generation_server.config import ShardConfig
from text_generation_server.device.graphs import no_graphs
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.layers.vocabulary import Head
from text_generation_server.layers.weights import WeightFormat, dense, int4, int8
from text_generation_server.load import load_shard
from text_generation_server.runner import ModelRunner
from text_generation_server.step.results import StepOutput
from text_generation_server.worker import Worker

NEEDS_PRODUCTS = "needs compiled matrix products: a C compiler (cc) at install, on x86-64"
DEMO_MODEL = Path(text_generation_server.__file__).parent / "demo_model"


def steps_of(runner: ModelRunner) -> list[StepOutput]:
    """Results of steps in which requests join and leave, so that the same number of rows occurs with other rows. All is
    repeated after a second Warmup."""
    return [output for tokens in (128, 600) for output in _round(runner, tokens)]


def _round(runner: ModelRunner, prefill_tokens: int) -> list[StepOutput]:
    runner.warmup(prefill_tokens, None, 24, None)
    client = Client(runner, scattered_slots(runner))
    outputs = [client.step([], [client.first_chunk(1, random_ids(9, 1)), client.first_chunk(2, random_ids(70, 2))])]
    outputs += [client.step([1, 2]) for _ in range(3)]
    outputs.append(client.step([1, 2], [client.first_chunk(3, random_ids(33, 3), parameters=SAMPLED)]))
    outputs += [client.step([1, 2, 3]) for _ in range(3)]
    many = list(range(4, 21))
    outputs.append(client.step([1, 2, 3], [client.first_chunk(i, random_ids(i, i)) for i in many]))
    outputs += [client.step([1, 2, 3, *many]) for _ in range(3)]
    outputs += [client.step([1, 2, *many[:6]]) for _ in range(3)]
    # A prompt that needs more memory than all before it.
    outputs.append(client.step([2, 3], [client.first_chunk(30, random_ids(300, 4), parameters=Sampling())]))
    outputs += [client.step([2, 3, *many]) for _ in range(2)]
    return outputs + [client.step([1, 2, 3, *many]) for _ in range(2)]


def said(outputs: list[StepOutput]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(list(o.request_ids), o.token_ids.tolist(), o.logprobs.tolist()) for o in outputs]


@pytest.mark.parametrize(
    ("target", "kv_dtype", "weight_format"),
    [
        (None, torch.bfloat16, dense),
        (None, torch.bfloat16, int8),
        (None, torch.int8, dense),
        ("avx512", torch.bfloat16, dense),
        ("avx2", torch.bfloat16, dense),
        ("portable", torch.bfloat16, dense),
    ],
)
def test_steps_by_program_give_the_same_results_as_kernel_by_kernel(
    tmp_path: Path, target: str | None, kv_dtype: torch.dtype, weight_format: WeightFormat
) -> None:
    kernels = load_kernels(target)
    if kernels is None or not kernels.library.has("gemm"):
        pytest.skip(f"{NEEDS_PRODUCTS}; target: {target}")
    make_checkpoint(tmp_path)
    programs = DecodePrograms(kernels.library, kernels.threads)
    types = {"weight_format": weight_format, "kv_dtype": kv_dtype}
    plain = make_runner(tmp_path, torch.bfloat16, graphs=no_graphs(), kernels=kernels, **types)
    fast = make_runner(tmp_path, torch.bfloat16, graphs=programs, kernels=kernels, **types)
    assert said(steps_of(fast)) == said(steps_of(plain))
    assert set(programs._programs) == {1, 2, 3, 8, 19, 20}


@pytest.mark.parametrize(
    ("weight_format", "experts"), [(int8, None), (int4, None), (int8, "mixtral"), (int4, "qwen2_moe")]
)
def test_steps_with_activations_in_8_bits_are_recorded_too(
    tmp_path: Path, weight_format: WeightFormat, experts: str | None
) -> None:
    kernels = load_kernels(activations=ActivationType.int8)
    if kernels is None:
        pytest.skip(NEEDS_PRODUCTS)
    if experts is None:
        make_checkpoint(tmp_path, tie_word_embeddings=True)
    else:
        make_family(tmp_path, experts)
    programs = DecodePrograms(kernels.library, kernels.threads)
    plain, fast = (
        make_runner(tmp_path, torch.bfloat16, graphs=graphs, kernels=kernels, weight_format=weight_format)
        for graphs in (no_graphs(), programs)
    )
    assert said(steps_of(fast)) == said(steps_of(plain))
    assert set(programs._programs) == {1, 2, 3, 8, 19, 20}
    assert kernels.has_int_products and kernels.has_int_experts == (experts is not None)


def is_recorded(path: Path) -> None:
    """The model's steps are recorded as programs, and say what steps of single calls say."""
    kernels = select_backend(CPU).kernels
    if not isinstance(kernels, CpuKernels) or not kernels.library.has("gemm"):
        pytest.skip(NEEDS_PRODUCTS)
    programs = DecodePrograms(kernels.library, kernels.threads)
    fast = make_runner(path, torch.bfloat16, graphs=programs, kernels=kernels)
    plain = make_runner(path, torch.bfloat16, graphs=no_graphs())
    assert said(_round(fast, 128)) == said(_round(plain, 128))
    assert set(programs._programs) == {1, 2, 3, 8, 19, 20}


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_the_choice_of_experts_is_part_of_a_program(tmp_path: Path, variant: str) -> None:
    make_family(tmp_path, variant)
    is_recorded(tmp_path)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_an_mlp_whose_size_fills_no_panel_is_part_of_a_program(tmp_path: Path, activation: str) -> None:
    make_checkpoint(tmp_path, hidden_act=activation, intermediate_size=40, mlp_bias=True)
    is_recorded(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_is_read_from_the_head_which_alone_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    kernels = load_kernels()
    if kernels is None or not kernels.library.has("gemm"):
        pytest.skip(NEEDS_PRODUCTS)
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    kept: list[Tensor] = []
    monkeypatch.setattr(kernels, "embed", lambda _, weight: kept.append(weight))
    tied = said(steps_of(make_runner(tmp_path, dtype, kernels=kernels)))
    assert not kept
    monkeypatch.undo()
    monkeypatch.setattr(Head, "look_up", lambda _: None)
    assert tied == said(steps_of(make_runner(tmp_path, dtype, kernels=kernels)))


def test_where_torch_computes_the_products_steps_run_kernel_by_kernel(tmp_path: Path) -> None:
    kernels = select_backend(CPU).kernels
    if not isinstance(kernels, CpuKernels):
        pytest.skip("needs a C compiler (cc) when the package is installed")
    make_checkpoint(tmp_path)
    programs = DecodePrograms(kernels.library, kernels.threads)
    fast = make_runner(tmp_path, torch.float32, graphs=programs, kernels=kernels)
    assert said(steps_of(fast)) == said(steps_of(make_runner(tmp_path, torch.float32, graphs=no_graphs())))
    assert not programs._programs


@pytest.mark.parametrize(("sizes", "recorded"), [(None, True), ("1,2", True), ("0", False)])
def test_steps_are_recorded_unless_cuda_graphs_is_0(sizes: str | None, recorded: bool) -> None:
    if not isinstance(select_backend(CPU).kernels, CpuKernels):
        pytest.skip("needs a C compiler (cc) when the package is installed")
    config = ShardConfig(
        model_path=DEMO_MODEL, uds_path="", rank=0, world_size=1, epoch=1, max_total_tokens=64,
        compute=ComputeFlags(dtype=Dtype.bfloat16), shard=ShardFlags(cuda_graphs=sizes),
    )  # fmt: skip
    assert isinstance(load_shard(config, Worker(1)).runner._platform.graphs, DecodePrograms) == recorded
