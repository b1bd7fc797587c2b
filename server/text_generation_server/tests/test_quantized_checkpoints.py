"""Checkpoints whose linear layers are quantized, in each format that is served: log-probabilities and texts are those
that transformers computes with the same numbers in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import model_tasks as tasks
import pytest
import torch
from collective_tasks import Ranks
from fallback_checkpoints import expected_logprobs
from family_checkpoints import make_family
from family_tools import FIRST, mean_error
from safetensors.torch import load_file, save_file
from shard_tools import (
    ALONE,
    Client,
    assert_decode_steps_are_recorded,
    generate,
    make_checkpoint,
    make_runner,
    random_ids,
    usable_kernels,
    warm_runner,
)  # fmt: skip
from torch import Tensor
from written_codes import FORMATS, quantize

from text_generation_common.cpu_features import NEEDS
from text_generation_common.flags.kinds import ActivationType
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import linear_sizes
from text_generation_common.weights.headers import verify

PROMPT, NEW = random_ids(24), 6
LONG = 64  # tokens of the texts that are compared with transformers'


@dataclass(frozen=True)
class Pair:
    packed: Path
    exact: Path  # the same numbers in float32
    model: torch.nn.Module  # transformers' model with the same numbers

    def expected(self, tokens: list[int]) -> Tensor:
        return expected_logprobs(self.model, PROMPT, tokens)

    def errors(self, client: Client) -> Tensor:
        """How far the log-probabilities of a text are from those of float32."""
        tokens = client.tokens[7]
        return (torch.tensor(client.logprobs[7]) - self.expected(tokens)[range(len(tokens)), tokens]).abs()


Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    dense = tmp_path_factory.mktemp("dense")
    model = make_checkpoint(dense, initializer_range=0.1, num_hidden_layers=2)

    @cache
    def folders(name: str) -> tuple[Path, Path, dict[str, Tensor]]:
        packed, exact = (tmp_path_factory.mktemp(name) / kind for kind in ("packed", "exact"))
        return packed, exact, quantize(dense, name, packed, exact)

    def pair(name: str) -> Pair:
        packed, exact, numbers = folders(name)
        model.load_state_dict(numbers)
        return Pair(packed, exact, model)

    return pair


# Formats whose products run on every target, one for each form of weights. `-m slow` takes the others, too.
ON_ALL_TARGETS = ("gptq 3 bits", "gptq act-order", "int8", "fp8 blocks", "nvfp4")
ON_TARGETS = [
    *((name, None) for name in FORMATS),
    *(
        pytest.param(name, target, marks=() if name in ON_ALL_TARGETS else pytest.mark.slow)
        for name, target in product(FORMATS, NEEDS)
    ),
]


@pytest.mark.parametrize(("name", "target"), ON_TARGETS)
def test_a_quantized_checkpoint_is_computed_as_its_numbers(pairs: Pairs, name: str, target: str | None) -> None:
    """`target`: None for the best kernels of this machine, which may be torch's."""
    kernels = None if target is None else usable_kernels(target)
    pair = pairs(name)
    verify(pair.packed)
    client = generate(warm_runner(pair.packed, kernels=kernels), PROMPT, LONG)
    assert pair.errors(client).max() <= 1e-4
    assert client.tokens[7] == pair.expected(client.tokens[7]).argmax(-1).tolist()


@pytest.mark.parametrize(
    "name", ["gptq 4 bits", "gptq act-order", "gptq 8 bits", "packed with zeros", "int8", "fp8 blocks"]
)
def test_in_bfloat16_the_codes_err_no_more_than_their_numbers(pairs: Pairs, name: str) -> None:
    """Codes are not rounded, as weights in bfloat16 are: the ratio is 0.85 to 1.0. If products round their results to
    one bit less, it is 1.15 to 1.4."""
    pair = pairs(name)
    of_codes, of_numbers = (
        mean_error(pair.model, warm_runner(folder, dtype=torch.bfloat16)) for folder in (pair.packed, pair.exact)
    )
    assert of_codes <= 1.1 * of_numbers


# Formats whose products may take activations of 8 bits.
OF_INTS = [name for name in FORMATS if not name.startswith(("fp", "nf4", "nvfp4", "packed of mixed"))]
# Formats that are kept in memory as others are, which `-m slow` takes, too.
ALIKE = {
    *("gptq 2 bits", "gptq 3 bits", "gptq symmetric", "auto-round", "auto-round as awq", "packed with zeros"),
    *("packed 8 bits", "fp8 of modelopt", "bitsandbytes int8", "nvfp4 of modelopt"),
}
RECORDED = [
    pytest.param(name, activations, marks=pytest.mark.slow if name in ALIKE else ())
    for activations, names in ((ActivationType.model, FORMATS), (ActivationType.int8, OF_INTS))
    for name in names
]


@pytest.mark.parametrize(("name", "activations"), RECORDED)
def test_decode_steps_are_recorded_where_compiled_kernels_multiply(
    pairs: Pairs, name: str, activations: ActivationType
) -> None:
    assert_decode_steps_are_recorded(pairs(name).packed, activations)


ON_TWO_RANKS = (
    *("gptq 4 bits", "gptq act-order", "awq", "packed", "int8", "fp8 blocks", "nf4", "nf4 twice", "bitsandbytes int8"),
    *("mxfp4", "nvfp4", "packed of mixed formats"),
)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_compute_the_same_as_one(pairs: Pairs, ranks: Ranks, name: str) -> None:
    folder = pairs(name).packed
    whole = tasks.greedy_texts(ALONE, folder, 320)
    first, _ = ranks.run(2, tasks.greedy_texts, folder, 320)
    for (tokens, logprobs), (whole_tokens, whole_logprobs) in zip(first, whole, strict=True):
        assert tokens == whole_tokens
        torch.testing.assert_close(logprobs, whole_logprobs, atol=1e-4, rtol=1e-5)


# Ends of the names of linear layers in families that do not have Llama's.
OTHERS = (
    "dense", "dense_h_to_4h", "dense_4h_to_h", "query_key_value", "Wqkv", "out_proj", "fc1", "fc2", "fc_in", "fc_out",
    "c_attn", "c_fc", "c_proj",
)  # fmt: skip
# Families with experts have tests of their own (test_quantized_parts.py, test_mxfp4.py).
DENSE = [name for name in FIRST if "moe" not in name and name not in ("mixtral", "gpt_oss")]
QUICK = ("gemma2", "granite", "phi3, windows")  # soft-caps; constant factors; layers that share a tensor


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DENSE]
)
def test_all_linear_layers_of_a_family_may_be_quantized(tmp_path: Path, family: str) -> None:
    packed, exact, dense = (tmp_path / name for name in ("packed", "exact", "dense"))
    model = make_family(dense, family, calm=True)
    config = read_config(dense)
    numbers = quantize(dense, "gptq 4 bits", packed, exact, OTHERS, turned=config.names.transposed)
    model.load_state_dict(numbers, strict=False)
    assert {f"{name}.qweight" for name in linear_sizes(config)} <= load_file(packed / "model.safetensors").keys()
    pair = Pair(packed, exact, model)
    client = generate(warm_runner(packed), PROMPT, NEW)
    assert pair.errors(client).max() <= 1e-4
    assert client.tokens[7] == pair.expected(client.tokens[7]).argmax(-1).tolist()


def changed(folder: Path, into: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (into / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, into / "model.safetensors")
    return into


BIAS = "model.layers.1.mlp.up_proj.bias"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update({BIAS: torch.ones(160)}), f"{BIAS} with numbers other than 0"),
        (
            lambda t: t.update({"lm_head.qweight": t.pop("lm_head.weight").int()}),
            r"lm_head.qweight has the shape \[320",
        ),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}), "no tensor lm_head.qweight"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}),
            "the tensor model.norm.weight is stored as I8, and only linear layers, their experts and the embedding",
        ),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.scales"), r"no tensor model\.layers\.0\.mlp\.up_proj\.scales"),
        (lambda t: t.update({"model.layers.0.mlp.extra": torch.ones(3)}), "have a tensor model.layers.0.mlp.extra"),
    ],
)
def test_tensors_that_do_not_belong_to_the_settings_are_refused(
    pairs: Pairs, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        make_runner(changed(pairs("gptq 4 bits").packed, tmp_path, change))
