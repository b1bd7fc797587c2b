"""Models of all architectures that GGUF files may have, and the files that llama.cpp's own converter has made of them.

The files are too large to be kept. `gguf_goldens.json` has what the converter wrote: keys, names, types and shapes, and
a hash of each tensor. The weights come from a generator of their own, so a test makes the same tensors again: each is a
tensor of the checkpoint, or a part, a stack or another order of such, whichever has the hash.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from family_checkpoints import GAINS, SHAPE, VARIANTS, draw_vector
from gguf_writer import write_gguf
from int_products import HALVES
from safetensors.torch import load_file
from torch import Tensor

from text_generation_common.gguf.container import ARRAY, TEXT
from text_generation_common.gguf.types import BY_NAME, DENSE
from text_generation_common.quantized.tensors.blocks import read_blocks
from text_generation_common.quantized.tensors.matrix import exact_weight

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
FIXTURES: dict[str, list[Any]] = TABLE["fixtures"]
GOLDENS = Path(__file__).with_name("gguf_goldens.json")
NUMBERED = re.compile(r"experts\.(\d+)\.")
HASH_BYTES = 8
FLOAT = 6  # a kind of values in GGUF files


def make_original(folder: Path, fixture: str) -> torch.nn.Module:
    """Writes the checkpoint from which the GGUF file is made, and returns transformers' own model of it, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    variant, changes = FIXTURES[fixture]
    model_type, of_variant = VARIANTS[variant]
    config = AutoConfig.for_model(
        model_type, **{**SHAPE, **of_variant, **TABLE["shape"], **_kept(of_variant), **changes}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if model_type == "falcon" else "eager")
    for name, parameter in model.named_parameters():
        _draw(name, parameter, config)
    model.save_pretrained(folder)
    return model.eval()


def _kept(of_variant: dict[str, Any]) -> dict[str, Any]:
    return {name: of_variant[name] for name in ("num_key_value_heads", "num_hidden_layers") if name in of_variant}


def _draw(name: str, parameter: torch.nn.Parameter, config: Any) -> None:
    """Numbers that every version of every library draws alike: whole ones, of which few bits are kept."""
    drawn = np.random.default_rng(crc32(name.encode())).integers(-127, 128, parameter.numel(), dtype=np.int8)
    numbers = torch.from_numpy(drawn).view(parameter.shape).float() / 73  # a standard deviation of 1
    if parameter.dim() > 1:
        gain = next((gain for part, gain in GAINS if re.search(part, name)), 1.0)
        parameter.data = numbers * gain * parameter.shape[-1] ** -0.5
    else:
        draw_vector(name, parameter, config, calm=False, numbers=numbers)


def make_gguf(path: Path, folder: Path, golden: dict[str, Any]) -> None:
    """Writes the file that llama.cpp's converter makes of the checkpoint. KeyError for a tensor that it made in
    another way than those that are known."""
    sizes = {tensor["hash"]: math.prod(tensor["shape"]) for tensor in golden["tensors"] if "hash" in tensor}
    fitting = (tensor for tensor in variants_of(folder, golden) if tensor.numel() in sizes.values())
    found = {key: tensor for tensor in fitting if (key := hash_of(tensor)) in sizes}
    tensors = {}
    for entry in golden["tensors"]:
        numbers = torch.tensor(entry["numbers"]) if "numbers" in entry else found[entry["hash"]]
        tensors[entry["name"]] = numbers.view(entry["shape"])
    write_gguf(path, golden["keys"] | tokenizer_keys(len(tensors["token_embd.weight"])), tensors)


def tokenizer_keys(count: int) -> dict[str, Any]:
    """A tokenizer, which the converter's files of these models do not have."""
    tokens, scores = [f"token{id}" for id in range(count)], [float(-id) for id in range(count)]
    keys = {"model": (TEXT, "llama"), "tokens": (ARRAY, (TEXT, tokens)), "scores": (ARRAY, (FLOAT, scores))}
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def hash_of(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=HASH_BYTES).hexdigest()


def variants_of(folder: Path, golden: dict[str, Any]) -> Iterator[Tensor]:
    """What a converter may have made of the checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    experts = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := NUMBERED.search(name):
            experts[NUMBERED.sub("", name)][int(match[1])] = tensor
    stacks = [torch.stack([of[number] for number in sorted(of)]) for of in experts.values()]
    keys = {name.partition(".")[2]: value for name, (_, value) in golden["keys"].items()}
    heads = keys["attention.head_count"], keys.get("attention.head_count_kv", keys["attention.head_count"])
    for tensor in (*tensors.values(), *stacks):
        yield from _forms(tensor.float(), *heads)


def _forms(tensor: Tensor, heads: int, kv_heads: int) -> Iterator[Tensor]:
    yield tensor
    yield tensor + 1
    for count in {heads, kv_heads}:  # rows that are turned together become neighbours
        if tensor.dim() < 3 and tensor.shape[0] % (2 * count) == 0:
            yield tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    group = heads // kv_heads + 2  # queries, keys and values of each key head become all queries, all keys, all values
    if tensor.dim() < 3 and tensor.shape[0] % (kv_heads * group) == 0:
        grouped = tensor.view(kv_heads, group, -1, *tensor.shape[1:])
        yield torch.cat([part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])
    if tensor.dim() > 1:
        yield from (tensor.mT, *tensor.chunk(2, dim=-2), *tensor.mT.chunk(2, dim=-2))
        yield from (tensor[..., 0::2], tensor[..., 1::2], tensor.mT[..., 0::2, :], tensor.mT[..., 1::2, :])


Drawn = Mapping[str, tuple[str, Tensor]]  # by name: the type, and numbers, or the bytes of blocks as uint8


def draw_tensors(golden: dict[str, Any], kinds: Iterable[str]) -> dict[str, tuple[str, Tensor]]:
    """Random tensors with the names and shapes of a file's. Weights have the types `kinds` in turn; norms, biases and
    routers are float32. Logits stay within a few units."""
    generator, turns, found = torch.Generator().manual_seed(36), cycle(kinds), dict[str, tuple[str, Tensor]]()
    for entry in golden["tensors"]:
        name, shape = entry["name"], entry["shape"]
        if "numbers" in entry:
            found[name] = "F32", torch.tensor(entry["numbers"]).view(shape)
        elif len(shape) > 1 and name.endswith(".weight") and "ffn_gate_inp" not in name:
            found[name] = (kind := next(turns)), _draw_weight(kind, shape, generator)
        else:
            numbers = torch.randn(shape, generator=generator) * 0.3
            found[name] = "F32", numbers + float(name.endswith("norm.weight"))
    return found


def _draw_weight(kind: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Numbers with a standard deviation of about 1 / sqrt(inputs); those of blocks have random bits in all places."""
    inputs = shape[-1]
    if kind in DENSE:
        return torch.randn(*shape, generator=generator) * inputs**-0.5
    of, outputs = BY_NAME[kind], math.prod(shape[:-1])
    data = torch.randint(0, 256, (outputs, inputs // of.block, of.bytes), generator=generator, dtype=torch.uint8)
    if kind == "MXFP4":
        data[..., 0] = (data[..., 0] & 3) + 119  # powers from 2^-8 to 2^-5
    scales, size = torch.rand(2, *data.shape[:-1], 1, generator=generator) - 0.5, 2.0**-8
    for _ in range(2):  # the second time in the size that the first one has lacked
        for at, numbers in zip(HALVES[kind], scales, strict=False):
            data[..., at : at + 2] = (numbers * size).half().view(torch.uint8)
        size *= inputs**-0.5 / exact_weight(read_blocks(kind, data[:16].flatten(1), kind)).std().item()
    return data.view(*shape[:-1], -1)


def as_numbers(drawn: Drawn) -> Drawn:
    """The same tensors, with the numbers of blocks as float32."""
    return {name: ("F32", exact_weight(read_blocks(kind, data, name))) for name, (kind, data) in drawn.items()}


def write_drawn(path: Path, keys: Mapping[str, Any], drawn: Drawn) -> Path:
    """`keys`: those of a golden file."""
    tensors = {}
    for name, (kind, data) in drawn.items():
        of, row_bytes = BY_NAME[kind], data.shape[-1] * data.element_size()
        shape = [*data.shape[:-1], row_bytes // of.bytes * of.block]
        tensors[name] = kind, shape, data.contiguous().view(torch.uint8).numpy().tobytes()
    write_gguf(path, {**keys, **tokenizer_keys(len(drawn["token_embd.weight"][1]))}, tensors)
    return path
