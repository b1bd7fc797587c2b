"""The classes of the fields of requests, and what follows from each. Does no input or output: the child processes that
read large bodies use it too.

A field is in one of five classes; `known_fields.py` gives the class of each field that no schema has:

- *honoured*: a field of the schema (the dialect's `schemas.py`).
- *refused*: known from TGI, OpenAI, vLLM, SGLang or llama.cpp, changes the answer, and is not supported here. A value
  other than its neutral ones is an error that names the field.
- *renamed*: the route has a field of the same meaning under another name. Refused, and the error names that field.
- *tolerated*: known, and changes no answer, whatever its value.
- *unknown*: all others. The request is served, and `X-Ignored-Parameters` names them; or `--strict-parameters` refuses
  them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from pydantic import BaseModel

from text_generation_router.errors import UnknownParameterError, UnsupportedParameterError


@dataclass(frozen=True, slots=True)
class Refused:
    why: str
    neutral: tuple[Any, ...] = ()  # values that change nothing, besides null


@dataclass(frozen=True, slots=True)
class Renamed:
    here: str  # the route's own field; a value equal to the value of that field is neutral
    neutral: tuple[Any, ...] = ()

    @property
    def why(self) -> str:
        return f"is not a field of this route, send `{self.here}`"


@dataclass(frozen=True, slots=True)
class Tolerated:
    why: str


# Maximum number of unknown fields that are named, and of characters of each name.
MAX_NAMES, MAX_NAME_CHARS = 16, 64

Rule = Refused | Renamed | Tolerated


@dataclass(frozen=True, slots=True)
class Contract:
    """The rules for all fields of one kind of JSON object. `honoured`: the names of the fields in its schema."""

    honoured: frozenset[str]
    rules: Mapping[str, Rule]
    known: frozenset[str]

    @classmethod
    def of(cls, schema: type[BaseModel], *rules: Mapping[str, Rule]) -> "Contract":
        """The contract of a schema. `rules`: if several rules have a name, the last rule counts. Names of the schema
        need no rule."""
        honoured = frozenset(schema.model_fields)
        merged = {name: rule for part in rules for name, rule in part.items() if name not in honoured}
        return cls(honoured, merged, honoured | merged.keys())

    def refuse(self, value: Mapping[str, Any], where: str = "") -> None:
        """Raises UnsupportedParameterError for the first refused field, in the order of names. `where`: the path of the
        object in the body, such as `messages[3].`."""
        if value.keys() <= self.honoured:  # so it is for nearly every object
            return
        for name in sorted((value.keys() & self.known) - self.honoured):
            rule, given = self.rules[name], value[name]
            if isinstance(rule, Refused) and asks(given, rule.neutral):
                raise UnsupportedParameterError(where + name, rule.why)
            if isinstance(rule, Renamed) and asks(given, (*rule.neutral, value.get(rule.here))):
                raise UnsupportedParameterError(where + name, rule.why)

    def unknown(self, value: Mapping[str, Any], where: str = "") -> Iterator[str]:
        """Paths of the first unknown fields. The number of paths and their length are limited, because the client
        chooses the names."""
        return islice((where + name[:MAX_NAME_CHARS] for name in value if name not in self.known), MAX_NAMES)


def asks(given: Any, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: true is not 1.
    return given is not None and not any(type(given) is type(item) and given == item for item in neutral)


def unknown_parameter(path: str, known: frozenset[str]) -> UnknownParameterError:
    """The error for the unknown field at `path`; it names the field of `known` that resembles it most."""
    where, dot, name = path.rpartition(".")
    close = get_close_matches(name, sorted(known), n=1)
    return UnknownParameterError(path, where + dot + close[0] if close else "")
