"""Reads a request body: parses the JSON, checks its fields, refuses unsupported fields by name.

Pure: it reads small bodies on the event loop and large bodies in a child process (`reading_child.py`).
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
from text_generation_router.errors import InvalidJsonError, SuffixError, UnprocessableError

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
    """Raises UnprocessableError naming the first wrong field; the error's text contains nothing of the value. Without
    `limits` lists may have any length."""
    try:
        return schema.model_validate(value, context=limits)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise UnprocessableError(path, first["msg"].removeprefix("Value error, ")) from error


def _generate(content: bytes, limits: ListLimits) -> GenerateRequest:
    value = parse(content)
    asked = check(GenerateRequest, value, limits)
    refuse_native(value)
    return asked


def _compat_generate(content: bytes, limits: ListLimits) -> CompatGenerateRequest:
    value = parse(content)
    asked = check(CompatGenerateRequest, value, limits)
    refuse_native(value)
    return asked


def _tokenize(content: bytes, limits: ListLimits) -> GenerateRequest:
    value = parse(content)
    asked = check(GenerateRequest, value, limits)
    refuse_tokenize(value)
    return asked


def _completion(content: bytes, limits: ListLimits) -> CompletionRequest:
    value = parse(content)
    asked = check(CompletionRequest, value, limits)
    if value.get("suffix") is not None:
        raise SuffixError
    refuse_completion(value)
    return asked


def _chat(content: bytes, limits: ListLimits) -> ChatRequest:
    value = parse(content)
    refuse_chat(value)
    return check(ChatRequest, value, limits)


GENERATE = Question("generate", _generate, GenerateRequest)
COMPAT_GENERATE = Question("compat_generate", _compat_generate, CompatGenerateRequest)
TOKENIZE = Question("tokenize", _tokenize, GenerateRequest)
COMPLETION = Question("completion", _completion, CompletionRequest)
CHAT: Question[ChatOptions] = Question("chat", _chat, RenderedChat)
