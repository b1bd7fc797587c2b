"""The tensors of an adapter, from the header of adapter_model.safetensors: a pair of matrices for each module. Reads no
numbers.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_common.adapters import config as adapter_config
from text_generation_common.adapters.config import AdapterConfig, read_config
from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.flags.model import MAX_RANK
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.tensors import linear_sizes
from text_generation_common.weights.headers import Stored, read_header

FILE = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
TYPES = frozenset({"F32", "F16", "BF16"})
MAX_MODULES = 100_000
PIECE = 2**20
# Words that names of layers have in some files and not in others, which were written without the head, or by another
# version of transformers.
FRONTS = frozenset({"model", "language_model", "transformer", "gpt_neox"})


@dataclass(frozen=True, slots=True)
class ModulePair:
    """y += scale * (x downᵀ) upᵀ: the tensors of one linear layer, by their names in the file."""

    down: str  # [rank, inputs]
    up: str  # [outputs, rank]
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    folder: Path
    modules: Mapping[str, ModulePair]  # by the module's name in the adapter's files

    @property
    def weights(self) -> Path:
        return self.folder / FILE


def read_adapter(folder: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """ModelError for files that are not those of a plain LoRA adapter. Every tensor belongs to a pair."""
    _check_inside(folder)
    config = read_config(folder, max_rank)
    try:
        header = read_header(folder / FILE)
    except WeightsError as error:
        raise ModelError(str(error)) from None
    if not header.tensors or len(header.tensors) > 2 * MAX_MODULES:
        raise ModelError(f"{folder / FILE} has {len(header.tensors)} tensors: it is not an adapter that can be served")
    modules = {_module(folder, name) for name in header.tensors}
    return AdapterFiles(folder, {name: _pair(folder, name, header.tensors, config) for name in sorted(modules)})


def _check_inside(folder: Path) -> None:
    """Both files must lie in the folder: links lead within it, or within the repository of the hub's cache."""
    inside = folder.resolve()
    if inside.parent.name == "snapshots":
        inside = inside.parent.parent
    if not (folder / FILE).exists() and (folder / PICKLE).exists():
        raise ModelError(f"{folder / PICKLE} is a pickle, which is not read: save the adapter as {FILE}")
    for name in (adapter_config.FILE, FILE):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no file {name}: is it the folder of a LoRA adapter?")
        if not (folder / name).resolve().is_relative_to(inside):
            raise ModelError(f"{folder / name} is a link to a file outside of the folder, and was refused")


def _module(folder: Path, name: str) -> str:
    for ending in (DOWN, UP):
        if name.startswith(PREFIX) and name.endswith(ending):
            return name.removeprefix(PREFIX).removesuffix(ending)
    raise ModelError(
        f"{folder / FILE} has a tensor {_plain(name)}, which is not one of the two matrices of a linear layer: only"
        " such adapters are served"
    )


def _pair(folder: Path, module: str, tensors: Mapping[str, Stored], config: AdapterConfig) -> ModulePair:
    names = f"{PREFIX}{module}{DOWN}", f"{PREFIX}{module}{UP}"
    for name in names:
        if name not in tensors:
            raise ModelError(f"{folder / FILE} has no tensor {_plain(name)}, and has the other one of the pair")
        if tensors[name].type not in TYPES or len(tensors[name].shape) != 2:
            what = f"{tensors[name].type} {list(tensors[name].shape)}"
            raise ModelError(f"{folder / FILE}: the tensor {_plain(name)} is {_plain(what)}, not a matrix of numbers")
    (rank, inputs), (outputs, of_up) = (tensors[name].shape for name in names)
    wanted = config.rank_of(module)
    if not rank == of_up == wanted:
        raise ModelError(
            f"{folder / FILE}: the matrices of {_plain(module)} have the ranks {rank} and {of_up}, and"
            f" {adapter_config.FILE} says {wanted}"
        )
    return ModulePair(*names, rank, inputs, outputs, config.scale_of(module))


def _plain(name: str) -> str:
    return ascii(name)[1:-1][:200]


def modules_of(adapter: AdapterFiles, config: ModelConfig) -> dict[str, ModulePair]:
    """The pairs by the plain names of linear layers. ModelError for an adapter of another base, and for one of layers
    that take no adapters."""
    sizes = {plain_name(name): size for name, size in linear_sizes(config).items()}
    found: dict[str, ModulePair] = {}
    for module, pair in adapter.modules.items():
        name = plain_name(module)
        if name not in sizes:
            raise ModelError(
                f"{adapter.weights}: {_plain(module)} is not a linear layer of attention or MLP in this"
                f" {config.model_type}: adapters of other layers are not supported, or it belongs to another model"
            )
        if (pair.outputs, pair.inputs) != sizes[name].shape:
            raise ModelError(
                f"{adapter.weights}: the matrices of {_plain(module)} are for a layer {[pair.outputs, pair.inputs]},"
                f" and that of this model is {list(sizes[name].shape)}: the adapter belongs to another model"
            )
        if name in found:
            raise ModelError(f"{adapter.weights} has two pairs of matrices for {_plain(module)}")
        found[name] = pair
    return found


def padded_numbers(adapters: Sequence[Mapping[str, ModulePair]]) -> int:
    """The numbers in the matrices of all adapters, each of which has for a layer as much room as the largest one."""
    found: dict[str, int] = {}
    for modules in adapters:
        for name, pair in modules.items():
            found[name] = max(found.get(name, 0), pair.rank * (pair.inputs + pair.outputs))
    return len(adapters) * sum(found.values())


def plain_name(layer: str) -> str:
    """A layer's name without words that files with the head have, and those without it lack."""
    return ".".join(word for word in layer.split(".") if word not in FRONTS)


def digest_of(folder: Path) -> str:
    """The adapter's identity: SHA-256 of its two files. Names are labels."""
    digest = hashlib.sha256()
    for name in (adapter_config.FILE, FILE):
        try:
            with open(folder / name, "rb") as file:
                digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
                while piece := file.read(PIECE):
                    digest.update(piece)
        except OSError as error:
            raise ModelError(f"{folder / name} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
