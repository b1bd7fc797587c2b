"""The kinds of request bodies: each is parsed, its fields are checked, and unsupported fields are refused by name.

Does no input or output: it reads small bodies on the event loop and large bodies in a child process
(`api/reading_child.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import orjson
import pydantic

from text_generation_router import errors
from text_generation_router.api.common.agent_lines import without_agent_lines
from text_generation_router.api.common.contract import Contract
from text_generation_router.api.common.fields import Body, ListLimits
from text_generation_router.errors import InferenceError, InvalidJsonError, UnprocessableError
from text_generation_router.text.json_depth import read_json

B = TypeVar("B", bound=Body)
A = TypeVar("A", bound=Body, covariant=True)


# Schemas of all bodies, and of bodies as a child process has read them.
SCHEMAS: list[type[Body]] = []

# A function that refuses the unsupported fields of a body, and returns the paths of its unknown fields.
FieldCheck = Callable[[dict[str, Any], Contract], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Read(Generic[A]):
    asked: A
    unknown: tuple[str, ...]  # paths of the fields that have no effect, because no table knows them
    left_out: tuple[str, ...] = ()  # names of parts of the request that have no effect by the route's documentation


ReadValue = Callable[[dict[str, Any], ListLimits], Read[A]]


@dataclass(frozen=True, slots=True)
class RequestBody(Generic[A]):
    """One kind of body: how it is read, and the names of its fields."""

    name: str
    read_value: ReadValue[A]  # turns the parsed JSON into checked values
    # Turns the values that a child process sends back into checked values. Apart from the prompt's text, the values are
    # small.
    restore: Callable[[Any], A]
    known: frozenset[str]  # names of the body's fields

    def read(self, content: bytes, limits: ListLimits) -> Read[A]:
        return self.read_value(parse(content), limits)


def compile_schemas() -> None:
    for schema in SCHEMAS:
        schema.model_rebuild()


def parse(content: bytes) -> dict[str, Any]:
    try:
        value = read_json(content)
    except ValueError as error:
        raise InvalidJsonError(str(error)) from error
    if not isinstance(value, dict):
        raise UnprocessableError("", "Input should be an object")
    return value


def check(schema: type[B], value: dict[str, Any], limits: ListLimits | None = None) -> B:
    """Checks the fields. Raises UnprocessableError that names the first wrong field; the error's text does not contain
    the value. Without `limits` lists may have any length.
    """
    try:
        return schema.model_validate(value, context=limits)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = _path(_without_kinds(first["loc"], value, first["type"] == "missing"))
        raise UnprocessableError(path, first["msg"].removeprefix("Value error, ")) from error


def _without_kinds(place: tuple[int | str, ...], value: Any, is_missing: bool) -> tuple[int | str, ...]:
    """The place of a value in the body. pydantic's places also name the schema that was chosen, which is left out: the
    `type` of each object on the way (an item of /v1/responses without a type is a message), and one of several types,
    such as `str`, behind the place of a value that is not an object. `is_missing`: the place ends with the name of a
    missing field."""
    kept: list[int | str] = []
    for number, part in enumerate(place, 1):
        if isinstance(part, str) and not isinstance(value, dict):
            continue
        is_field = is_missing and number == len(place)
        if isinstance(value, dict) and part == (value.get("type") or "message") and part not in value and not is_field:
            continue
        kept.append(part)
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
    return tuple(kept)


def _path(place: tuple[int | str, ...]) -> str:
    """The place of a value in the body, such as `messages[3].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def body_kind(
    schema: type[B],
    name: str,
    look_through: FieldCheck,
    contract: Contract,
    condensed: type[B] | None = None,
    known: frozenset[str] | None = None,
) -> RequestBody[B]:
    """If a body has a field of a wrong type and an unsupported field, the error names the field of the wrong type, as
    in TGI; with `condensed`, the schema of what a child has read, the unsupported field: it may be the reason why
    another field's type is wrong.
    """

    def read(value: dict[str, Any], limits: ListLimits) -> Read[B]:
        if condensed is None:
            asked = check(schema, value, limits)
            return Read(asked, look_through(value, contract))
        unknown, left_out = look_through(value, contract), tuple[str, ...]()
        if not limits.keeps_agent_lines:
            value, left_out = without_agent_lines(value)
        return Read(check(schema, value, limits), unknown, left_out)

    SCHEMAS.extend((schema, condensed or schema))
    return RequestBody(name, read, partial(check, condensed or schema), known or contract.known)


def unknown_fields(value: dict[str, Any], contract: Contract, where: str = "") -> tuple[str, ...]:
    """Paths of the unknown fields. Raises UnsupportedParameterError for the first unsupported field."""
    contract.refuse(value, where)
    if value.keys() <= contract.known:
        return ()
    return tuple(contract.unknown(value, where))


def unknown_fields_of_kind(
    value: dict[str, Any], kind: Any, contracts: Mapping[str, Contract], where: str
) -> tuple[str, ...]:
    """Paths of the unknown fields of `value`, by the contract of its `kind`. Empty if `contracts` has no such kind: the
    schema refuses the object then."""
    contract = contracts.get(kind) if isinstance(kind, str) else None
    return () if contract is None else unknown_fields(value, contract, where)


def objects_of(values: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with its path."""
    for number, value in enumerate(values if isinstance(values, list) else ()):
        if isinstance(value, dict):
            yield f"{where}[{number}].", value


def object_of(value: Any) -> dict[str, Any]:
    """The value if it is an object, otherwise an empty object: the schema refuses a value of another type."""
    return value if isinstance(value, dict) else {}


# The exchange with the child process that reads large bodies. A job is one line of JSON with the limits, then the body.
# An answer is a JSON object that has the values under `asked`, and the unknown fields, or an error's class and text.
ERRORS: Mapping[str, type[InferenceError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, InferenceError)
}


def job_of(content: bytes | bytearray, limits: ListLimits) -> bytes:
    return b"\n".join((orjson.dumps(asdict(limits)), content))


def read_answer(kind: RequestBody[B], answer: bytes) -> Read[B]:
    """The values of the body. Raises the error that the child found."""
    value = orjson.loads(answer)
    if "asked" in value:
        return Read(kind.restore(value["asked"]), tuple(value["unknown"]), tuple(value["left_out"]))
    raise ERRORS[value["error"]].restored(value["text"], value["param"])
