"""LoRA adapters with random matrices, written as PEFT writes them, and their merge into transformers' own model."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shard_tools import ALONE, Client, fresh_client, make_runner

from text_generation_common.adapters.content import digest_of
from text_generation_common.adapters.files import read_adapter
from text_generation_common.adapters.listed import ListedAdapter
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import LinearSize, matrix_sizes
from text_generation_common.sampling import Sampling
from text_generation_server.distributed import Group
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.models.adapters import load_adapters
from text_generation_server.runner import ModelRunner
from text_generation_server.step.rows import PromptChunk


def sizes_of(model: Path) -> dict[str, LinearSize]:
    """All linear layers, routers and experts; without experts that are one tensor, embedding and head."""
    config = read_config(model)
    sizes = matrix_sizes(config).items()
    kept = config.names.embedding, config.names.head
    return {name: size for name, size in sizes if name not in kept and not size.experts}


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
            _weight_of(changed, name).add_(delta.t() if config.names.transposed else delta)
    return changed


def _weight_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    """The weight of a layer of the files, which may be a part of one that has all experts of a layer."""
    name = name.removesuffix(".layer")  # the end of the name of Granite's router
    if older := re.fullmatch(r"(.*\.layers\.\d+)\.block_sparse_moe\.(gate|experts.*)", name):
        name = f"{older[1]}.mlp.{older[2]}"
    if (found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", name)) is None:
        return model.get_submodule(name).weight
    experts, number, kind = model.get_submodule(found[1]), int(found[2]), found[3]
    if kind in ("down_proj", "w2"):
        return experts.down_proj[number]
    gate, up = experts.gate_up_proj[number].chunk(2)
    return gate if kind in ("gate_proj", "w1") else up


def asking(client: Client, number: int, prompt: torch.Tensor, adapter: str, **options: object) -> PromptChunk:
    return replace(client.first_chunk(number, prompt, **options), adapter=adapter)  # type: ignore[arg-type]


def runner_of(
    model: Path, adapters: Sequence[ListedAdapter], group: Group = ALONE, **options: Any
) -> tuple[ModelRunner, list[str]]:
    """A runner of the model with these adapters, and their digests."""
    bank = load_adapters(adapters, read_config(model), 64)
    runner = make_runner(model, group=group, adapters=bank, **options)
    runner.warmup(256, None, 16, 1024)
    return runner, [digest_of(Path(adapter.path)) for adapter in adapters]


@dataclass
class AdaptedText:
    tokens: list[int]
    logprobs: torch.Tensor  # [new tokens, vocabulary]


def texts_of(
    group: Group,
    model: Path,
    adapters: Sequence[ListedAdapter],
    prompt: torch.Tensor,
    new: int,
    compiled: bool = False,
    vocabulary: int = 320,
) -> list[AdaptedText]:
    """On rank 0: the greedy text of each adapter, and that of the model itself, all computed side by side. `compiled`:
    by the compiled kernels, if there are any."""
    runner, digests = runner_of(model, adapters, group, kernels=load_kernels() if compiled else None)
    client, everything = fresh_client(runner), Sampling(top_n_tokens=vocabulary)
    asked = [*digests, ""]
    numbers = list(range(len(asked)))
    outputs = [client.step([], [asking(client, i, prompt, asked[i], parameters=everything) for i in numbers])]
    outputs += [client.step(numbers) for _ in range(new - 1)]
    if group.rank:
        return []
    rows = torch.zeros(new, len(asked), vocabulary)
    for step, output in enumerate(outputs):
        ids, found = (top.view(-1, vocabulary) for top in (output.top_ids.long(), output.top_logprobs))
        rows[step, output.request_ids] = torch.zeros(len(asked), vocabulary).scatter_(1, ids, found)
    return [AdaptedText(client.tokens[i], rows[:, i]) for i in numbers]


def some(sizes: Mapping[str, LinearSize], every: int) -> dict[str, LinearSize]:
    return {name: size for number, (name, size) in enumerate(sizes.items()) if number % every == 0}


def load_on_one_rank_alone(group: Group, model: Path, listed: Sequence[ListedAdapter]) -> tuple[str, list[str], str]:
    """The refusal of an adapter whose files the last rank alone cannot read, the adapters in slots then, and the answer
    once it can."""
    bank = load_adapters(listed, read_config(model), 64, count=1)
    runner = make_runner(model, group=group, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    digest, folder = digest_of(Path(listed[1].path)), listed[1].path
    if group.rank == group.size - 1:
        bank.known[digest] = replace(listed[1], path=f"{folder}-gone")
    refusal, slots = runner.load_adapter(0, digest), list(bank.slots)
    bank.known[digest] = listed[1]
    return refusal, slots, runner.load_adapter(0, digest)
