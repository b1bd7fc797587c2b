"""Writes Llama checkpoints of a given shape with random weights, and a tokenizer that fits them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from text_generation_benchmark.shapes import END_OF_TEXT, LlamaShape
from text_generation_common.model_files import demo_directory
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes

DEVIATION = 0.02


def write_checkpoint(out: Path, shape: LlamaShape, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json, the demo model's tokenizer and model.safetensors, whose weights are the same every time.

    The embedding of the end-of-text token is zero, so its logit is zero and never the largest. Every server then makes
    exactly the number of tokens that a request asks for, even a server that cannot be told to ignore the end-of-text
    token.
    """
    write_without_weights(out, shape, dtype)
    generator = torch.Generator().manual_seed(0)

    def made(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, dtype=dtype)
        return (torch.randn(size, generator=generator) * DEVIATION).to(dtype)

    config = read_config(out)
    tensors = {name: made(name, size) for name, size in shapes(config).items()}
    tensors[f"{config.names.embedding}.weight"][END_OF_TEXT] = 0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_without_weights(out: Path, shape: LlamaShape, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and the tokenizer: all files that `--load-format dummy` needs."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(shape.config(str(dtype).removeprefix("torch.")), indent=2))
    write_tokenizer(out, shape.vocabulary)


def write_tokenizer(out: Path, vocabulary: int) -> None:
    """Writes the demo model's tokenizer, with fillers for a vocabulary of this size."""
    tokenizer = json.loads((demo_directory() / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(json.dumps(with_fillers(tokenizer, vocabulary), ensure_ascii=False))
    shutil.copy(demo_directory() / "tokenizer_config.json", out / "tokenizer_config.json")


def with_fillers(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """The tokenizer, with filler words up to `size` entries. No merge leads to a filler, so no text is encoded as a
    filler.

    A model with random weights may answer any id. Servers skip an id without a text, which would make their work
    smaller.
    """
    vocabulary = tokenizer["model"]["vocab"]
    fillers = {f"Ġfiller{i}": i for i in range(len(vocabulary), size)}
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocabulary | fillers}}
