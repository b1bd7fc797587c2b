"""Reads a request body: parses the JSON, checks its fields, refuses unsupported fields by name.

Does no input or output: it reads small bodies on the event loop and large bodies in a child process
(`reading_child.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import pydantic

from text_generation_router.api import known_fields
from text_generation_router.api.anthropic import fields as anthropic_fields
from text_generation_router.api.anthropic.schemas import (
    CountOptions,
    CountTokensRequest,
    MessagesOptions,
    MessagesRequest,
    RenderedCount,
    RenderedMessages,
)
from text_generation_router.api.cloud_schemas import VertexRequest
from text_generation_router.api.common.agent_lines import without_agent_lines
from text_generation_router.api.common.contract import Contract
from text_generation_router.api.common.fields import Body, ListLimits
from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest, CompletionRequest, RenderedChat
from text_generation_router.api.responses import fields as responses_fields
from text_generation_router.api.responses.schemas import RenderedResponses, ResponsesOptions, ResponsesRequest
from text_generation_router.api.surveys import (
    survey,
    survey_chat,
    survey_completion,
    survey_native,
    survey_prompt,
    survey_responses,
)
from text_generation_router.api.tgi.schemas import CompatGenerateRequest, DetokenizeRequest, GenerateRequest
from text_generation_router.errors import InvalidJsonError, TooManyPromptsError, UnprocessableError
from text_generation_router.text.json_depth import read_json

B = TypeVar("B", bound=Body)
A = TypeVar("A", bound=Body, covariant=True)


# Schemas of all bodies, whole and as a child has read them.
SCHEMAS: list[type[Body]] = []

# Refuses unsupported fields of a body, and returns the paths of its unknown fields.
Survey = Callable[[dict[str, Any], Contract], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Read(Generic[A]):
    asked: A
    unknown: tuple[str, ...]  # paths of the fields that have no effect, because no table knows them
    left_out: tuple[str, ...] = ()  # names of what the answer does not follow, though the request has it


ReadValue = Callable[[dict[str, Any], ListLimits], Read[A]]


@dataclass(frozen=True, slots=True)
class Question(Generic[A]):
    """One kind of body."""

    name: str
    read_value: ReadValue[A]  # turns the parsed JSON into checked values
    # Turns values that a child process sends back into checked values; they are small except for the prompt's text.
    restore: Callable[[Any], A]
    known: frozenset[str]  # names of its fields

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
    """The place of a value in the body without what pydantic tells schemas apart by: the `type` of each object on the
    way (an item of /v1/responses without one is a message), and the name of one of several types, such as `str`, behind
    the place of a value that is not an object. `is_missing`: the place ends with the name of a missing field."""
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


def _question(
    schema: type[B],
    name: str,
    look_through: Survey,
    contract: Contract,
    condensed: type[B] | None = None,
    known: frozenset[str] | None = None,
) -> Question[B]:
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
    return Question(name, read, partial(check, condensed or schema), known or contract.known)


_PARAMETERS = known_fields.PARAMETERS.known
GENERATE = _question(GenerateRequest, "generate", survey_native, known_fields.GENERATE, known=_PARAMETERS)
COMPAT_GENERATE = _question(
    CompatGenerateRequest, "compat_generate", survey_native, known_fields.COMPAT_GENERATE, known=_PARAMETERS
)
TOKENIZE = _question(GenerateRequest, "tokenize", survey, known_fields.TOKENIZE)  # `parameters` have no effect on it
DETOKENIZE = _question(DetokenizeRequest, "detokenize", survey, known_fields.DETOKENIZE)
COMPLETION = _question(CompletionRequest, "completion", survey_completion, known_fields.COMPLETION)
CHAT: Question[ChatOptions] = _question(ChatRequest, "chat", survey_chat, known_fields.CHAT, RenderedChat)
MESSAGES: Question[MessagesOptions] = _question(
    MessagesRequest, "messages", survey_prompt, anthropic_fields.MESSAGES, RenderedMessages
)
COUNT_TOKENS: Question[CountOptions] = _question(
    CountTokensRequest, "count_tokens", survey_prompt, anthropic_fields.COUNT_TOKENS, RenderedCount
)
RESPONSES: Question[ResponsesOptions] = _question(
    ResponsesRequest, "responses", survey_responses, responses_fields.RESPONSES, RenderedResponses
)

# The body's own field decides which question it answers.
INVOKED: dict[str, Question[Any]] = {"inputs": COMPAT_GENERATE, "messages": CHAT, "prompt": COMPLETION}
INSTANCES: dict[str, Question[Any]] = {"inputs": GENERATE, "messages": CHAT}


def answered(value: Any, questions: Mapping[str, Question[Any]], where: str = "") -> Question[Any]:
    """The first of `questions` whose field the value has. `where`: the value's place in the body."""
    for name, question in questions.items():
        if isinstance(value, dict) and name in value:
            return question
    raise UnprocessableError(where, f"Input should be an object with {' or '.join(f'`{name}`' for name in questions)}")


def _read_invocation(value: dict[str, Any], limits: ListLimits) -> Read[Body]:
    return answered(value, INVOKED).read_value(value, limits)


def instances_of(value: dict[str, Any], limits: ListLimits) -> list[tuple[Question[Any], dict[str, Any]]]:
    """The instances of a body for /vertex, each with its question."""
    instances = value.get("instances")
    if not isinstance(instances, list) or not instances:
        raise UnprocessableError("instances", "Input should be a list with at least one instance")
    if len(instances) > limits.prompts:
        raise TooManyPromptsError(limits.prompts)
    return [(answered(one, INSTANCES, f"instances[{number}]"), one) for number, one in enumerate(instances)]


def _read_vertex(value: dict[str, Any], limits: ListLimits) -> Read[VertexRequest]:
    reads = [question.read_value(one, limits) for question, one in instances_of(value, limits)]
    unknown = tuple(name for read in reads for name in read.unknown)
    left_out = tuple(name for read in reads for name in read.left_out)
    return Read(VertexRequest(instances=tuple(read.asked for read in reads)), unknown, left_out)


def _restore_vertex(value: Any) -> VertexRequest:
    return VertexRequest(instances=tuple(BY_NAME[one["kind"]].restore(one["asked"]) for one in value["instances"]))


def _restore_invocation(value: Any) -> Body:
    asked: Body = BY_NAME[value["kind"]].restore(value["asked"])
    return asked


BY_NAME = {question.name: question for question in (*INVOKED.values(), *INSTANCES.values())}
INVOCATION: Question[Body] = Question(
    "invocation",
    _read_invocation,
    _restore_invocation,
    known_fields.PARAMETERS.known | known_fields.COMPLETION.known | known_fields.CHAT.known,
)
VERTEX = Question("vertex", _read_vertex, _restore_vertex, known_fields.PARAMETERS.known | known_fields.CHAT.known)
