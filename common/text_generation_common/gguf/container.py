"""Reads the header of a GGUF file, or of all parts of a model: its keys, and where its tensors are.

Strangers have written these files. Every count, length and offset is compared with limits and with the file's size
before it is used. The header is mapped into memory, and the values of an array are read when they are asked for. A
value becomes a number, a flag or a text of Python's only through a reader that checks its kind.
"""

import errno
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.types import REFUSED, TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the layout is the same
# Limits, each several times what files in use have.
MAX_HEADER_BYTES = 64 * 2**20  # all parts together
MAX_KEYS, MAX_TENSORS, MAX_PARTS = 2**14, 2**15, 999
MAX_NAME_BYTES = 2**7
MAX_ELEMENTS, MAX_LISTED = 2**20, 2**21  # elements of an array, and of all arrays of texts of a file
# All texts of a file that are in no array, a whole tokenizer.json excepted; and one text in an array.
MAX_TEXT_BYTES, MAX_LISTED_BYTES = 2**20, 2**14
MAX_DIMENSIONS, MAX_ALIGNMENT = 4, 2**16
MAX_SMALL = 2**12  # numbers of a tensor that is read with the keys
WHOLE = "tokenizer.huggingface.json"  # the key of a whole tokenizer.json, which is kept as an array of bytes
AGAIN = "download it again"

Scalar = int | float | bool | str
# struct's letters for the kinds of numbers, by the numbers of the kinds in files.
KINDS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BYTE, TEXT, ARRAY = 0, 8, 9
LENGTH = struct.Struct("<Q")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class GgufArray:
    """An array of numbers, or of texts."""

    kind: int
    count: int
    size: int  # bytes in the file, with the lengths of texts
    _data: mmap.mmap = field(repr=False)
    _start: int

    @property
    def numbers(self) -> str:
        """The letter of the kind of its numbers; "?" for texts and flags."""
        return KINDS.get(self.kind, "?")

    def values(self) -> list[Scalar]:
        """All elements."""
        if self.kind == TEXT:
            return [*self.texts()]
        return list(struct.unpack_from(f"<{self.count}{KINDS[self.kind]}", self._data, self._start))

    def texts(self) -> Iterator[str]:
        """The elements, which are texts, one by one. A byte that is not UTF-8 becomes U+FFFD."""
        place = self._start
        for _ in range(self.count):
            start = place + LENGTH.size
            place = start + LENGTH.unpack_from(self._data, place)[0]
            yield self._data[start:place].decode(errors="replace")

    def content(self) -> bytes:
        """The elements, which are bytes."""
        return self._data[self._start : self._start + self.size]


Value = Scalar | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    type: str  # a name of TYPES
    shape: tuple[int, ...]  # the numbers of the last dimension are neighbours
    part: int  # the file that holds the tensor: a place in GgufHeader.files
    offset: int  # from the file's start
    size: int  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class GgufHeader:
    """What the files of a model say of it."""

    path: Path  # as it was given
    files: tuple[Path, ...]  # the parts, in order
    metadata: Mapping[str, Value]  # keys of the first part
    tensors: Mapping[str, GgufTensor]
    has_numbers: bool = True  # False: the numbers of tensors are still to come

    def text(self, key: str, default: str | None = None) -> str:
        value = self._found(key, default)
        if not isinstance(value, str):
            raise self.error(f"{shown(key)} is not a text")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._found(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"{shown(key)} is not a whole number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._found(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{shown(key)} is not true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._found(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(f"{shown(key)} is not a finite number")
        return value

    def array(self, key: str) -> GgufArray | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise self.error(f"{shown(key)} is not a list")
        return value

    def texts(self, key: str, max_count: int, max_bytes: int) -> GgufArray:
        """An array of texts, of which none is read yet. WeightsError for no or another value, and beyond the limits."""
        array = self.array(key)
        if array is None or array.kind != TEXT or not array.count:
            raise self.error(f"it has no {key}")
        for has, maximum, what in ((array.count, max_count, "texts"), (array.size, max_bytes, "bytes")):
            if has > maximum:
                raise self.error(f"{key} has {has} {what}, and at most {maximum} are read")
        return array

    def error(self, what: str) -> WeightsError:
        return broken(self.path, what)

    def _found(self, key: str, default: Scalar | None) -> Value:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"it has no key {shown(key)}")
        return value


def broken(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is not a good GGUF file: {what}; {AGAIN}")


def is_gguf(path: Path) -> bool:
    """Whether the path is a file that begins as GGUF files do. Files of Ollama and of the hub's cache have other
    names."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # a name with a zero byte is a ValueError
        return False


def read_header(path: Path) -> GgufHeader:
    """The header of the model whose file, or one of whose parts, is `path`. WeightsError if a part is missing, cut off
    or contradicts itself."""
    try:
        return _read(path, *(_identity(file) for file in parts_of(path)))
    except OSError as error:
        raise WeightsError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def parts_of(path: Path) -> tuple[Path, ...]:
    """The file, or all files of which it is a part by its name."""
    match = PART.fullmatch(path.name)
    if match is None or match[3] == "00001":
        return (path,)
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= MAX_PARTS:
        raise WeightsError(
            f"{path} is named as part {int(match[2])} of {count}: give it the name that it was made with"
        )
    return tuple(path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


Identity = tuple[Path, int, int, int]


def _identity(file: Path) -> Identity:
    """Differs when the file is replaced or written."""
    try:
        status = file.stat()
    except FileNotFoundError:
        raise WeightsError(f"{file} is missing, a part of the model: download it, too") from None
    return file, status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=2)
def _read(path: Path, *parts: Identity) -> GgufHeader:
    files, left = tuple(part[0] for part in parts), MAX_HEADER_BYTES
    header = GgufHeader(path, files, {}, {})
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        part = _Part(file, number, left=left)
        left -= part.end
        _check_part(GgufHeader(file, files, part.metadata, {}), number, len(files))
        if twice := tensors.keys() & part.tensors.keys():
            raise part.error(f"the tensor {shown(min(twice))} is in another part, too")
        tensors |= part.tensors
        if len(tensors) > MAX_TENSORS:
            raise part.error(f"its model has more than {MAX_TENSORS} tensors")
        header = header if number else GgufHeader(path, files, part.metadata, tensors)
    count = header.whole("split.tensors.count", len(tensors)) if len(files) > 1 else len(tensors)
    if count != len(tensors):
        raise header.error(f"its parts have {len(tensors)} tensors, and split.tensors.count is {count}")
    return header


def _check_part(header: GgufHeader, number: int, count: int) -> None:
    """WeightsError if a file is not the part that its name says."""
    said, of = header.whole("split.no", 0), header.whole("split.count", 1)
    if max(of, 1) != count:
        raise WeightsError(
            f"{header.path} is part {said + 1} of {of}, and its name does not say so: give all parts the names that"
            f" they were made with, such as model-{said + 1:05}-of-{of:05}.gguf"
        )
    if said != number:
        raise header.error(f"it is part {said + 1}, and its name says {number + 1}")


class _Unfinished(WeightsError):
    """A file is being downloaded, and its header is not whole yet."""


class _Part:
    """A file, while its header is read. `file_bytes`: what it will have, if it is not whole yet. `left`: what its
    header may have."""

    def __init__(self, path: Path, number: int, file_bytes: int | None = None, left: int = MAX_HEADER_BYTES) -> None:
        self.path = path
        self._text_bytes, self._listed, self._limit = 0, 0, left
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            self._file_bytes = status.st_size if file_bytes is None else file_bytes
            self._end = min(status.st_size, left)
            if status.st_size < 24:
                raise self.error(f"it has {status.st_size} bytes only")
            # A mapping cannot be empty.
            self._data = mmap.mmap(file.fileno(), max(self._end, 24), access=mmap.ACCESS_READ)
        self._place = 0
        if self._data[:4] != MAGIC:
            raise self.error("it does not begin with GGUF")
        self._place = 4
        version, tensors, keys = self._numbers("IQQ")
        if version not in VERSIONS:
            raise WeightsError(f"{path} is a GGUF file of version {version}, and 2 and 3 are read: convert it again")
        self._at_most("keys", keys, MAX_KEYS, 13)
        self._at_most("tensors", tensors, MAX_TENSORS, 32)
        self.metadata = self._keys(keys)
        self.tensors = self._tensors(tensors, number)

    @property
    def end(self) -> int:
        return self._place

    def error(self, what: str) -> WeightsError:
        return broken(self.path, what)

    def _take(self, count: int) -> int:
        """The place of the next `count` bytes."""
        start = self._place
        if count > self._end - start:
            if self._end < min(self._file_bytes, self._limit):
                raise _Unfinished(f"{self.path} is not whole")
            whole = self._end == self._file_bytes
            raise self.error("it is cut off" if whole else f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")
        self._place = start + count
        return start

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        reader = struct.Struct(f"<{kinds}")
        return reader.unpack_from(self._data, self._take(reader.size))

    def _at_most(self, what: str, count: int, maximum: int, least_bytes: int) -> None:
        """Refuses a count that is above a limit, or of which the rest of the file has no room."""
        if count > maximum or count * least_bytes > self._file_bytes - self._place:
            raise self.error(f"it counts {count} {what}, of which it can have {maximum} at most")

    def _name(self) -> str:
        (length,) = self._numbers("Q")
        if length > MAX_NAME_BYTES:
            raise self.error(f"a name has {length} bytes, at most {MAX_NAME_BYTES} are read")
        start = self._take(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.error("a name is not UTF-8") from None

    def _keys(self, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(count):
            name = self._name()
            if name in found:
                raise self.error(f"the key {shown(name)} is there twice")
            (kind,) = self._numbers("I")
            found[name] = self._array(name) if kind == ARRAY else self._scalar(name, kind)
        return found

    def _scalar(self, name: str, kind: int) -> Value:
        if kind == TEXT:
            (length,) = self._numbers("Q")
            start = self._take(length)
            if name == WHOLE:
                return GgufArray(BYTE, length, length, self._data, start)
            self._text_bytes += length
            if self._text_bytes > MAX_TEXT_BYTES:
                raise self.error(f"the texts of its keys, with {shown(name)}, have more than {MAX_TEXT_BYTES} bytes")
            return self._data[start : start + length].decode(errors="replace")
        if kind not in KINDS:
            raise self.error(f"the value of {shown(name)} has the type {kind}, which is not known")
        return self._numbers(KINDS[kind])[0]

    def _array(self, name: str) -> GgufArray:
        kind, count = self._numbers("IQ")
        if kind not in KINDS and kind != TEXT:
            raise self.error(f"the list {shown(name)} has elements of type {kind}, which are not read")
        size = LENGTH.size if kind == TEXT else struct.calcsize(KINDS[kind])
        self._at_most(f"elements of {shown(name)}", count, MAX_ELEMENTS, size)
        start = self._place
        self._take(self._texts_size(name, count) if kind == TEXT else count * size)
        return GgufArray(kind, count, self._place - start, self._data, start)

    def _texts_size(self, name: str, count: int) -> int:
        """The bytes of an array of texts, or more than are left."""
        self._listed += count
        self._at_most("texts in lists", self._listed, MAX_LISTED, 0)
        data, end, place, length_at = self._data, self._end, self._place, LENGTH.unpack_from
        for _ in range(count):
            if (text := place + LENGTH.size) > end:
                return text - self._place
            (length,) = length_at(data, place)
            if length > MAX_LISTED_BYTES:
                raise self.error(f"{shown(name)} has a text of {length} bytes, at most {MAX_LISTED_BYTES} are read")
            place = text + length
        return place - self._place

    def _tensors(self, count: int, part: int) -> dict[str, GgufTensor]:
        entries = [self._entry() for _ in range(count)]
        alignment = GgufHeader(self.path, (), self.metadata, {}).whole("general.alignment", 32)
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.error("general.alignment is not a power of two")
        data = -(-self._place // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, number, shape, offset in entries:
            size = self._size(name, number, shape)
            if offset % alignment or data + offset + size > self._file_bytes:
                raise self.error(f"the tensor {shown(name)} has {size} bytes at {offset}, where the file has no room")
            if name in found:
                raise self.error(f"the tensor {shown(name)} is there twice")
            found[name] = GgufTensor(name, TYPES[number].name, shape, part=part, offset=data + offset, size=size)
        end = 0
        for tensor in sorted(found.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self.error(f"the tensor {shown(tensor.name)} begins within another")
            end = tensor.offset + tensor.size
        return found

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._name()
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.error(f"the tensor {shown(name)} has {dimensions} dimensions, and 1 to 4 are possible")
        *sizes, number, offset = self._numbers(f"{dimensions}QIQ")
        return name, number, tuple(reversed(sizes)), offset

    def _size(self, name: str, number: int, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor."""
        if number not in TYPES:
            called = REFUSED.get(number, f"number {number}")
            types = ", ".join(type.name for type in TYPES.values())
            raise WeightsError(
                f"{self.path}: the tensor {shown(name)} has the type {called}, which is not supported: choose a file"
                f" whose types are {types}"
            )
        kind = TYPES[number]
        if 0 in shape or shape[-1] % kind.block:
            raise self.error(f"the tensor {shown(name)} has rows of {shape[-1]}, not of blocks of {kind.block} numbers")
        return math.prod(shape[:-1]) * kind.row_bytes(shape[-1])


def read_start(path: Path, file_bytes: int) -> GgufHeader | None:
    """The header of one file of which only the beginning is there: it will have `file_bytes`. None as long as the
    beginning does not hold the header. WeightsError as `read_header`."""
    try:
        part = _Part(path, 0, file_bytes)
    except _Unfinished:
        return None
    return GgufHeader(path, (path,), part.metadata, part.tensors, has_numbers=False)


def header_end(path: Path) -> int:
    """Where the tensors of one file begin."""
    part = _Part(path, 0)
    return min((tensor.offset for tensor in part.tensors.values()), default=part.end)


def shown(name: str) -> str:
    """A name from a file, as at most 60 characters of one line."""
    return ascii(name[:60])[1:-1][:60]


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens a file with O_NONBLOCK. Without it, opening a named pipe would wait until a process writes to the pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def tensor_numbers(header: GgufHeader, name: str, count: int) -> list[float]:
    """The numbers of a tensor of float32 that must have `count` of them, or as many others if they are still to come.
    WeightsError for another or a larger tensor."""
    tensor = header.tensors[name]
    if tensor.type != "F32" or tensor.shape != (count,) or count > MAX_SMALL:
        raise header.error(
            f"the tensor {shown(name)} is stored as {tensor.type} with the shape {list(tensor.shape)}, and must have"
            f" {count} numbers of F32, {MAX_SMALL} at most"
        )
    if not header.has_numbers:
        return [2.0] * count
    with open(header.files[tensor.part], "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.size)
    if len(data) < tensor.size:
        raise header.error("it is cut off")
    return [*struct.unpack(f"<{count}f", data)]
