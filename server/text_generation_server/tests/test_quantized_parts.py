"""Quantized heads, embeddings and experts: log-probabilities and texts are those that transformers computes with the
same numbers in float32."""

import gc
from pathlib import Path
from typing import Any

import model_tasks as tasks
import pytest
import torch
from collective_tasks import Ranks
from fallback_checkpoints import expected_logprobs, make_model
from family_checkpoints import make_family
from family_tools import mean_error
from safetensors.torch import load_file, save_file
from shard_tools import (
    ALONE,
    Client,
    assert_decode_steps_are_recorded,
    generate,
    make_checkpoint,
    make_runner,
    random_ids,
    warm_runner,
)  # fmt: skip
from torch import Tensor
from written_codes import quantize

from text_generation_common.errors import ModelError
from text_generation_common.weights.headers import verify
from text_generation_server.models.decoder import Decoder

PROMPT, NEW = random_ids(24), 6


def with_numbers(exact: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32, attn_implementation="eager").eval()


def check(packed: Path, exact: Path, bound: float = 1e-4, **options: Any) -> Client:
    verify(packed)
    client = generate(warm_runner(packed, **options), PROMPT, NEW)
    tokens = client.tokens[7]
    expected: Tensor = expected_logprobs(with_numbers(exact), PROMPT, tokens)
    assert (torch.tensor(client.logprobs[7]) - expected[range(NEW), tokens]).abs().max() <= bound
    assert tokens == expected.argmax(-1).tolist()
    return client


def make_pair(tmp_path: Path, name: str, also: tuple[str, ...], **changes: Any) -> tuple[Path, Path]:
    packed, exact = tmp_path / "packed", tmp_path / "exact"
    (dense := tmp_path / "dense").mkdir()
    make_checkpoint(dense, initializer_range=0.1, num_hidden_layers=1, **changes)
    quantize(dense, name, packed, exact, also)
    return packed, exact


HEAD, TABLE = "lm_head", "embed_tokens"


@pytest.mark.parametrize(
    ("name", "also", "is_tied"),
    [
        ("gptq act-order", (HEAD, TABLE), False),
        ("awq", (HEAD,), True),
        ("packed with zeros", (TABLE,), True),
        ("fp8 blocks", (HEAD, TABLE), False),
    ],
)
def test_a_quantized_head_or_embedding_is_computed_as_its_numbers(
    tmp_path: Path, name: str, also: tuple[str, ...], is_tied: bool
) -> None:
    check(*make_pair(tmp_path, name, also, tie_word_embeddings=is_tied))


def tables() -> set[int]:
    """The addresses of all tensors that are as large as the codes of a table in 4 bits, or have the table's numbers,
    [320, 64]."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))  # isinstance would run others' code
    return {tensor.data_ptr() for tensor in found if tensor.nbytes == 320 * 32 or tensor.numel() == 320 * 64}


@pytest.mark.parametrize(
    ("name", "dtype"), [("packed with zeros", torch.bfloat16), ("int8", torch.bfloat16), ("nf4", torch.float32)]
)
def test_a_tied_weight_of_codes_is_there_once(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Rows are read from the panels of the compiled product, or from the codes that torch multiplies by."""
    packed, exact = make_pair(tmp_path, name, (TABLE,), tie_word_embeddings=True, intermediate_size=96)
    before = tables()
    model = make_runner(packed, dtype=dtype)._model
    assert len(tables() - before) == 1
    numbers = load_file(exact / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.tensor([0, 17, 319, 16], dtype=torch.int32)
    assert isinstance(model, Decoder) and torch.equal(model._embed(ids), numbers[ids].to(dtype))


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [("gptq act-order", False), ("awq", True), ("fp8 blocks", True), ("int8", True), ("int8", False), ("nf4", False)],
)
def test_decode_steps_with_an_embedding_of_codes_are_recorded(tmp_path: Path, name: str, is_tied: bool) -> None:
    folder, _ = make_pair(tmp_path, name, (TABLE,), tie_word_embeddings=is_tied)
    assert_decode_steps_are_recorded(folder)


# Each format of files once, and each family: experts apart, in one tensor, beside a shared one or a layer without.
EXPERTS = {
    "qwen3_moe": "fp8 blocks",
    "mixtral": "awq",
    "qwen2_moe": "gptq act-order",
    "olmoe": "nf4",
    "granitemoe": "packed with zeros",
}


def make_experts(tmp_path: Path, family: str, name: str, also: tuple[str, ...] = ()) -> tuple[Path, Path]:
    packed, exact = tmp_path / "packed", tmp_path / "exact"
    (dense := tmp_path / "dense").mkdir()
    make_family(dense, family, calm=True)
    quantize(dense, name, packed, exact, also)
    return packed, exact


@pytest.mark.parametrize(("family", "name"), EXPERTS.items())
def test_quantized_experts_are_computed_as_their_numbers(tmp_path: Path, family: str, name: str) -> None:
    check(*make_experts(tmp_path, family, name))


@pytest.mark.parametrize(("family", "name"), [*EXPERTS.items(), ("qwen2_moe", "nf4")])
def test_decode_steps_with_experts_of_codes_are_recorded(tmp_path: Path, family: str, name: str) -> None:
    """A gate and its up have one order of inputs: it is chosen by what the inputs are."""
    packed, _ = make_experts(tmp_path, family, name)
    tensors = load_file(packed / "model.safetensors")
    for up in [tensor for tensor in tensors if tensor.endswith("up_proj.g_idx")]:
        tensors[up] = tensors[up.replace("up_proj", "gate_proj")].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    assert_decode_steps_are_recorded(tmp_path)


def test_experts_of_one_tensor_are_packed_each_alone(tmp_path: Path) -> None:
    check(*make_experts(tmp_path, "granitemoe", "mxfp4"))


def test_in_bfloat16_experts_of_codes_err_no_more_than_their_numbers(tmp_path: Path) -> None:
    """Rounding chooses other experts for some tokens, so the ratio is 0.8 to 1.05."""
    packed, exact = make_experts(tmp_path, "mixtral", "gptq 4 bits", (HEAD,))
    model = with_numbers(exact)
    of_codes, of_numbers = (mean_error(model, warm_runner(each, dtype=torch.bfloat16)) for each in (packed, exact))
    assert of_codes <= 1.3 * of_numbers


def test_quantized_routers_are_read_as_numbers(tmp_path: Path) -> None:
    check(*make_experts(tmp_path, "qwen2_moe", "nf4", ("mlp.gate", "shared_expert_gate")))


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "fp8 blocks"), ("granitemoe", "packed with zeros")])
def test_two_ranks_divide_quantized_experts_heads_and_embeddings(
    tmp_path: Path, ranks: Ranks, family: str, name: str
) -> None:
    folder, _ = make_experts(tmp_path, family, name, (HEAD, TABLE))
    whole = tasks.greedy_texts(ALONE, folder, 320)
    first, _ = ranks.run(2, tasks.greedy_texts, folder, 320)
    for (tokens, logprobs), (whole_tokens, whole_logprobs) in zip(first, whole, strict=True):
        assert tokens == whole_tokens
        torch.testing.assert_close(logprobs, whole_logprobs, atol=1e-4, rtol=1e-5)


def make_foreign(
    tmp_path: Path, model_type: str, name: str, also: tuple[str, ...], **changes: Any
) -> tuple[Path, Path]:
    """A model of a type that transformers computes."""
    packed, exact = tmp_path / "packed", tmp_path / "exact"
    (dense := tmp_path / "dense").mkdir()
    make_model(dense, model_type, num_hidden_layers=2, **changes)
    quantize(dense, name, packed, exact, also)
    return packed, exact


@pytest.mark.parametrize(
    ("name", "also", "changes"),
    [
        ("gptq act-order", (), {"attention_bias": True, "attention_out_bias": True}),
        ("awq", (HEAD,), {}),
        ("packed", (HEAD,), {"tie_word_embeddings": True}),
        ("int8", (), {}),
        ("bitsandbytes int8", (HEAD,), {}),
        ("fp8 blocks", (), {"tie_word_embeddings": True}),
        ("fp8 of fbgemm", (), {}),
        ("nf4", (HEAD,), {}),
        ("fp4", (), {}),
        ("mxfp4", (), {}),
        ("nvfp4", (HEAD,), {}),
    ],
)
def test_linear_layers_of_models_that_transformers_computes(
    tmp_path: Path, name: str, also: tuple[str, ...], changes: dict[str, Any]
) -> None:
    check(*make_foreign(tmp_path, "seed_oss", name, also, **changes))


@pytest.mark.parametrize(
    ("model_type", "also", "told"),
    [
        ("seed_oss", (TABLE,), "model.embed_tokens.g_idx is stored as I32, and of a model that transformers comp"),
        ("glm4_moe", (), "config.json: the weights are quantized as gptq, which is not supported for the experts of a"),
    ],
)
def test_other_layers_of_models_that_transformers_computes_are_refused(
    tmp_path: Path, model_type: str, also: tuple[str, ...], told: str
) -> None:
    packed, _ = make_foreign(tmp_path, model_type, "gptq 4 bits", also)
    with pytest.raises(ModelError, match=told):
        make_runner(packed)
