"""The matrices of all adapters that a server was started with, in the order in which the model's layers want them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from text_generation_common.adapters.files import ModulePair, digest_of, modules_of, plain_name, read_adapter
from text_generation_common.adapters.listed import ListedAdapter
from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_server.kernels.interface import AdapterMatrices
from text_generation_server.layers.adapted import StepAdapters

# Picks the rows or columns of an adapter's matrix that belong to this rank's weight, in the order of the weight.
Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    modules: Mapping[str, ModulePair]  # by the plain names of layers
    tensors: Mapping[str, Tensor]

    def rank_of(self, layer: str) -> int:
        pair = self.modules.get(plain_name(layer))
        return 0 if pair is None else pair.rank

    def down(self, layer: str) -> Tensor:
        return self.tensors[self.modules[plain_name(layer)].down].float()

    def up(self, layer: str) -> Tensor:
        """The scale included."""
        pair = self.modules[plain_name(layer)]
        return self.tensors[pair.up].float() * pair.scale


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Some outputs of a linear layer, which have matrices of their own."""

    layer: str  # name in the model's files
    outputs: int
    of_up: Pick
    of_down: Pick = lambda down: down


@dataclass(frozen=True, slots=True)
class AdapterBank:
    """Adapters by their slots."""

    adapters: Sequence[LoadedAdapter] = ()
    slots: Mapping[str, int] = field(default_factory=dict)  # by the digest of the adapter's files
    of_step: StepAdapters = field(default_factory=StepAdapters)

    def matrices(
        self, parts: Sequence[AdaptedPart], dtype: torch.dtype, device: torch.device
    ) -> AdapterMatrices | None:
        """None if no adapter changes the layer of these parts."""
        ranks = [[adapter.rank_of(part.layer) for part in parts] for adapter in self.adapters]
        if not (rank := max((max(of) for of in ranks), default=0)):
            return None
        ends = tuple(accumulate(part.outputs for part in parts))
        first = next(part for part in parts if any(adapter.rank_of(part.layer) for adapter in self.adapters))
        inputs = next(first.of_down(a.down(first.layer)).shape[1] for a in self.adapters if a.rank_of(first.layer))
        down = torch.zeros((len(ranks), len(parts) * rank, inputs), dtype=dtype)
        up = torch.zeros((len(ranks), rank, ends[-1]), dtype=dtype)
        for slot, adapter in enumerate(self.adapters):
            for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
                if own := ranks[slot][number]:
                    down[slot, number * rank :][:own] = part.of_down(adapter.down(part.layer))
                    up[slot, :own, end - part.outputs : end] = part.of_up(adapter.up(part.layer)).t()
        return AdapterMatrices(
            down.to(device), up.to(device), ranks=_int32(ranks, device), ends_P=_int32(ends, device), ends=ends
        )


def _int32(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def load_adapters(adapters: Sequence[ListedAdapter], config: ModelConfig, max_rank: int) -> AdapterBank:
    """Reads the adapters. ModelError for files that do not fit the model, or are not those that were checked at the
    start."""
    loaded, slots = list[LoadedAdapter](), dict[str, int]()
    for adapter in adapters:
        folder = Path(adapter.path)
        files = read_adapter(folder, max_rank)
        tensors = load(files.weights.read_bytes())
        digest = digest_of(folder)
        if adapter.digest not in (None, digest):
            raise ModelError(f"--lora-adapters {adapter.name}: the files in {folder} have changed since the start")
        if digest not in slots:
            slots[digest] = len(loaded)
            loaded.append(LoadedAdapter(modules_of(files, config), tensors))
    return AdapterBank(loaded, slots)
