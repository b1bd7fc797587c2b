"""Turns the arguments of a client's method into the body that is sent."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from text_generation.errors import ValidationError
from text_generation.parse import explain
from text_generation.types import ChatRequest, CompletionRequest, Message, Parameters, Request, Tool

M = TypeVar("M", bound=pydantic.BaseModel)

# The name of the model in OpenAI's routes: TGI would take any other name for an adapter's.
MODEL = "tgi"

Messages = Sequence[Message] | Sequence[Mapping[str, Any]]
Tools = Sequence[Tool] | Sequence[Mapping[str, Any]]
Arguments = Mapping[str, Any]


def arguments_of(scope: Arguments) -> dict[str, Any]:
    """The arguments of a method by name. `scope`: its `locals()` before the method assigns anything."""
    return {name: value for name, value in scope.items() if name != "self"}


def generate_request(arguments: Arguments, *, stream: bool) -> Request:
    """The body of `generate`. `arguments`: `prompt`, `stop_sequences`, and fields of `Parameters`. ValidationError if a
    value is wrong.
    """
    fields = {name: value for name, value in arguments.items() if name not in ("prompt", "stop_sequences")}
    parameters = _checked(Parameters, {"stop": arguments["stop_sequences"] or [], "details": True} | fields)
    return _checked(Request, {"inputs": arguments["prompt"], "parameters": parameters, "stream": stream})


def chat_request(arguments: Arguments) -> ChatRequest:
    """The body of `chat`, whose arguments have the names of the fields. ValidationError if a value is wrong."""
    return _openai(ChatRequest, arguments)


def completion_request(arguments: Arguments) -> CompletionRequest:
    """The body of `completion`, whose arguments have the names of the fields. ValidationError if a value is wrong."""
    return _openai(CompletionRequest, arguments)


def to_json(request: pydantic.BaseModel) -> bytes:
    """The JSON of a body. Parameters that are None are left out, so that the server's defaults apply."""
    body = request.model_dump(mode="json", exclude_none=True)
    body |= body.pop("extra_body", {})
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _openai(kind: type[M], arguments: Arguments) -> M:
    extra = arguments["extra_body"] or {}
    if doubled := sorted(set(extra) & set(arguments)):
        raise ValidationError(f"`extra_body` must not contain `{doubled[0]}`, which is a parameter of its own")
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"`extra_body` cannot be written as JSON: {error}") from None
    return _checked(kind, {"model": MODEL, **arguments})


def _checked(kind: type[M], fields: Arguments) -> M:
    """A checked value. Raises our ValidationError for a wrong type too, so that callers need to catch one class
    only.
    """
    try:
        return kind(**fields)
    except pydantic.ValidationError as error:
        raise ValidationError(explain(error)) from None
    except ValidationError as error:
        raise error.with_traceback(None) from None  # without the frames of pydantic
