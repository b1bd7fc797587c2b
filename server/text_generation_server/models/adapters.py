"""The matrices of adapters in the order in which the model's layers want them: in slots, which steps read, and in the
host's memory."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from text_generation_common.adapters.content import AdapterContent, digest_of, read_content
from text_generation_common.adapters.files import (
    MAX_HEADER_BYTES,
    NO_ROOM,
    NOWHERE,
    LayerRoom,
    ModulePair,
    adapter_of,
    any_rooms,
    check_room,
    modules_of,
    read_adapter,
    rooms_of,
    table_rank,
)
from text_generation_common.adapters.listed import ListedAdapter
from text_generation_common.adapters.names import plain_name
from text_generation_common.errors import ModelError, ShardError
from text_generation_common.flags.model import MAX_ADAPTERS, MAX_SLOTS
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.gguf_names import rows_before
from text_generation_server.device.kept import KeptMemory, SmallKept
from text_generation_server.kernels.interface import AdapterMatrices
from text_generation_server.layers.adapted import StepAdapters

logger = logging.getLogger(__name__)

# Picks the rows or columns of an adapter's matrix that belong to this rank's weight, in the order of the weight.
Pick = Callable[[Tensor], Tensor]
# Reads a whole tensor of the base's files.
Read = Callable[[str], Tensor]
# Makes the memory of slots.
Zeros = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]
NOTHING = ModulePair()
DIGEST_BYTES = 32
NO_ROWS: Mapping[str, list[int]] = MappingProxyType({})
EMPTY = "empty"  # in the place of a digest


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    folder: Path
    modules: Mapping[str, ModulePair]  # by the plain names of layers
    tensors: Mapping[str, Tensor]
    rows: Mapping[str, list[int]]  # the order of a layer's rows in the base's files, where it is another one

    def pair(self, layer: str) -> ModulePair:
        return self.modules.get(plain_name(layer), NOTHING)

    def rank_of(self, layer: str) -> int:
        return self.pair(layer).rank

    def down(self, layer: str) -> Tensor:
        return self.tensors[self.pair(layer).down].float()

    def up(self, layer: str) -> Tensor:
        """The scale included."""
        pair = self.pair(layer)
        return self._in_order(layer, pair.up) * pair.scale

    def of_expert(self, layer: str, expert: int) -> tuple[Tensor, Tensor] | None:
        """`down` and `up`, the scale included, of an expert's product; None if the adapter leaves it as it is. `layer`:
        see `expert_layer`."""
        pair = self.pair(layer)
        if pair.each:
            pair = pair.each[expert]
            return (self.tensors[pair.down].float(), self.tensors[pair.up].float() * pair.scale) if pair.rank else None
        if not pair.rank:
            return None
        down, up = self.tensors[pair.down], self.tensors[pair.up]
        down = down.view(pair.experts, pair.rank, -1)[expert]
        first, end, step = pair.rows
        return down.float(), up.view(len(up), pair.rank, pair.experts)[first:end:step, :, expert].float() * pair.scale

    def bias(self, layer: str, read: Read) -> Tensor | None:
        """What is added to the layer's outputs, whatever the input is."""
        pair = self.pair(layer)
        found = self._in_order(layer, pair.bias) * pair.scale if pair.bias else None
        if pair.base_bias:
            change = self._in_order(layer, pair.base_bias) - read(f"{layer}.bias").float()
            found = change if found is None else found + change
        return found

    def _in_order(self, layer: str, name: str) -> Tensor:
        """A tensor of the layer's outputs, in the order of the base's files."""
        tensor, rows = self.tensors[name].float(), self.rows.get(plain_name(layer))
        return tensor if rows is None else tensor[rows]

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
    """What an adapter adds to one layer, or to that of E experts, as its slot holds it, in the host's memory."""

    down: Tensor
    up: Tensor
    ranks: Tensor
    bias: Tensor | None
    experts: int = 1


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
        rooms = [bank.room_of(part.layer) for part in parts]
        rank = max(1, *(room.rank for room in rooms))
        # Where adapters have biases only, no number of `down` is read.
        sizes = [
            p.of_down(torch.empty((1, r.inputs), device="meta")) for p, r in zip(parts, rooms, strict=True) if r.rank
        ]
        inputs = sizes[0].shape[1] if sizes else 1
        has_bias = any(part.adds_biases and room.has_biases for part, room in zip(parts, rooms, strict=True))
        bias = bank.zeros((bank.count, ends[-1]), torch.float32, device).fill_(-0.0) if has_bias else None
        matrices = _no_matrices(bank.zeros, bank.count, rank, inputs, ends, dtype=dtype, device=device)
        self.matrices = replace(matrices, bias=bias)

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


class ExpertPlace:
    """Room for a product of all experts of a layer: the matrices of slot s and expert e have the number s * E + e."""

    def __init__(
        self, bank: "AdapterBank", parts: Sequence[AdaptedPart], experts: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = parts
        self._experts = experts
        ends, rooms = tuple(accumulate(part.outputs for part in parts)), [bank.room_of(part.layer) for part in parts]
        rank, count = max(room.rank for room in rooms), bank.count * experts
        inputs = parts[0].of_down(torch.empty((1, max(room.inputs for room in rooms)), device="meta")).shape[1]
        self.matrices = _no_matrices(bank.zeros, count, rank, inputs, ends, dtype=dtype, device=device)

    def prepare(self, adapter: LoadedAdapter) -> PreparedLayer:
        of, experts = self.matrices, self._experts
        down, up = (torch.zeros((experts, *whole.shape[1:]), dtype=whole.dtype) for whole in (of.down, of.up))
        ranks = torch.zeros((experts, len(self._parts)), dtype=torch.int32)
        for number, (part, end) in enumerate(zip(self._parts, of.ends, strict=True)):
            for expert in range(experts):
                if (pair := adapter.of_expert(part.layer, expert)) is None:
                    continue
                own = ranks[expert, number] = len(pair[0])
                down[expert, number * of.rank :][:own] = part.of_down(pair[0])
                up[expert, :own, end - part.outputs : end] = part.of_up(pair[1]).t()
        return PreparedLayer(down, up, ranks, None, experts)


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
        room, count, ends = bank.room_of(layer), bank.count, (outputs,)
        rank, vocabulary = table_rank(max(1, room.rank)), room.inputs if room.rank else 1
        self.matrices = AdapterMatrices(
            bank.zeros((count, vocabulary, rank), dtype, device),
            bank.zeros((count, rank, outputs), dtype, device),
            bank.zeros((count, 1), torch.int32, device),
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
class AdapterRules:
    """What is asked of adapters. `folders`: where those may lie that come while the server runs; none: none comes."""

    config: ModelConfig
    max_rank: int
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter whose files were read once: where they were, and what they change."""

    path: str
    modules: Mapping[str, ModulePair]


class AdapterBank:
    """Adapters by their slots, and those that wait on disk or in the host's memory for a slot."""

    def __init__(
        self,
        known: dict[str, ListedAdapter] | None = None,
        count: int = 0,
        in_host: int = 0,
        rules: AdapterRules | None = None,
        rooms: Mapping[str, LayerRoom] = NOWHERE,
        rows: Mapping[str, list[int]] = NO_ROWS,
        kept: KeptMemory | None = None,
    ) -> None:
        """`known`: those of the start, by their digests. `count`: number of slots. `in_host`: number of adapters that
        are kept in the host's memory beside those in slots. `rules` None: there are no adapters. `rooms`: what a slot
        has room for. `rows`: see LoadedAdapter. `kept`: where slots lie that are to outlive this process, with books of
        what is in them."""
        self.known = known or {}
        self._rules = rules
        self.takes_visitors = rules is not None and bool(rules.folders)
        self.count = count if self.takes_visitors else min(count, len(self.known))
        self.slots: dict[str, int] = {}  # by the digest of the adapter's files
        # Whether other adapters may come into the slots.
        self._changes = self.takes_visitors or self.count < len(self.known)
        self.zeros: Zeros = SmallKept(kept).zeros if kept is not None and self._changes else _zeros
        # What each slot has: zeros, or the digest of an adapter all of whose numbers are there.
        self._books = self.zeros((self.count, DIGEST_BYTES), torch.uint8, torch.device("cpu"))
        self.of_step = StepAdapters()
        self.in_host = in_host
        self._rooms = rooms
        self._rows = rows
        self._checked: OrderedDict[str, CheckedAdapter] = OrderedDict()  # by digest, the one that was read last is last
        self._places: list[AdapterPlace] = []
        self._first: dict[str, LoadedAdapter] = {}  # the first adapters of the slots, until the model is loaded
        self._prepared: OrderedDict[str, list[PreparedLayer]] = OrderedDict()
        self._lock = Lock()

    @property
    def any_slot(self) -> str:
        """The name of a slot's adapter; "": there are no slots. A slot that no adapter has had adds zeros."""
        if self.count and not self.slots:
            self.slots[EMPTY] = 0
        return next(iter(self.slots), "")

    @property
    def in_slots(self) -> list[str]:
        """The adapter of each slot; "": none."""
        names = {slot: digest for digest, slot in self.slots.items()}
        return [names.get(slot, "").removeprefix(EMPTY) for slot in range(self.count)]

    def forget(self) -> None:
        """Notes that slots which outlive a process may hold anything."""
        if self._changes:
            self._books.zero_()

    def take_over(self) -> None:
        """Goes on with the slots as another process has left them."""
        self.slots.clear()
        for slot, digest in enumerate(self._books.numpy()):
            if digest.any():
                self.slots[digest.tobytes().hex()] = slot
                continue
            for place in self._places:
                _rows_of(place.matrices.ranks, slot, self.count).zero_()

    def room_of(self, layer: str) -> LayerRoom:
        return self._rooms.get(plain_name(layer), NO_ROOM)

    def begin(self) -> None:
        """Reads the first adapters of the slots. To be called before the model's layers are made. A slot stays empty
        whose adapter's files were removed or changed after they were listed: the other adapters go on."""
        for slot, digest in enumerate(list(self.known)[: self.count]):
            try:
                content = self._content(digest)
            except ModelError as error:
                logger.error("%s. The adapter is not loaded, and its requests fail", error)
                continue
            self._first[digest] = self._loaded(content)
            self._note(slot, digest)

    def settle(self) -> None:
        """To be called when the model's layers are made."""
        self._first.clear()
        if not self._changes:
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
        rooms = [(part, self.room_of(part.layer)) for part in parts]
        is_changed = any(room.rank or (part.adds_biases and room.has_biases) for part, room in rooms)
        return self.add(LinearPlace(self, parts, read, dtype, device)) if is_changed else None

    def experts(
        self, parts: Sequence[AdaptedPart], experts: int, dtype: torch.dtype, device: torch.device
    ) -> AdapterMatrices | None:
        """The matrices of a product of all experts of a layer."""
        is_changed = any(self.room_of(part.layer).rank for part in parts)
        return self.add(ExpertPlace(self, parts, experts, dtype=dtype, device=device)) if is_changed else None

    def table(
        self, layer: str, outputs: int, dtype: torch.dtype, device: torch.device, read: Read
    ) -> AdapterMatrices | None:
        """The matrices of an embedding."""
        return (
            self.add(TablePlace(self, layer, outputs, read, dtype=dtype, device=device))
            if plain_name(layer) in self._rooms
            else None
        )

    def head(
        self, part: AdaptedPart, dtype: torch.dtype, device: torch.device, read: Read, tied_to: str
    ) -> AdapterMatrices | None:
        is_changed = plain_name(part.layer) in self._rooms
        return self.add(HeadPlace(self, part, read, dtype, device, tied_to=tied_to)) if is_changed else None

    def prepare(self, digest: str, folder: str = "") -> str:
        """Reads an adapter into the host's memory, if it is not there. Returns why it cannot be loaded, or "". May be
        called in any thread. `folder`: where its files are now; "": where they were."""
        if digest in self.known and not self._changes:  # nothing but the start fills slots
            missing = f"{self._name(digest)}the shards did not find its files at their start"
            return "" if digest in self.slots else missing
        with self._lock:
            if digest in self._prepared:
                self._prepared.move_to_end(digest)
                if folder and digest in self._checked:
                    self._checked[digest] = replace(self._checked[digest], path=folder)
                return ""
        try:
            adapter = self._read(digest, folder)
            prepared = [place.prepare(adapter) for place in self._places]
        except (KeyError, OSError, ShardError, SafetensorError) as error:
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
            self._books[self.slots.pop(old)] = 0
        for place, layer in zip(self._places, prepared, strict=True):
            _put(place.matrices, slot, layer)
        self._note(slot, digest)

    def _note(self, slot: int, digest: str) -> None:
        self.slots[digest] = slot
        self._books[slot] = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)

    def _read(self, digest: str, folder: str = "") -> LoadedAdapter:
        return self._loaded(self._content(digest, folder))

    def _content(self, digest: str, folder: str = "") -> AdapterContent:
        """ModelError if the files are not there, or are not those of the digest."""
        own = self.known.get(digest)
        with self._lock:
            checked = self._checked.get(digest)
        path = folder or (checked.path if checked else own.path if own else "")
        if not path:
            raise ModelError("this shard does not know the adapter")
        is_own = own is not None and Path(path) == Path(own.path)
        if self._rules is None or not (is_own or self.takes_visitors):
            raise ModelError("this shard takes no adapters but those of its start")
        content = read_content(Path(path), () if is_own else self._rules.folders)
        if content.digest != digest:
            raise ModelError(f"{self._name(digest)}the files in {path} have changed since they were checked")
        return content

    def _loaded(self, content: AdapterContent) -> LoadedAdapter:
        """ModelError if the adapter cannot be served."""
        assert self._rules is not None
        digest, path, own = content.digest, str(content.folder), self.known.get(content.digest)
        with self._lock:
            checked = self._checked.get(digest)
        if checked is None:
            # The launcher has read the header of an adapter of the start, beside no steps.
            largest = MAX_HEADER_BYTES if own is None else None
            files = adapter_of(content, self._rules.max_rank, largest)
            modules = modules_of(files, self._rules.config)
            check_room(files, modules, self._rooms)
        else:
            modules = dict(checked.modules)
        with self._lock:
            self._checked[digest] = CheckedAdapter(path, modules)
            self._checked.move_to_end(digest)
            # Served adapters are at most as many, and are named with their folders again before a step.
            while len(self._checked) > MAX_ADAPTERS:
                self._checked.popitem(last=False)
        return LoadedAdapter(content.folder, modules, load(content.weights), self._rows)

    def _name(self, digest: str) -> str:
        own = self.known.get(digest)
        return f"--lora-adapters {own.name}: " if own is not None else ""


def _rows_of(whole: Tensor, slot: int, count: int) -> Tensor:
    """The part of a tensor of `count` slots that belongs to a slot."""
    each = len(whole) // count
    return whole[slot * each : (slot + 1) * each]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _put(matrices: AdapterMatrices, slot: int, layer: PreparedLayer) -> None:
    own = slice(slot * layer.experts, (slot + 1) * layer.experts)
    matrices.down[own].copy_(layer.down)
    matrices.up[own].copy_(layer.up)
    matrices.ranks[own].copy_(layer.ranks)
    if matrices.bias is not None and layer.bias is not None:
        matrices.bias[slot].copy_(layer.bias)


def _no_matrices(
    zeros: Zeros,
    count: int,
    rank: int,
    inputs: int,
    ends: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterMatrices:
    """Room for `count` adapters of a layer, each of which adds nothing."""
    return AdapterMatrices(
        down=zeros((count, len(ends) * rank, inputs), dtype, device),
        up=zeros((count, rank, ends[-1]), dtype, device),
        ranks=zeros((count, len(ends)), torch.int32, device),
        ends_P=_int32(ends, device),
        ends=ends,
    )


def _int32(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def load_adapters(
    adapters: Sequence[ListedAdapter],
    config: ModelConfig,
    max_rank: int,
    count: int = MAX_SLOTS,
    in_host: int = 0,
    folders: Sequence[Path] = (),
    kept: KeptMemory | None = None,
) -> AdapterBank:
    """Reads what the adapters are, and the numbers of the first `count`. `folders`: those from which other adapters may
    come later. `kept`: see AdapterBank. ModelError for files that do not fit the model. An adapter whose files were
    removed or changed since its digest was listed is left out: shards start again with the list of the first start."""
    known: dict[str, ListedAdapter] = {}
    found: list[Mapping[str, ModulePair]] = []
    for adapter in adapters:
        try:
            found.append(modules_of(read_adapter(Path(adapter.path), max_rank), config))
        except ModelError:
            if adapter.digest is None or _is_as_listed(adapter):
                raise
            known.setdefault(adapter.digest, adapter)
        else:
            known[adapter.digest or digest_of(Path(adapter.path))] = adapter
    rules = AdapterRules(config, max_rank, tuple(folders))
    rooms = rooms_of(found, any_rooms(config, max_rank) if folders else NOWHERE)
    rows = {plain_name(layer): numbers for layer, numbers in rows_before(config).items()}
    bank = AdapterBank(known, count, in_host, rules, rooms, rows=rows, kept=kept)
    bank.begin()
    return bank


def _is_as_listed(adapter: ListedAdapter) -> bool:
    try:
        return digest_of(Path(adapter.path)) == adapter.digest
    except ModelError:
        return False
