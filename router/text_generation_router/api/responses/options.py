"""What /v1/responses says of tools, reasoning and the form of the text, and the same in the fields of chats."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from text_generation_router.api.common.fields import Body
from text_generation_router.api.common.form_fields import LIMITED, Object
from text_generation_router.api.common.tools import Choice
from text_generation_router.api.responses.tools import KINDS, Tool, chat_name, known_tools
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

    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="The chat template's variable `verbosity`.")
    ] = None

    def chat_values(self) -> dict[str, Any]:
        values = {} if self.verbosity is None else {"chat_template_kwargs": {"verbosity": self.verbosity}}
        return values | self._form()

    def _form(self) -> dict[str, Any]:
        if self.format is None:
            return {}
        kind = self.format.get("type")
        if kind not in FORMATS:
            raise ValidationError.of("text.format", f"must have a `type` of {', '.join(FORMATS)}")
        if kind != "json_schema":
            return {"response_format": {"type": kind}}
        if not isinstance(self.format.get("schema"), dict):
            raise ValidationError("`text.format` must have a JSON schema as its `schema`", "text.format")
        schema = {name: value for name, value in self.format.items() if name != "type"}
        return {"response_format": {"type": kind, "json_schema": schema}}


class ReasoningConfig(Body):
    """How the model reasons before its answer."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="The chat template's variable `reasoning_effort`."),
    ] = None


def _choice(value: Any) -> Any:
    """Raises ValidationError for the choice of a tool that is left out."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in (*KINDS, "allowed_tools"):
        why = f"demands a tool of the type `{kind[:64]}`, which is not supported"
        raise ValidationError.of("tool_choice", why)
    return value | {"type": "function"} if kind == "custom" else value


def _chat_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    name, namespace = (choice.get("name"), choice.get("namespace")) if isinstance(choice, dict) else (None, None)
    if isinstance(choice, dict) and isinstance(name, str) and isinstance(namespace, str):
        return {"type": "function", "name": chat_name(name, namespace)}
    return choice


class AnswerOptions(Body):
    """The fields that say how the answer is made, besides sampling."""

    text: TextConfig | None = None
    """The form of the text."""
    reasoning: ReasoningConfig | None = None
    """How the model reasons before its answer."""
    tools: Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(known_tools)] | None = None
    """Tools that the model may call and the client runs; at most 128 functions. Tools of other types are left out."""
    tool_choice: Annotated[
        Annotated[Choice, BeforeValidator(_choice, json_schema_input_type=str | dict[str, Any])] | None,
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
            functions = [function for tool in self.tools for _, function in tool.chat_tools()]
            values["tools"] = [{"type": "function", "function": function} for function in functions]
        if self.tool_choice is not None and (self.tools or self.tool_choice not in ("auto", "none")):
            values["tool_choice"] = _chat_choice(self.tool_choice)
        if self.parallel_tool_calls is not None:
            values["parallel_tool_calls"] = self.parallel_tool_calls
        if self.text is not None:
            values |= self.text.chat_values()
        if self.reasoning is not None and self.reasoning.effort is not None:
            values["reasoning_effort"] = self.reasoning.effort
        return values

    def repeated(self) -> dict[str, Any]:
        """These fields as the answer repeats them."""
        reasoning = self.reasoning or ReasoningConfig()
        return {
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "text": {"format": {"type": "text"}} | (self.text or TextConfig()).model_dump(exclude_none=True),
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [tool.model_dump() for tool in self.tools or ()],
        }
