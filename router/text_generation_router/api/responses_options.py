"""What /v1/responses says of functions, reasoning and the form of the text, and the same in the fields of chats."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from text_generation_router.api.fields import Body
from text_generation_router.api.form_fields import LIMITED, Object
from text_generation_router.api.tools import Choice, FunctionName
from text_generation_router.errors import ValidationError

FORMATS = ("text", "json_object", "json_schema")


class TextConfig(Body):
    """The form of the text."""

    format: Annotated[
        Object | None,
        LIMITED,
        Field(
            description='`{"type": "text"}`, `{"type": "json_object"}`, or'
            ' `{"type": "json_schema", "name": …, "schema": …}`. Unless `strict` is true, keywords that no grammar can'
            " follow are left out of the schema, and named in `X-Ignored-Parameters`. Default of `strict`: false."
        ),
    ] = None

    def chat_values(self) -> dict[str, Any]:
        if self.format is None:
            return {}
        kind = self.format.get("type")
        if kind not in FORMATS:
            raise ValidationError(f"`text.format` must have a `type` of {', '.join(FORMATS)}", "text.format")
        if kind != "json_schema":
            return {"response_format": {"type": kind}}
        schema = {name: value for name, value in self.format.items() if name != "type"}
        return {"response_format": {"type": kind, "json_schema": schema}}


class ReasoningConfig(Body):
    """How the model reasons before its answer."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="The chat template's variable `reasoning_effort`."),
    ] = None


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    """The kind of tool."""
    name: FunctionName
    """1 to 128 letters, digits, underscores, dots and hyphens."""
    description: str | None = None
    """Tells the model what the function does."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object."""
    strict: Annotated[
        bool | None, Field(description="Whether arguments are forced to be valid by the schema. Default: false.")
    ] = None

    def chat_tool(self) -> dict[str, Any]:
        function = self.model_dump(exclude_none=True, exclude={"type"})
        return {"type": "function", "function": function}


def _are_functions(tools: Any) -> Any:
    """Raises ValidationError for a tool that OpenAI's own servers run, or that is not called with JSON."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValidationError(
                f'`tools[{number}].type` must be "function": `{kind[:64]}` is not supported', f"tools[{number}].type"
            )
    return tools


class AnswerOptions(Body):
    """The fields that say how the answer is made, besides sampling."""

    text: TextConfig | None = None
    """The form of the text."""
    reasoning: ReasoningConfig | None = None
    """How the model reasons before its answer."""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), BeforeValidator(_are_functions)] | None = None
    """Functions that the model may call and the client runs; at most 128."""
    tool_choice: Annotated[
        Choice | None,
        Field(
            description="`none`, `auto` (the model decides), `required` (at least one call), or one function, as"
            ' `{"type": "function", "name": string}`. Default: `auto`.'
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Whether the answer may have several calls. Default: true.")
    ] = None

    def chat_values(self) -> dict[str, Any]:
        """The same in the fields of chats. Raises ValidationError."""
        values: dict[str, Any] = {}
        if self.tools:
            values["tools"] = [tool.chat_tool() for tool in self.tools]
        if self.tool_choice is not None and (self.tools or self.tool_choice not in ("auto", "none")):
            values["tool_choice"] = self.tool_choice
        if self.parallel_tool_calls is not None:
            values["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text is not None:
            values |= self.text.chat_values()
        if self.reasoning is not None and self.reasoning.effort is not None:
            values["reasoning_effort"] = self.reasoning.effort
        return values

    def told(self) -> dict[str, Any]:
        """These fields as the answer repeats them."""
        reasoning = self.reasoning or ReasoningConfig()
        return {
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [tool.model_dump() for tool in self.tools or ()],
        }
