"""What the weights files of a model's folder say of themselves: names, types and shapes of tensors. Reads headers only,
and checks everything but the tensors' numbers.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from text_generation_common.errors import WeightsError
from text_generation_common.file_names import INDEX, is_plain, missing_parts, safetensors_names
from text_generation_common.gguf.container import is_gguf
from text_generation_common.gguf.container import read_header as read_gguf_header
from text_generation_common.gguf.tensors import model_tensors
from text_generation_common.model_files import LFS_START, MIB, ModelFileError, not_fetched, read_json_object
from text_generation_common.quantized.served import QUANTIZED_NAMES, refusal, served_method

# Weights in a quantized format are refused. It shows in config.json, in the types of tensors or in their names.
SERVED_TYPES = frozenset({"BF16", "F16", "F32", "F64"})
# Types in which quantized weights are stored: safetensors' names, and torch's names for them.
TYPE_NAMES: Mapping[str, str] = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
}

# Buffers that old versions of transformers saved. They are computed from config.json instead.
BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention|self_attention)\.(bias|masked_bias))$"
)
_INSTEAD = "choose the same model with unquantized weights"


def refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses the model with WeightsError if config.json, or a file beside it, names a format that we do not serve."""
    if reason := refusal(path, config):
        raise WeightsError(reason)


def refuse_quantized_tensors(file: Path, types: Mapping[str, str], served: str | None = None) -> None:
    """Refuses tensors that only quantized weights have: WeightsError for the first. `types` are spelled as in
    safetensors. `served`: the method that quantized the weights; `models/tensors.py` compares their tensors with the
    model's layers.
    """
    if served is not None:
        return
    for name, type in sorted(types.items()):
        if BUFFERS.search(name):
            continue
        formats = [format for pattern, format in QUANTIZED_NAMES if pattern.search(name)]
        if formats:
            raise WeightsError(
                f"{file}: the tensor {ascii(name)[1:-1]} belongs to weights quantized as {formats[0]}, which is not"
                f" supported yet: {_INSTEAD}"
            )
        if type not in SERVED_TYPES:
            called = TYPE_NAMES.get(type, ascii(type)[1:-1])
            raise WeightsError(
                f"{file}: the tensor {ascii(name)[1:-1]} is stored as {called}, which is not supported yet: {_INSTEAD}"
            )


# The format itself allows 100 MB. A header of that size took 2.2 GB of memory to read.
MAX_HEADER_BYTES = 32 * MIB
MAX_DIMENSIONS, MAX_SIZE = 8, 2**63  # the product of a million sizes would take hours
_AGAIN_WHOLE = "download the model again"
_AGAIN = "delete it and download the model again"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's description in its file. `type` is spelled as in safetensors, such as BF16."""

    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Header:
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """The headers of all weights files of a folder.

    A file's metadata may say that one name stands for another tensor (`{"lm_head.weight": "model.embed…"}`, written by
    the conversion for tied weights): an alias.
    """

    stored: Mapping[str, Stored]
    where: Mapping[str, Path]  # the file of each stored tensor
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path) -> "WeightHeaders":
        """WeightsError for files that are missing or broken, and for tensors that only quantized weights have."""
        if is_gguf(folder):
            return cls.of_gguf(folder)
        stored: dict[str, Stored] = {}
        where: dict[str, Path] = {}
        aliases: dict[str, str] = {}
        served = format_of(folder)
        for file in weight_files(folder):
            header = read_header(file)
            refuse_quantized_tensors(file, {name: tensor.type for name, tensor in header.tensors.items()}, served)
            stored |= header.tensors
            where |= dict.fromkeys(header.tensors, file)
            aliases |= {alias: name for alias, name in header.metadata.items() if name in header.tensors}
        for name, file_name in (read_index(folder / INDEX) or {}).items():
            if where.get(name) != folder / file_name:
                raise WeightsError(f"{folder / file_name} has no tensor {name}, which {INDEX} says it holds: {_AGAIN}")
        return cls(stored, where, aliases)

    @classmethod
    def of_gguf(cls, path: Path) -> "WeightHeaders":
        header = read_gguf_header(path)
        tensors = model_tensors(header)
        stored = {name: Stored(tensor.type, tensor.shape) for name, tensor in tensors.items()}
        return cls(stored, {name: header.files[tensor.part] for name, tensor in tensors.items()}, {})

    @property
    def names(self) -> list[str]:
        return sorted(self.stored.keys() | self.aliases.keys())

    def stored_name(self, name: str) -> str:
        return name if name in self.stored else self.aliases.get(name, name)

    def describe(self, name: str) -> Stored | None:
        """Type and shape of the whole tensor, or None if there is no tensor of this name."""
        return self.stored.get(self.stored_name(name))


def format_of(folder: Path) -> str | None:
    """The method by which the weights are quantized, if it is served."""
    config = folder / "config.json"
    return served_method(folder, read_json(config)) if config.exists() else None


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, or the parts of a GGUF file. WeightsError if there is none,
    or if one of them is missing."""
    if is_gguf(path):
        return list(read_gguf_header(path).files)
    index = read_index(path / INDEX)
    names = safetensors_names(file_names(path), None if index is None else set(index.values()))
    if not names:
        raise WeightsError(f"{path} has no .safetensors weights: is it the directory of a model?")
    missing = [name for name in names if not (path / name).is_file()] or missing_parts(names)
    if missing:
        raise WeightsError(f"{path / missing[0]} is missing, one of the weights files: {_AGAIN_WHOLE}")
    return [path / name for name in names]


def file_names(path: Path) -> list[str]:
    if is_gguf(path):
        return [path.name]
    try:
        return [entry.name for entry in path.iterdir()]
    except OSError as error:
        raise WeightsError(f"{path} is not a directory that can be read: {error.strerror}") from None


def read_index(file: Path) -> dict[str, str] | None:
    """{tensor: file name} of an index beside the weights; None if there is no such file."""
    if not file.exists():
        return None
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{file} has no weight_map: {_AGAIN}")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or not is_plain(file_name):
            raise WeightsError(f"{file} names a file outside its directory, and was refused: {file_name!r}")
    return weight_map


def read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except ModelFileError as error:
        raise WeightsError(str(error)) from None


def read_header(file: Path) -> Header:
    """Names and metadata of one file. WeightsError unless the file ends with its tensors, one after the other, each in
    the size that its type and shape ask for."""
    try:
        with file.open("rb") as stream:
            return header_of(file, stream, file.stat().st_size)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from None


def header_of(file: Path, stream: BinaryIO, size: int) -> Header:
    """The same for an open file, or for its content."""
    beginning = stream.read(len(LFS_START))
    if beginning == LFS_START:
        raise WeightsError(not_fetched(file))
    length = int.from_bytes(beginning[:8], "little")
    stream.seek(8)
    if size < 8 or length > size - 8:
        raise WeightsError(f"{file} is broken: no safetensors header in its {size} bytes; {_AGAIN}")
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{file} has a header of {length / MIB:.0f} MiB, at most {MAX_HEADER_BYTES // MIB} MiB are read:"
            " choose a model whose weights are in more files"
        )
    try:
        header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata is text")
        tensors = {name: _stored(entry) for name, entry in header.items()}
        offsets = {name: _sizes(entry["data_offsets"]) for name, entry in header.items()}
        places = sorted((start, stop, name) for name, (start, stop) in offsets.items())
        asked = 8 + length + max((stop for _, stop, _ in places), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"{file} is broken: its safetensors header cannot be read; {_AGAIN}") from None
    if size != asked:
        raise WeightsError(f"{file} is broken: {size} bytes where its header asks for {asked}; {_AGAIN}")
    end = 0
    for start, stop, name in places:
        wanted = end + _bytes(tensors[name])
        if (start, stop) != (end, wanted):
            raise WeightsError(
                f"{file} is broken: the tensor {ascii(name)[1:-1]} has the bytes {start} to {stop}, where its type, its"
                f" shape and the tensors before it ask for {end} to {wanted}; {_AGAIN}"
            )
        end = stop
    return Header(tensors, metadata)


def _stored(entry: Mapping[str, Any]) -> Stored:
    if not isinstance(entry["dtype"], str):
        raise ValueError("no type of a tensor")
    return Stored(entry["dtype"], _sizes(entry["shape"]))


def _sizes(values: Sequence[Any]) -> tuple[int, ...]:
    if len(values) > MAX_DIMENSIONS or not all(isinstance(size, int) and 0 <= size < MAX_SIZE for size in values):
        raise ValueError("no shape of a tensor, or no place")
    return tuple(values)


def _bytes(stored: Stored) -> int:
    """What a tensor takes. The name of a type has the bits of a number in front, as BF16 and F8_E4M3 do; BOOL has 8."""
    bits = int((re.findall(r"\d{1,3}", stored.type) or [8])[0])
    return -(-math.prod(stored.shape) * bits // 8)


def verify(path: Path) -> WeightHeaders:
    """Checks that config.json can be read, that all weights files are complete, and that none is quantized in a format
    that we do not serve. WeightsError names the wrong file."""
    refuse_quantized(path, read_json(path / "config.json"))
    return WeightHeaders.of(path)
