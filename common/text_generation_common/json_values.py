"""Frozen dataclasses as JSON, for the lines between two processes: written and checked by pydantic."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

_ADAPTERS: dict[type, "TypeAdapter[Any]"] = {}  # made once for each type, because that takes a millisecond


def as_json(value: object) -> bytes:
    """The value as one line of JSON without its end, which `from_json` reads."""
    return _adapter(type(value)).dump_json(value)


def from_json(kind: type[T], text: bytes | str) -> T:
    """The value of type `kind` that `text` describes. Fields without a default must be there. ValueError, with one line
    that names the field, if it describes none."""
    try:
        return _adapter(kind).validate_json(text)
    except ValueError as error:
        raise ValueError(_first(error)) from None


def from_fields(kind: type[T], fields: Mapping[str, Any]) -> T:
    """As `from_json`, of JSON that was read already."""
    try:
        return _adapter(kind).validate_python(fields)
    except ValueError as error:
        raise ValueError(_first(error)) from None


def _adapter(kind: type[T]) -> "TypeAdapter[T]":
    # Imported here, because the import takes 0.1 s, which the start of a server would notice.
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _first(error: "ValueError | ValidationError") -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
