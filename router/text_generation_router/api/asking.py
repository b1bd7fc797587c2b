"""Reads a request body: parses the JSON, checks its fields, refuses unsupported fields by name.

Does no input or output: it reads small bodies on the event loop and large bodies in a child process
(`reading_child.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson
import pydantic

from text_generation_router.api.fields import Body, ListLimits
from text_generation_router.api.refusals import refuse_chat, refuse_completion, refuse_native, refuse_tokenize
from text_generation_router.api.schemas import (
    ChatOptions,
    ChatRequest,
    CompatGenerateRequest,
    CompletionRequest,
    GenerateRequest,
    RenderedChat,
)
from text_generation_router.errors import InvalidJsonError, UnprocessableError

B = TypeVar("B", bound=Body)
A = TypeVar("A", bound=Body, covariant=True)


@dataclass(frozen=True, slots=True)
class Question(Generic[A]):
    """One kind of body. `read` turns a whole body into checked values; `condensed` is the schema of the values that a
    child process sends back, which are small except for the prompt's text."""

    name: str
    read: Callable[[bytes, ListLimits], A]
    condensed: type[A]


def parse(content: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
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
        path = ".".join(map(str, first["loc"]))
        raise UnprocessableError(path, first["msg"].removeprefix("Value error, ")) from error


def _reader(schema: type[B], refuse: Callable[[dict[str, Any]], None]) -> Callable[[bytes, ListLimits], B]:
    """If a body has a field of a wrong type and an unsupported field, the error names the field of the wrong type."""

    def read(content: bytes, limits: ListLimits) -> B:
        value = parse(content)
        asked = check(schema, value, limits)
        refuse(value)
        return asked

    return read


def _chat(content: bytes, limits: ListLimits) -> ChatRequest:
    value = parse(content)
    refuse_chat(value)
    return check(ChatRequest, value, limits)


GENERATE = Question("generate", _reader(GenerateRequest, refuse_native), GenerateRequest)
COMPAT_GENERATE = Question("compat_generate", _reader(CompatGenerateRequest, refuse_native), CompatGenerateRequest)
TOKENIZE = Question("tokenize", _reader(GenerateRequest, refuse_tokenize), GenerateRequest)
COMPLETION = Question("completion", _reader(CompletionRequest, refuse_completion), CompletionRequest)
CHAT: Question[ChatOptions] = Question("chat", _chat, RenderedChat)
