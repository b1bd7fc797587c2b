"""The kinds of tools of /v1/responses, as functions of chats, and the form of their calls in an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, Field, model_validator

from text_generation_router.api.common.fields import Body, kind_of
from text_generation_router.api.common.messages import MAX_NAME, FunctionName

# The only argument of the function that represents a custom tool in chats.
INPUT = "input"
CUSTOM_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


@dataclass(frozen=True, slots=True)
class CallName:
    """The fields of an output item that name the tool that it calls."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def chat_name(name: str, namespace: str | None) -> str:
    """The name that a function has in chats; `namespace` is put before it."""
    return name if namespace is None else f"{namespace}__{name}"


class FunctionTool(Body):
    """A function that the client runs."""

    type: Annotated[Literal["function"], kind_of("tool")]
    name: FunctionName
    description: str | None = None
    """A description of the function, which the model reads."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of the function's arguments, an object."""
    strict: Annotated[
        bool | None, Field(description="Whether arguments are forced to be valid by the schema. Default: false.")
    ] = None

    def chat_tools(self, namespace: str | None = None) -> Iterator[tuple[CallName, dict[str, Any]]]:
        function = self.model_dump(exclude_none=True, exclude={"type"})
        yield CallName(self.name, namespace), function | {"name": chat_name(self.name, namespace)}


class TextTool(Body):
    """A tool that takes any text. The model calls it as a function with one string, `input`."""

    type: Annotated[Literal["custom"], kind_of("tool")]
    name: FunctionName
    description: str | None = None
    """A description of the tool, which the model reads."""
    format: dict[str, Any] | None = None
    """The form of the text. A grammar is added to the description, and not enforced."""

    def chat_tools(self, namespace: str | None = None) -> Iterator[tuple[CallName, dict[str, Any]]]:
        grammar = (self.format or {}).get("definition")
        texts = [text for text in (self.description, grammar) if isinstance(text, str)]
        function: dict[str, Any] = {"name": chat_name(self.name, namespace), "parameters": CUSTOM_PARAMETERS}
        yield (
            CallName(self.name, namespace, is_custom=True),
            function | ({"description": "\n".join(texts)} if texts else {}),
        )


class NamespaceTool(Body):
    """Several tools. In chats their names begin with the name of the namespace and two underscores."""

    type: Annotated[Literal["namespace"], kind_of("tool")]
    name: FunctionName
    description: str | None = None
    """What the tools have in common."""
    tools: Annotated[
        list[Annotated[FunctionTool | TextTool, Field(discriminator="type")]],
        Field(fail_fast=True),
        BeforeValidator(lambda tools: known_tools(tools)),
    ]
    """Functions and custom tools."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for tool in self.tools:
            if (length := len(chat_name(tool.name, self.name))) > MAX_NAME:
                raise ValueError(
                    f"The names of the namespace and of `{tool.name[:32]}` must have at most {MAX_NAME} characters"
                    f" together, with two underscores between them. Given: {length}"
                )
        return self

    def chat_tools(self) -> Iterator[tuple[CallName, dict[str, Any]]]:
        for tool in self.tools:
            yield from tool.chat_tools(self.name)


Tool = Annotated[FunctionTool | TextTool | NamespaceTool, Field(discriminator="type")]
KINDS = ("function", "custom", "namespace")


def is_left_out(tool: Any) -> bool:
    """Whether a tool is of a kind that only OpenAI's own servers or clients know. Such a tool is not part of the
    prompt."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in KINDS


def known_tools(tools: Any) -> Any:
    return [tool for tool in tools if not is_left_out(tool)] if isinstance(tools, list) else tools


def input_of(arguments: str) -> str:
    """The text for a custom tool. Arguments that are not complete JSON are the text themselves."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def call_names(tools: Sequence[FunctionTool | TextTool | NamespaceTool]) -> dict[str, CallName]:
    """The tools whose calls have another form in the answer than calls of functions, by the tools' names in chats."""
    named = [(function["name"], name) for tool in tools for name, function in tool.chat_tools()]
    return {name: call for name, call in named if call != CallName(name)}
