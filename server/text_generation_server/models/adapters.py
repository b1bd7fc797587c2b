"""The matrices of adapters in the order in which the model's layers want them: in slots, which steps read, and in the
host's memory."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from safetensors.torch import load
from torch import Tensor

from text_generation_common.adapters.files import (
    ModulePair,
    content_of,
    digest_of,
    modules_of,
    plain_name,
    read_adapter,
    table_rank,
)
from text_generation_common.adapters.listed import ListedAdapter
from text_generation_common.errors import ModelError, ShardError
from text_generation_common.flags.model import MAX_SLOTS
from text_generation_common.models.architecture import ModelConfig
from text_generation_server.kernels.interface import AdapterMatrices
from text_generation_server.layers.adapted import StepAdapters

# Picks the rows or columns of an adapter's matrix that belong to this rank's weight, in the order of the weight.
Pick = Callable[[Tensor], Tensor]
# Reads a whole tensor of the base's files.
Read = Callable[[str], Tensor]
NOTHING = ModulePair()


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    folder: Path
    modules: Mapping[str, ModulePair]  # by the plain names of layers
    tensors: Mapping[str, Tensor]

    def pair(self, layer: str) -> ModulePair:
        return self.modules.get(plain_name(layer), NOTHING)

    def rank_of(self, layer: str) -> int:
        return self.pair(layer).rank

    def down(self, layer: str) -> Tensor:
        return self.tensors[self.pair(layer).down].float()

    def up(self, layer: str) -> Tensor:
        """The scale included."""
        pair = self.pair(layer)
        return self.tensors[pair.up].float() * pair.scale

    def bias(self, layer: str, read: Read) -> Tensor | None:
        """What is added to the layer's outputs, whatever the input is."""
        pair = self.pair(layer)
        found = self.tensors[pair.bias].float() * pair.scale if pair.bias else None
        if pair.base_bias:
            change = self.tensors[pair.base_bias].float() - read(f"{layer}.bias").float()
            found = change if found is None else found + change
        return found

    def check_weight(self, layer: str, read: Read) -> None:
        """ModelError if the adapter brings another weight of an embedding or a head."""
        if not (name := self.pair(layer).base_weight):
            return
        brought, own = self.tensors[name], read(f"{layer}.weight")
        # Training may have read the base in another type.
        if not (torch.equal(brought, own.to(brought.dtype)) or torch.equal(brought.to(own.dtype), own)):
            raise ModelError(
                f"{self.folder}: the tensor {name} is not the base's: the adapter was trained with another {layer},"
                " which is not supported"
            )


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Some outputs of a linear layer, which have matrices of their own."""

    layer: str  # name in the model's files
    outputs: int
    of_up: Pick
    of_down: Pick = lambda down: down
    adds_biases: bool = True  # False on all ranks but one, if the ranks' results are added


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """What an adapter adds to one layer, as its slot holds it, in the host's memory."""

    down: Tensor
    up: Tensor
    ranks: Tensor
    bias: Tensor | None


class AdapterPlace(Protocol):
    """Room at a layer for the matrices of all slots."""

    matrices: AdapterMatrices

    def prepare(self, adapter: LoadedAdapter) -> PreparedLayer:
        """ModelError if the adapter does not fit the layer. May be called in any thread."""
        ...


class LinearPlace:
    def __init__(
        self, bank: "AdapterBank", parts: Sequence[AdaptedPart], read: Read, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = parts
        self._read = read
        ends = tuple(accumulate(part.outputs for part in parts))
        rank = max(1, *(bank.rank_of(part.layer) for part in parts))
        # Where adapters have biases only, no number of `down` is read.
        sizes = [part.of_down(torch.empty((1, k), device="meta")) for part in parts for k in bank.inputs_of(part.layer)]
        inputs = sizes[0].shape[1] if sizes else 1
        has_bias = any(part.adds_biases and bank.has_biases(part.layer) for part in parts)
        count = bank.count
        self.matrices = AdapterMatrices(
            down=torch.zeros((count, len(parts) * rank, inputs), dtype=dtype, device=device),
            up=torch.zeros((count, rank, ends[-1]), dtype=dtype, device=device),
            ranks=torch.zeros((count, len(parts)), dtype=torch.int32, device=device),
            ends_P=_int32(ends, device),
            ends=ends,
            bias=torch.full((count, ends[-1]), -0.0, device=device) if has_bias else None,
        )

    def prepare(self, adapter: LoadedAdapter) -> PreparedLayer:
        matrices, rank = self.matrices, self.matrices.rank
        down, up = (torch.zeros(of.shape[1:], dtype=of.dtype) for of in (matrices.down, matrices.up))
        bias = None if matrices.bias is None else torch.full(matrices.bias.shape[1:], -0.0)
        ranks = [adapter.rank_of(part.layer) for part in self._parts]
        for number, (part, end) in enumerate(zip(self._parts, matrices.ends, strict=True)):
            if own := ranks[number]:
                down[number * rank :][:own] = part.of_down(adapter.down(part.layer))
                up[:own, end - part.outputs : end] = part.of_up(adapter.up(part.layer)).t()
            if bias is not None and part.adds_biases and (of := adapter.bias(part.layer, self._read)) is not None:
                bias[end - part.outputs : end] = part.of_up(of.unsqueeze(1)).squeeze(1)
        return PreparedLayer(down, up, torch.tensor(ranks, dtype=torch.int32), bias)


class HeadPlace(LinearPlace):
    """`tied_to`: the layer whose weight the head's is in the files."""

    def __init__(
        self, bank: "AdapterBank", part: AdaptedPart, read: Read, dtype: torch.dtype, device: torch.device, tied_to: str
    ) -> None:
        super().__init__(bank, [part], read, dtype, device)
        self._layer = part.layer
        self._tied_to = tied_to

    def prepare(self, adapter: LoadedAdapter) -> PreparedLayer:
        adapter.check_weight(self._layer, lambda name: self._read(name.replace(self._layer, self._tied_to)))
        return super().prepare(adapter)


class TablePlace:
    def __init__(
        self, bank: "AdapterBank", layer: str, outputs: int, read: Read, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layer = layer
        self._read = read
        rank, count, ends = table_rank(max(1, bank.rank_of(layer))), bank.count, (outputs,)
        vocabulary = next(iter(bank.inputs_of(layer)), 1)
        self.matrices = AdapterMatrices(
            torch.zeros((count, vocabulary, rank), dtype=dtype, device=device),
            torch.zeros((count, rank, outputs), dtype=dtype, device=device),
            torch.zeros((count, 1), dtype=torch.int32, device=device),
            _int32(ends, device),
            ends,
        )

    def prepare(self, adapter: LoadedAdapter) -> PreparedLayer:
        adapter.check_weight(self._layer, self._read)
        down, up = (torch.zeros(of.shape[1:], dtype=of.dtype) for of in (self.matrices.down, self.matrices.up))
        if own := adapter.rank_of(self._layer):
            down[:, :own] = adapter.down(self._layer).t()
            up[:own] = adapter.up(self._layer).t()
        return PreparedLayer(down, up, torch.tensor([own], dtype=torch.int32), None)


@dataclass(frozen=True, slots=True)
class KnownAdapter:
    """An adapter whose numbers may be on disk alone."""

    listed: ListedAdapter
    modules: Mapping[str, ModulePair]


class AdapterBank:
    """Adapters by their slots, and those that wait on disk or in the host's memory for a slot."""

    def __init__(self, known: dict[str, KnownAdapter] | None = None, count: int = 0, in_host: int = 0) -> None:
        """`known`: by their digests. `count`: number of slots. `in_host`: number of adapters that are kept in the
        host's memory beside those in slots."""
        self.known = known or {}
        self.count = min(count, len(self.known))
        self.slots: dict[str, int] = {}  # by the digest of the adapter's files
        self.of_step = StepAdapters()
        self.in_host = in_host
        self._places: list[AdapterPlace] = []
        self._first: dict[str, LoadedAdapter] = {}  # the first adapters of the slots, until the model is loaded
        self._prepared: OrderedDict[str, list[PreparedLayer]] = OrderedDict()
        self._lock = Lock()

    def pairs(self, layer: str) -> Iterator[ModulePair]:
        name = plain_name(layer)
        return (known.modules[name] for known in self.known.values() if name in known.modules)

    def rank_of(self, layer: str) -> int:
        return max((pair.rank for pair in self.pairs(layer)), default=0)

    def inputs_of(self, layer: str) -> set[int]:
        return {pair.inputs for pair in self.pairs(layer) if pair.rank}

    def has_biases(self, layer: str) -> bool:
        return any(pair.has_biases for pair in self.pairs(layer))

    def changes(self, layer: str) -> bool:
        return any(pair != NOTHING for pair in self.pairs(layer))

    def begin(self) -> None:
        """Reads the first adapters of the slots. To be called before the model's layers are made."""
        for slot, digest in enumerate(list(self.known)[: self.count]):
            self._first[digest] = self._read(digest)
            self.slots[digest] = slot

    def settle(self) -> None:
        """To be called when the model's layers are made."""
        self._first.clear()
        if self.count == len(self.known):
            self._places.clear()

    def add(self, place: AdapterPlace) -> AdapterMatrices:
        """Adds a layer, with the first adapters of the slots."""
        self._places.append(place)
        for digest, adapter in self._first.items():
            _put(place.matrices, self.slots[digest], place.prepare(adapter))
        return place.matrices

    def linear(
        self, parts: Sequence[AdaptedPart], dtype: torch.dtype, device: torch.device, read: Read
    ) -> AdapterMatrices | None:
        """None if no adapter changes the layer of these parts."""
        is_changed = any(self.rank_of(p.layer) or (p.adds_biases and self.has_biases(p.layer)) for p in parts)
        return self.add(LinearPlace(self, parts, read, dtype, device)) if is_changed else None

    def table(
        self, layer: str, outputs: int, dtype: torch.dtype, device: torch.device, read: Read
    ) -> AdapterMatrices | None:
        """The matrices of an embedding."""
        return (
            self.add(TablePlace(self, layer, outputs, read, dtype=dtype, device=device))
            if self.changes(layer)
            else None
        )

    def head(
        self, part: AdaptedPart, dtype: torch.dtype, device: torch.device, read: Read, tied_to: str
    ) -> AdapterMatrices | None:
        changes = self.changes(part.layer)
        return self.add(HeadPlace(self, part, read, dtype, device, tied_to=tied_to)) if changes else None

    def prepare(self, digest: str) -> str:
        """Reads an adapter into the host's memory, if it is not there. Returns why it cannot be loaded, or "". May be
        called in any thread."""
        with self._lock:
            if digest in self._prepared:
                self._prepared.move_to_end(digest)
                return ""
        try:
            adapter = self._read(digest)
            prepared = [place.prepare(adapter) for place in self._places]
        except (KeyError, OSError, ShardError) as error:
            return str(error)
        with self._lock:
            self._prepared[digest] = prepared
            while len(self._prepared) > max(1, self.in_host):
                self._prepared.popitem(last=False)
        return ""

    def put(self, slot: int, digest: str) -> None:
        """Copies a prepared adapter into a slot, whose adapter until now is not resident any more."""
        with self._lock:
            prepared = self._prepared.get(digest)
        if prepared is None:  # others have taken its place meanwhile
            adapter = self._read(digest)
            prepared = [place.prepare(adapter) for place in self._places]
        for old in [other for other, taken in self.slots.items() if taken == slot or other == digest]:
            del self.slots[old]
        for place, layer in zip(self._places, prepared, strict=True):
            _put(place.matrices, slot, layer)
        self.slots[digest] = slot

    def _read(self, digest: str) -> LoadedAdapter:
        """ModelError if the files have changed since the start."""
        known = self.known[digest]
        folder = Path(known.listed.path)
        found, content = content_of(folder)
        if found != digest:
            raise ModelError(f"--lora-adapters {known.listed.name}: the files in {folder} have changed since the start")
        return LoadedAdapter(folder, known.modules, load(content))


def _put(matrices: AdapterMatrices, slot: int, layer: PreparedLayer) -> None:
    matrices.down[slot].copy_(layer.down)
    matrices.up[slot].copy_(layer.up)
    matrices.ranks[slot].copy_(layer.ranks)
    if matrices.bias is not None and layer.bias is not None:
        matrices.bias[slot].copy_(layer.bias)


def _int32(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def load_adapters(
    adapters: Sequence[ListedAdapter], config: ModelConfig, max_rank: int, count: int = MAX_SLOTS, in_host: int = 0
) -> AdapterBank:
    """Reads what the adapters are, and the numbers of the first `count`. ModelError for files that do not fit the
    model, or are not those that were checked at the start."""
    known: dict[str, KnownAdapter] = {}
    for adapter in adapters:
        folder = Path(adapter.path)
        files = read_adapter(folder, max_rank)
        digest = adapter.digest or digest_of(folder)
        known.setdefault(digest, KnownAdapter(adapter, modules_of(files, config)))
    bank = AdapterBank(known, count, in_host)
    bank.begin()
    return bank
