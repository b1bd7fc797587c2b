"""The tensors of an adapter, from the header of adapter_model.safetensors: what it adds to each module. Reads no
numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from text_generation_common.adapters import config as adapter_config
from text_generation_common.adapters.config import AdapterConfig, config_of, read_config
from text_generation_common.adapters.content import WEIGHTS, AdapterContent, refuse_pickle
from text_generation_common.adapters.names import (
    ExpertModules,
    ExpertPart,
    by_parameters,
    layer_sizes,
    plain_name,
    routers,
)
from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.flags.model import MAX_RANK
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.gguf_names import names_before
from text_generation_common.models.tensors import LinearSize, Shape
from text_generation_common.weights.headers import Header, Stored, header_of, read_header

FILE = WEIGHTS
PREFIX = "base_model.model."
TYPES = frozenset({"F32", "F16", "BF16"})
MAX_MODULES = 100_000
# Maximum size of the header of an adapter that is read beside steps. 1,000 layers take 0.3 MB; this takes 0.1 s.
MAX_HEADER_BYTES = 4 * 2**20
# By the ends of tensors' names: the fields of `ModulePair`.
ENDS = {
    ".lora_A.weight": "down", ".lora_B.weight": "up", ".lora_embedding_A": "down", ".lora_embedding_B": "up",
    ".lora_B.bias": "bias", ".base_layer.bias": "base_bias", ".bias": "base_bias", ".base_layer.weight": "base_weight",
    ".weight": "base_weight",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModulePair:
    """y += scale * ((x downᵀ) upᵀ + bias) + base_bias - the base's bias. The tensors that change a layer, by their
    names in the file; "": the file has none."""

    rank: int = 0  # 0: there are no matrices
    inputs: int = 0
    outputs: int = 0
    scale: float = 1.0
    is_table: bool = False  # whether it is an embedding, whose inputs are ids
    down: str = ""  # [rank, inputs]
    up: str = ""  # [outputs, rank]
    bias: str = ""  # [outputs]
    base_bias: str = ""  # [outputs]: what the base's bias has become
    base_weight: str = ""  # a copy of the base's weight, which PEFT saves beside matrices of embedding and head
    # Number of experts that have such a pair. The matrices of all experts are `down` [experts * rank, inputs], one
    # expert after the other, and `up` [.., rank * experts], one rank after the other, in which this layer has the
    # outputs `rows` (first, end, step); or each expert has its own, in `each`. 0: one layer.
    experts: int = 0
    rows: tuple[int, int, int] = (0, 0, 0)
    each: tuple["ModulePair", ...] = ()

    @property
    def has_biases(self) -> bool:
        return bool(self.bias or self.base_bias)


NO_PAIR = ModulePair()


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    folder: Path
    modules: Mapping[str, ModulePair]  # by the module's name in the adapter's files
    shapes: Mapping[str, Shape]  # shapes of all tensors
    base: str = ""  # see AdapterConfig

    @property
    def weights(self) -> Path:
        return self.folder / FILE


def read_adapter(folder: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """ModelError for files that are not those of a plain LoRA adapter. Every tensor belongs to a module."""
    _check_inside(folder)
    config = read_config(folder, max_rank)
    try:
        return _files_of(folder, config, read_header(folder / FILE))
    except WeightsError as error:
        raise ModelError(str(error)) from None


def adapter_of(
    content: AdapterContent, max_rank: int = MAX_RANK, largest: int | None = MAX_HEADER_BYTES
) -> AdapterFiles:
    """The same for files that were read, so that nothing is swapped between the check and the use. `largest`: maximum
    size of the header in bytes; None: as for any file of weights."""
    file = content.folder / FILE
    config = config_of(content.folder / adapter_config.FILE, content.config, max_rank)
    if largest is not None and int.from_bytes(content.weights[:8], "little") > largest:
        raise ModelError(f"{file} has a header of more than {largest} bytes, which is not read")
    try:
        return _files_of(content.folder, config, header_of(file, BytesIO(content.weights), len(content.weights)))
    except WeightsError as error:
        raise ModelError(str(error)) from None


def _files_of(folder: Path, config: AdapterConfig, header: Header) -> AdapterFiles:
    if not header.tensors or len(header.tensors) > 2 * MAX_MODULES:
        raise ModelError(f"{folder / FILE} has {len(header.tensors)} tensors: it is not an adapter that can be served")
    names: dict[str, dict[str, str]] = {}
    for name in sorted(header.tensors):
        module, field = _place(folder, name)
        if names.setdefault(module, {}).setdefault(field, name) != name:
            raise ModelError(f"{folder / FILE} has two tensors for one: {_plain(name)}, {_plain(names[module][field])}")
    renamed = by_parameters(names, config)
    if len(set(renamed.values())) != len(names):
        raise ModelError(f"{folder / FILE} has two pairs of matrices for one parameter")
    names = {renamed[module]: fields for module, fields in names.items()}
    modules = {module: _pair(folder, module, names[module], header.tensors, config) for module in sorted(names)}
    return AdapterFiles(folder, modules, {name: stored.shape for name, stored in header.tensors.items()}, config.base)


def _check_inside(folder: Path) -> None:
    """Both files must lie in the folder: links lead within it, or within the repository of the hub's cache."""
    inside = folder.resolve()
    if inside.parent.name == "snapshots":
        inside = inside.parent.parent
    refuse_pickle(folder)
    for name in (adapter_config.FILE, FILE):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no file {name}: is it the folder of a LoRA adapter?")
        if not (folder / name).resolve().is_relative_to(inside):
            raise ModelError(f"{folder / name} is a link to a file outside of the folder, and was refused")


def _place(folder: Path, name: str) -> tuple[str, str]:
    """The module of a tensor, and the tensor's field in `ModulePair`."""
    for end, field in ENDS.items():
        if name.startswith(PREFIX) and name.endswith(end):
            return name.removeprefix(PREFIX).removesuffix(end), field
    raise ModelError(
        f"{folder / FILE} has a tensor {_plain(name)}, which is not one of the two matrices of a layer, nor a bias:"
        " only such adapters are served"
    )


def _pair(
    folder: Path, module: str, names: Mapping[str, str], tensors: Mapping[str, Stored], config: AdapterConfig
) -> ModulePair:
    for field, name in names.items():
        stored = tensors[name]
        if stored.type not in TYPES or len(stored.shape) != (1 if field in ("bias", "base_bias") else 2):
            what, wanted = (
                f"{stored.type} {list(stored.shape)}",
                "numbers" if "bias" in field else "a matrix of numbers",
            )
            raise ModelError(f"{folder / FILE}: the tensor {_plain(name)} is {_plain(what)}, not {wanted}")
    if not {"down", "up", "bias"} & names.keys():
        return ModulePair(base_bias=names.get("base_bias", ""), base_weight=names.get("base_weight", ""))
    kinds = ("lora_embedding_A", "lora_embedding_B") if _is_table(names) else ("lora_A.weight", "lora_B.weight")
    for field, kind in zip(("down", "up"), kinds, strict=True):
        if field not in names:
            missing = _plain(f"{PREFIX}{module}.{kind}")
            raise ModelError(f"{folder / FILE} has no tensor {missing}, and has the other one of the pair")
    if ("bias" in names) != config.has_biases and not _is_table(names):
        raise ModelError(
            f"{folder / FILE}: {_plain(module)} has {'a' if 'bias' in names else 'no'} bias, and"
            f" {adapter_config.FILE} says otherwise: `lora_bias` is {str(config.has_biases).lower()}"
        )
    (rank, inputs), (outputs, of_up) = (tensors[names[field]].shape for field in ("down", "up"))
    wanted_rank = config.rank_of(module)
    experts = rank // wanted_rank if config.targets(module) and rank > wanted_rank else 0
    if not rank == of_up == wanted_rank * max(1, experts):
        raise ModelError(
            f"{folder / FILE}: the matrices of {_plain(module)} have the ranks {rank} and {of_up}, and"
            f" {adapter_config.FILE} says {wanted_rank}"
        )
    scale = config.scale_of(module)
    found: dict[str, Any] = {**names, "experts": experts}
    return ModulePair(wanted_rank, inputs, outputs, scale, _is_table(names), **found)


def _is_table(names: Mapping[str, str]) -> bool:
    return any(names.get(field, "").endswith(("lora_embedding_A", "lora_embedding_B")) for field in ("down", "up"))


def _plain(name: str) -> str:
    return ascii(name)[1:-1][:200]


def modules_of(adapter: AdapterFiles, config: ModelConfig) -> dict[str, ModulePair]:
    """What the adapter adds to each layer, by the layers' plain names. ModelError for an adapter of another base, and
    for one of layers that take no adapters."""
    names = config.names
    sizes, of_experts, of_routers = layer_sizes(config), ExpertModules(config), routers(config)
    embedding, head = plain_name(names.embedding), plain_name(names.head)
    sizes[embedding] = LinearSize(config.hidden_size, config.vocab_size)
    sizes[head] = LinearSize(config.vocab_size, config.hidden_size, config.biases.head)
    in_files = {}
    if config.converted is not None:
        in_files = {plain_name(old): plain_name(new) for old, new in names_before(config).items()}
    found: dict[str, ModulePair] = {}
    for module, pair in adapter.modules.items():
        name = plain_name(module).removesuffix(".weight")
        if parts := of_experts.parts(name):
            for part in parts:
                found[part.layer] = _with_experts(adapter, module, pair, part, found.get(part.layer, NO_PAIR))
            continue
        name = of_routers.get(name) or (name if config.converted is None else in_files.get(name, ""))
        if name not in sizes or pair.experts or (pair.rank and pair.is_table != (name == embedding)):
            raise ModelError(
                f"{adapter.weights}: {_plain(module)} is not a linear layer of attention or MLP, experts, a router, the"
                f" embedding or the head of this {config.model_type}: adapters of other layers are not supported, or it"
                " belongs to another model"
            )
        weight = (config.vocab_size, config.hidden_size) if name in (embedding, head) else None
        _check_shapes(adapter, module, pair, sizes[name], weight)
        if name in found:
            raise ModelError(f"{adapter.weights} has two pairs of matrices for {_plain(module)}")
        found[name] = pair
    return found


def _with_experts(
    adapter: AdapterFiles, module: str, pair: ModulePair, part: ExpertPart, before: ModulePair
) -> ModulePair:
    """The matrices of a part's product: those of `before`, and those of this module."""
    is_stack = part.expert is None
    if not pair.rank or pair.has_biases or pair.base_weight:
        raise ModelError(f"{adapter.weights}: {_plain(module)}: biases of experts are not supported")
    if pair.experts != (part.experts if is_stack else 0):
        raise ModelError(
            f"{adapter.weights}: the matrices of {_plain(module)} are for {pair.experts} experts, and this model has"
            f" {part.experts}: the adapter belongs to another model, or `target_parameters` does not name them"
        )
    wanted = (part.of_pair if is_stack else part.size.outputs, part.size.inputs)
    _check_shapes(adapter, module, pair, LinearSize(*wanted), None)
    if before.down or (before.each and (is_stack or before.each[part.expert or 0].rank)):
        raise ModelError(f"{adapter.weights} has two pairs of matrices for {_plain(module)}")
    if is_stack:
        return replace(pair, outputs=part.size.outputs, rows=part.outputs)
    each = list(before.each or [NO_PAIR] * part.experts)
    each[part.expert or 0] = pair
    rank = max(before.rank, pair.rank)
    return ModulePair(rank, part.size.inputs, part.size.outputs, experts=part.experts, each=tuple(each))


def _check_shapes(adapter: AdapterFiles, module: str, pair: ModulePair, size: LinearSize, weight: Shape | None) -> None:
    """`weight`: the shape of a copy of the base's weight, if it may be there."""
    if pair.rank and (pair.outputs, pair.inputs) != size.shape:
        raise ModelError(
            f"{adapter.weights}: the matrices of {_plain(module)} are for a layer {[pair.outputs, pair.inputs]}, and"
            f" that of this model is {list(size.shape)}: the adapter belongs to another model"
        )
    if pair.base_weight and weight is None:
        raise ModelError(
            f"{adapter.weights} has a tensor {_plain(pair.base_weight)}: the base's weights were changed too"
        )
    if pair.base_bias and not size.has_bias:
        raise ModelError(f"{adapter.weights} has a bias of {_plain(module)}, which has none in this model")
    wanted = {pair.bias: (size.outputs,), pair.base_bias: (size.outputs,), pair.base_weight: weight or ()}
    for name, shape in wanted.items():
        if name and adapter.shapes[name] != shape:
            raise ModelError(
                f"{adapter.weights}: the tensor {_plain(name)} is {list(adapter.shapes[name])}, and must be"
                f" {list(shape)}: the adapter belongs to another model, or its vocabulary was changed"
            )


@dataclass(frozen=True, slots=True)
class LayerRoom:
    """What a slot has room for at a layer."""

    rank: int = 0
    inputs: int = 0
    outputs: int = 0
    has_biases: bool = False
    is_table: bool = False
    experts: int = 0  # number of experts with such room; 0: one layer

    @property
    def numbers(self) -> int:
        rank = table_rank(self.rank) if self.is_table else self.rank
        numbers = rank * (self.inputs + self.outputs) + 2 * self.outputs * self.has_biases
        return numbers * max(1, self.experts)


NO_ROOM = LayerRoom()
NOWHERE: Mapping[str, LayerRoom] = MappingProxyType({})


def rooms_of(
    adapters: Iterable[Mapping[str, ModulePair]], rooms: Mapping[str, LayerRoom] = NOWHERE
) -> dict[str, LayerRoom]:
    """The room that `rooms`, and the largest of the adapters at each layer, need there."""
    found = dict(rooms)
    for modules in adapters:
        for name, pair in modules.items():
            room = found.get(name, NO_ROOM)
            # An adapter with biases alone does not know the layer's inputs, and has no numbers for them.
            found[name] = LayerRoom(
                max(room.rank, pair.rank),
                max(room.inputs, pair.inputs),
                max(room.outputs, pair.outputs),
                has_biases=room.has_biases or pair.has_biases,
                is_table=room.is_table or pair.is_table,
                experts=max(room.experts, pair.experts),
            )
    return found


def any_rooms(config: ModelConfig, rank: int) -> dict[str, LayerRoom]:
    """The room that any adapter of at most this rank needs, but for experts, embeddings, heads and biases."""
    return {name: LayerRoom(rank, size.inputs, size.outputs) for name, size in layer_sizes(config).items()}


def check_room(adapter: AdapterFiles, modules: Mapping[str, ModulePair], rooms: Mapping[str, LayerRoom]) -> None:
    """ModelError if a slot has no room for the adapter."""
    for name, pair in modules.items():
        room = rooms.get(name, NO_ROOM)
        if name not in rooms or pair.rank > room.rank or pair.has_biases > room.has_biases:
            what = "this layer" if name not in rooms else f"rank {pair.rank}" if pair.rank > room.rank else "biases"
            raise ModelError(
                f"{adapter.folder}: {_plain(name)}: the server has no room for {what}, because no adapter has needed it"
                " at the start: name this one in --lora-adapters"
            )


def table_rank(rank: int) -> int:
    """The numbers that each id of an embedding takes."""
    return -(-rank // 16) * 16
