"""Turns the arguments of a client's method into the body that is sent."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import pydantic

from text_generation.errors import ValidationError
from text_generation.parse import explain
from text_generation.types import ChatRequest, CompletionRequest, Message, Parameters, Request, Tool

M = TypeVar("M", bound=pydantic.BaseModel)

# The name of the model in OpenAI's routes: TGI would take any other name for an adapter's.
MODEL = "tgi"

Messages = Sequence[Message] | Sequence[Mapping[str, Any]]
Tools = Sequence[Tool] | Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """The parameters of `chat` by keyword, for the overloads that tell a stream from an answer."""

    repetition_penalty: float | None
    frequency_penalty: float | None
    logit_bias: list[float] | None
    logprobs: bool | None
    top_logprobs: int | None
    max_tokens: int | None
    n: int | None
    presence_penalty: float | None
    seed: int | None
    temperature: float | None
    top_p: float | None
    tools: Tools | None
    tool_prompt: str | None
    tool_choice: str | None
    stop: list[str] | None


class CompletionOptions(TypedDict, total=False):
    """The parameters of `completion` by keyword, for the overloads that tell a stream from an answer."""

    frequency_penalty: float | None
    max_tokens: int | None
    repetition_penalty: float | None
    seed: int | None
    temperature: float | None
    top_p: float | None
    stop: list[str] | None


def generate_request(prompt: str, stop_sequences: list[str] | None, stream: bool, **fields: Any) -> Request:
    """The body of `generate`. `fields` are fields of `Parameters`. ValidationError if a value is wrong."""
    parameters = _checked(Parameters, stop=stop_sequences or [], details=True, **fields)
    return _checked(Request, inputs=prompt, parameters=parameters, stream=stream)


def chat_request(messages: Messages, **fields: Any) -> ChatRequest:
    """The body of `chat`. ValidationError if a value is wrong."""
    return _checked(ChatRequest, model=MODEL, messages=messages, **fields)


def completion_request(prompt: str, **fields: Any) -> CompletionRequest:
    """The body of `completion`. ValidationError if a value is wrong."""
    return _checked(CompletionRequest, model=MODEL, prompt=prompt, **fields)


def to_json(request: pydantic.BaseModel) -> bytes:
    """The JSON of a body. Parameters that are None are left out, so that the server's defaults apply."""
    return request.model_dump_json(exclude_none=True).encode()


def _checked(kind: type[M], /, **fields: Any) -> M:
    """A checked value. Raises our ValidationError for a wrong type too, so that callers need to catch one class
    only.
    """
    try:
        return kind(**fields)
    except pydantic.ValidationError as error:
        raise ValidationError(explain(error)) from error
