"""LoRA adapters with random matrices, written as PEFT writes them, and their merge into transformers' own model."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from text_generation_common.adapters.files import read_adapter
from text_generation_common.adapters.listed import ListedAdapter
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import LinearSize, linear_sizes


def sizes_of(model: Path) -> dict[str, LinearSize]:
    return linear_sizes(read_config(model))


def write_adapter(
    folder: Path, sizes: Mapping[str, LinearSize], rank: int = 8, seed: int = 0, gain: float = 0.3, **config: Any
) -> ListedAdapter:
    """An adapter of the layers of `sizes`. `config`: fields of adapter_config.json; `rank_pattern` is followed."""
    folder.mkdir(parents=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in sizes.items():
        own = next((r for end, r in fields.get("rank_pattern", {}).items() if name.endswith(end)), rank)
        down = torch.randn(own, size.inputs, generator=numbers) * size.inputs**-0.5
        up = torch.randn(size.outputs, own, generator=numbers) * gain * own**-0.5
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    return ListedAdapter(folder.name, str(folder))


def merged(model: torch.nn.Module, adapter: Path, path: Path) -> torch.nn.Module:
    """A copy of the model of `path` with the adapter merged into its weights, in float32."""
    config, files = read_config(path), read_adapter(adapter)
    tensors = load_file(files.weights)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, pair in files.modules.items():
            delta = pair.scale * tensors[pair.up] @ tensors[pair.down]
            changed.get_submodule(name).weight += delta.t() if config.names.transposed else delta
    return changed


def some(sizes: Mapping[str, LinearSize], every: int) -> dict[str, LinearSize]:
    return {name: size for number, (name, size) in enumerate(sizes.items()) if number % every == 0}
