"""How families of models write calls of tools: each format is a row of facts, and each kind of body has one reader."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from typing import Any


class Body(Enum):
    """How one call is written between its markers."""

    JSON_OBJECT = 1  # {"name": …, "arguments": {…}}
    JSON_ARRAY = 2  # a list of such objects


class IdStyle(StrEnum):
    RANDOM = "random"  # the format has no ids: the API makes them


@dataclass(frozen=True, slots=True)
class CallFormat:
    name: str
    body: Body
    begins: tuple[str, ...] = ()  # markers that begin a call, or a section of calls
    ends: tuple[str, ...] = ()  # what may follow a call or a section before other text
    separators: tuple[str, ...] = ()  # what may stand between two calls
    is_bare: bool = False  # whether a call may also begin the answer without a marker
    name_key: str = "name"
    arguments_keys: tuple[str, ...] = ("arguments", "parameters")
    id_key: str = "id"
    ids: IdStyle = IdStyle.RANDOM

    @property
    def starts(self) -> tuple[str, ...]:
        """Every marker at which a call may begin."""
        return self.begins

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends)

    def coded(self, code: Callable[[str], str]) -> "CallFormat":
        """The same format with markers as a reader's text has them."""
        changed: dict[str, Any] = {
            item.name: _coded(getattr(self, item.name), code) for item in fields(self) if item.name != "name"
        }
        return replace(self, **changed)


def _coded(value: object, code: Callable[[str], str]) -> object:
    if isinstance(value, tuple):
        return tuple(_coded(part, code) for part in value)
    return code(value) if isinstance(value, str) and not isinstance(value, StrEnum) else value


CALL_FORMATS = {
    row.name: row
    for row in (
        CallFormat("hermes", Body.JSON_OBJECT, begins=("<tool_call>",), ends=("</tool_call>",)),
        CallFormat("llama3", Body.JSON_OBJECT, begins=("<|python_tag|>",), separators=(";",), is_bare=True),
    )
}
