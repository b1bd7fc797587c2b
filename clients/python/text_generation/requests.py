"""From the arguments of a client's method to the body it sends. The methods' names, order and defaults are TGI's."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar

import pydantic

from text_generation.errors import ValidationError
from text_generation.parse import explain
from text_generation.types import ChatRequest, CompletionRequest, Grammar, Message, Parameters, Request, Tool

F = TypeVar("F", bound=Callable[..., object])
S = TypeVar("S")
Q = TypeVar("Q")
R = TypeVar("R")
M = TypeVar("M", bound=pydantic.BaseModel)
P = ParamSpec("P")

# Any other name would ask a TGI for an adapter.
MODEL = "tgi"

Messages = Sequence[Message] | Sequence[Mapping[str, Any]]
Tools = Sequence[Tool] | Sequence[Mapping[str, Any]]


def shows(build: Callable[..., object]) -> Callable[[F], F]:
    """Lets `help()` print the parameters of `build`, to which a method hands on all of its own."""

    def decorate(method: F) -> F:
        owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        returns = inspect.signature(method).return_annotation
        parameters = [owner, *inspect.signature(build).parameters.values()]
        method.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        return method

    return decorate


def takes(build: Callable[P, Q]) -> Callable[[Callable[[S, Q], R]], Callable[Concatenate[S, P], R]]:
    """Lets a method that handles a request be called with the arguments of `build`, which makes that request.

    So the long parameter lists exist once, for both clients.
    """

    def decorate(method: Callable[[S, Q], R]) -> Callable[Concatenate[S, P], R]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, build(*args, **kwargs))

        functools.update_wrapper(call, method)
        return shows(build)(call)

    return decorate


def generate_request(
    prompt: str,
    do_sample: bool = False,
    max_new_tokens: int = 20,
    best_of: int | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    return_full_text: bool = False,
    seed: int | None = None,
    stop_sequences: list[str] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    truncate: int | None = None,
    typical_p: float | None = None,
    watermark: bool = False,
    decoder_input_details: bool = False,
    top_n_tokens: int | None = None,
    grammar: Grammar | None = None,
) -> Request:
    return _generation(stream=False, **locals())


def stream_request(
    prompt: str,
    do_sample: bool = False,
    max_new_tokens: int = 20,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    return_full_text: bool = False,
    seed: int | None = None,
    stop_sequences: list[str] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    truncate: int | None = None,
    typical_p: float | None = None,
    watermark: bool = False,
    top_n_tokens: int | None = None,
    grammar: Grammar | None = None,
) -> Request:
    return _generation(stream=True, **locals())


def chat_request(
    messages: Messages,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: list[float] | None = None,
    logprobs: bool | None = None,
    top_logprobs: int | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    presence_penalty: float | None = None,
    stream: bool = False,
    seed: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    tools: Tools | None = None,
    tool_prompt: str | None = None,
    tool_choice: str | None = None,
    stop: list[str] | None = None,
) -> ChatRequest:
    return _checked(ChatRequest, model=MODEL, **locals())


def completion_request(
    prompt: str,
    frequency_penalty: float | None = None,
    max_tokens: int | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stream: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    stop: list[str] | None = None,
) -> CompletionRequest:
    return _checked(CompletionRequest, model=MODEL, **locals())


class ChatOptions(TypedDict, total=False):
    """`chat_request` by keyword, for the overloads that tell a stream from an answer."""

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
    """`completion_request` by keyword, likewise."""

    frequency_penalty: float | None
    max_tokens: int | None
    repetition_penalty: float | None
    seed: int | None
    temperature: float | None
    top_p: float | None
    stop: list[str] | None


def to_json(request: pydantic.BaseModel) -> bytes:
    """The body. What was not given (None) is left out, so the server's defaults hold."""
    return request.model_dump_json(exclude_none=True).encode()


def _generation(prompt: str, stop_sequences: list[str] | None, stream: bool, **fields: Any) -> Request:
    parameters = _checked(Parameters, stop=stop_sequences or [], details=True, **fields)
    return _checked(Request, inputs=prompt, parameters=parameters, stream=stream)


def _checked(kind: type[M], /, **fields: Any) -> M:
    """Raises our ValidationError for a wrong type too, so that callers need no second kind of error."""
    try:
        return kind(**fields)
    except pydantic.ValidationError as error:
        raise ValidationError(explain(error)) from error
