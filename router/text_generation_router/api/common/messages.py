"""The conversation of a chat: its messages, whose content is converted to one text; and its tools, and whether the
answer may or must call them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo

from text_generation_router.api.common.fields import Body, kind_of
from text_generation_router.errors import GrammarError, ToolError, ValidationError
from text_generation_router.text.calls.typed_values import types_of
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.json_depth import TOO_DEEP, TooDeepError, read_json
from text_generation_router.text.templates.chat_template import Message


def flattened(content: Any) -> Any:
    """Joins the text chunks of an item of `input` to one string. Any other value stays as it is: the type check refuses
    it."""
    return "".join(_chunk_text(chunk, "input") for chunk in content) if isinstance(content, list) else content


def read_content(content: Any, info: ValidationInfo) -> str | list[dict[str, str]] | None:
    """The text of a message's content, or the list of its parts, each {"type": "text", "text": …}."""
    if content is None and info.data.get("role") == "user":  # other messages may be empty or have calls
        raise ValueError("Field required")
    if isinstance(content, list):
        return [{"type": "text", "text": _chunk_text(chunk, "messages")} for chunk in content]
    if content is not None and not isinstance(content, str):
        raise ValueError("Input should be a valid string")
    return content


def _chunk_text(chunk: Any, field: str) -> str:
    kind = str(chunk.get("type")) if isinstance(chunk, dict) else ""
    if kind in ("image_url", "input_image", "input_audio", "file", "input_file", "audio_url", "video_url"):
        raise ValidationError(f"`{kind}` in `{field}` is not supported yet", field)
    text = chunk.get(TEXTS_OF_CHUNKS.get(kind)) if isinstance(chunk, dict) else None
    if not isinstance(text, str):
        raise ValueError('Input should be a string or a list of {"type": "text", "text": string}')
    return text


# For each type of chunk, the field with its text. A refusal is a text that OpenAI's models write.
TEXTS_OF_CHUNKS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class MessageBody(Body):
    """One message. Its other fields, such as `name`, `tool_calls` or `reasoning_content`, go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    """The sender, such as `user` or `assistant`; the chat template defines the possible senders."""
    content: Annotated[
        str | list[dict[str, str]] | None,
        PlainValidator(read_content, json_schema_input_type=str | list[dict[str, Any]] | None),
        Field(validate_default=True),
    ] = None
    """The content of the message: a text, or a list of parts `{"type": "text", "text": …}`."""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the message, if it is an earlier answer."""
        calls = (self.model_extra or {}).get("tool_calls")
        return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []

    def message(self) -> Message:
        others = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if "tool_calls" in others:
            others["tool_calls"] = with_objects(others["tool_calls"])
        return Message(self.role, self.content, others)


def with_objects(tool_calls: Any) -> Any:
    """The calls with their arguments as JSON objects, as chat templates expect. OpenAI's clients send the arguments as
    JSON texts."""
    if not isinstance(tool_calls, list):
        return tool_calls
    return [_with_object(call) for call in tool_calls]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": read_json(arguments)}}
    except TooDeepError:
        raise ValidationError(f"the `arguments` of a call have {TOO_DEEP}", "arguments") from None
    except orjson.JSONDecodeError:
        return call  # a text that is not JSON goes to the template as it is


# The tools of a chat: the fields of a request about them, and which of them the answer may or must call.

MAX_TOOLS = 128
MAX_NAME = 128  # maximum number of characters of a function's name
FunctionName = Annotated[
    str,
    Field(
        pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}$",
        description="1 to 128 letters, digits, underscores, dots and hyphens.",
    ),
]


class FunctionBody(Body):
    """A function that the model may call. The client calls it, not the server."""

    name: FunctionName
    description: str | None = None
    """A description of the function, which the model reads."""
    parameters: Annotated[
        dict[str, Any] | None,
        Field(
            validation_alias=AliasChoices("parameters", "arguments"),
            description="The JSON schema of its arguments, an object. Default: it has none.",
        ),
    ] = None
    strict: Annotated[
        bool | None, Field(description="Whether arguments are forced to be valid by the schema. Default: false.")
    ] = None


class ToolBody(Body):
    model_config = ConfigDict(title="Tool")

    type: Annotated[Literal["function"], kind_of("tool")] = "function"
    function: FunctionBody
    """The function that the model may call."""

    def for_template(self) -> dict[str, Any]:
        """The tool in the form in which transformers passes tools to chat templates. Fields that the request leaves out
        are left out here, too."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class Mode(StrEnum):
    NONE = "none"  # the prompt has no tools
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # the answer is at least one call
    NAMED = "named"  # the answer is one call of a certain function


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Mode
    names: frozenset[str] | None = None  # the functions that may be called; None: all
    name: str = ""  # the function that must be called, if `mode` is NAMED


def read_choice(value: str | dict[str, Any]) -> ToolChoice:
    """The choice that `tool_choice` stands for, in one of OpenAI's or TGI's forms. ValueError for another form."""
    if isinstance(value, str):
        modes = {mode.value: mode for mode in (Mode.NONE, Mode.AUTO, Mode.REQUIRED)}
        # In TGI a string may be the name of a function.
        return ToolChoice(modes[value]) if value in modes else ToolChoice(Mode.NAMED, name=value)
    kind = value.get("type")
    if kind == "function" or (kind is None and "function" in value):
        return ToolChoice(Mode.NAMED, name=_function_name(value))
    if kind == "allowed_tools":
        return _allowed(value)
    raise ValueError('Input should be "none", "auto", "required" or {"type": "function", "function": {"name": string}}')


def _function_name(value: Any) -> str:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError('Input should have {"function": {"name": string}}')
    return name


def _allowed(value: dict[str, Any]) -> ToolChoice:
    allowed = value.get("allowed_tools", value)
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise ValueError('`allowed_tools` should have `mode`, "auto" or "required", and `tools`, a list')
    names = frozenset(_function_name(tool) for tool in tools)
    return ToolChoice(Mode(mode), names)


def _functions(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) > MAX_TOOLS:
        raise ValidationError.of("tools", f"must have at most {MAX_TOOLS} tools. Given: {len(value)}")
    for number, tool in enumerate(value):
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if isinstance(kind, str) and kind != "function":
            raise ValidationError.of(f"tools[{number}].type", f'must be "function": `{kind[:32]}` is not supported')
    return value


def _checked(value: str | dict[str, Any]) -> str | dict[str, Any]:
    read_choice(value)
    return value


def _check_arguments(function: FunctionBody) -> None:
    """Raises GrammarError if the JSON schema of the arguments allows no object, so that no call could have valid
    arguments."""
    schema = function.parameters or {}
    types = types_of(schema, schema)
    if types and "object" not in types:
        given = " or ".join(sorted(types))[:64]
        raise GrammarError("tools", f"the arguments of `{function.name}` must be of the type object, not {given}")


Tools = Annotated[list[ToolBody], Field(fail_fast=True), BeforeValidator(_functions)]
Choice = Annotated[str | dict[str, Any], AfterValidator(_checked)]


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools that an answer may call, at least one, and whether the answer must call a tool."""

    listed: tuple[ToolBody, ...]  # all tools of the request, which are in the prompt
    tools: tuple[ToolBody, ...]  # the tools that the answer may call
    is_required: bool
    is_parallel: bool  # whether the answer may have several calls

    @classmethod
    def of(cls, tools: Sequence[ToolBody], choice: ToolChoice, is_parallel: bool) -> Self | None:
        """None: the prompt has no tools. Raises ValidationError or ToolError for tools and a choice that do
        not go together."""
        given = tuple(tools)
        names = [tool.function.name for tool in given]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValidationError.of("tools", f"has two functions named `{repeated}`")
        if not given and choice.mode in (Mode.REQUIRED, Mode.NAMED):
            raise ValidationError.of("tool_choice", "is allowed only if `tools` has at least one tool")
        if not given or choice.mode is Mode.NONE:
            return None
        wanted = frozenset({choice.name}) if choice.mode is Mode.NAMED else choice.names
        if wanted is not None and (missing := sorted(wanted - set(names))):
            raise ToolError(f"Tool with name {missing[0][:64]} not found", "tool_choice")
        for tool in given:
            _check_arguments(tool.function)
        if wanted is not None and not wanted:  # OpenAI's `allowed_tools` with an empty list
            if choice.mode is Mode.REQUIRED:
                raise ValidationError.of("tool_choice", "must allow a tool if it requires a call")
            return None
        called = tuple(tool for tool in given if wanted is None or tool.function.name in wanted)
        is_required = choice.mode is not Mode.AUTO
        return cls(given, called, is_required, is_parallel and choice.mode is not Mode.NAMED)

    def is_own(self, ways: CallWays) -> bool:
        """Whether the model writes calls in its own form; otherwise a grammar makes a call."""
        return ways.are_own(self.is_required, bool(self.strict))

    @property
    def strict(self) -> frozenset[str]:
        """The names of the tools whose arguments a grammar forces to match their schemas."""
        return frozenset(tool.function.name for tool in self.tools if tool.function.strict)

    @property
    def schemas(self) -> dict[str, dict[str, Any] | None]:
        return {tool.function.name: tool.function.parameters for tool in self.tools}
