"""The types of request fields: TGI's integer widths, 32-bit floats, strictly typed JSON, lists of bounded length.

A list fails at its first bad item: pydantic would otherwise make an error object for each bad item. If the validation
context is a `ListLimits`, a list's length is checked before its items.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from text_generation_router.errors import InferenceError, TooManyPromptsError, ValidationError
from text_generation_router.text.tokens.token_choice import MAX_LISTED, too_many_listed
from text_generation_router.text.validation import too_many_stops

MAX_DIGITS = 10  # digits of the largest number of 32 bits


@dataclass(frozen=True, slots=True)
class ListLimits:
    """Largest allowed number of items in each list of a request, and how its system prompts are read."""

    messages: int
    prompts: int
    stops: int
    keeps_agent_lines: bool = False  # whether lines stay in system prompts that agents write anew for every request


class Body(BaseModel):
    """Base of request bodies. Numbers are JSON numbers (a boolean is not a number, 1.0 is not an integer); unknown
    fields are ignored. A text below a field is its description in the OpenAPI document (`openapi/document.py`). Only
    the classes of whole bodies are compiled (`compile_schemas`), and with them the classes of their fields.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


def to_f32(value: float) -> float:
    """The value as the nearest float32: 0.99999999 becomes 1.0, as in the shards."""
    try:
        (narrow,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError as error:
        raise ValueError("Input should fit a 32-bit float") from error
    return float(narrow)


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _at_most(limit: Callable[[ListLimits], int], refusal: Callable[[int, int], InferenceError]) -> BeforeValidator:
    """A check of a list that raises `refusal(limit, length)` if the list is longer than its limit."""

    def check_length(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list) and isinstance(info.context, ListLimits):
            most = limit(info.context)
            if len(value) > most:
                raise refusal(most, len(value))
        return value

    return BeforeValidator(check_length)


def stop_limit(name: str) -> BeforeValidator:
    """A check of the number of stop strings. `name`: the route's name of the field."""
    return _at_most(
        lambda limits: limits.stops,
        lambda most, given: ValidationError.of(name, too_many_stops(most, given)),
    )


def item_limit(name: str, items: str = "items") -> BeforeValidator:
    """A check of the length of a conversation. `name`: the route's name of the field. `items`: the word for its
    elements."""
    return _at_most(
        lambda limits: limits.messages,
        lambda most, given: ValidationError.of(
            name, f"must have at most {most} {items}, because each takes at least one token. Given: {given}"
        ),
    )


PromptInput = str | tuple[int, ...]


def kind_of(what: str) -> Any:
    """The description of a field that names the kind of an object, such as `type`."""
    return Field(description=f"The kind of {what}.")


def listed(name: str) -> BeforeValidator:
    """A check that the field `name`, a list or an object, is not longer than a request's lists of tokens may be."""

    def check_length(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > MAX_LISTED:
            raise ValidationError.of(name, too_many_listed(len(value)))
        return value

    return BeforeValidator(check_length)


def _are_token_ids(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        # Each id has only one allowed spelling, so that no two keys mean the same token.
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS and str(int(key)) == key):
            raise ValueError("Keys should be token ids, written as decimal numbers")
    return value


def read_prompts(value: Any, info: ValidationInfo) -> tuple[PromptInput, ...]:
    """A text, a list of token ids, or a list of texts or of such lists. Raises TooManyPromptsError for a list that is
    too long."""
    items = [value] if isinstance(value, str) or _is_ids(value) else value
    if items == []:
        raise ValueError("Empty array detected. Do not use an empty array for the prompt.")
    if not isinstance(items, list):
        raise ValueError("Input should be a string, a list of token ids, or a list of either")
    if isinstance(info.context, ListLimits) and len(items) > info.context.prompts:
        raise TooManyPromptsError(info.context.prompts)
    for number, item in enumerate(items):
        if not isinstance(item, str) and not _is_ids(item):
            raise ValueError(f"Item {number} should be a string or a list of token ids")
    return tuple(item if isinstance(item, str) else tuple(item) for item in items)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def _read_ids(value: Any) -> list[int]:
    if value != [] and not _is_ids(value):
        raise ValueError("Input should be a list of token ids")
    return list(value)


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMAS = [{"type": "string"}, _IDS_SCHEMA]
Prompts = Annotated[
    tuple[PromptInput, ...],
    PlainValidator(read_prompts),
    WithJsonSchema(
        {"anyOf": [*_PROMPT_SCHEMAS, {"type": "array", "items": {"anyOf": _PROMPT_SCHEMAS}, "minItems": 1}]}
    ),
]
TokenIds = Annotated[
    list[int], PlainValidator(_read_ids), WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
]
F32 = Annotated[float, Field(allow_inf_nan=False), AfterValidator(to_f32)]
I32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
U32 = Annotated[int, Field(ge=0, lt=2**32)]
U64 = Annotated[int, Field(ge=0, lt=2**64)]
Ids = Annotated[list[U32], Field(fail_fast=True)]
# In TGI's schema this field is a list, so a list is allowed here if it is empty.
LogitBias = Annotated[
    dict[str, F32],
    BeforeValidator(lambda value: {} if value == [] else value),
    listed("logit_bias"),
    AfterValidator(_are_token_ids),
]
# OpenAI's seeds may be negative: they count from 2**64 downwards.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), AfterValidator(lambda seed: seed % 2**64)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Texts = Annotated[Strings, BeforeValidator(one_or_many, json_schema_input_type=str | list[str])]
STOP_LIMIT = stop_limit("stop")
MESSAGE_LIMIT = item_limit("messages", "messages")
ModelName = Annotated[
    str | None,
    Field(
        max_length=512,
        description="The name of a LoRA adapter of the server; any other name means its model. A name that the server"
        " does not have is served all the same and named in `X-Ignored-Parameters`; with `--strict-parameters`, and"
        " on a server with adapters, it is refused.",
    ),
]


class AnsweredRequest(Body):
    """The fields of every request that is answered at once or as a stream."""

    model: ModelName = None
    stream: bool | None = None
    """Whether the answer is a stream."""
