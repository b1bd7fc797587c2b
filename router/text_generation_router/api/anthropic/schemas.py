"""The bodies that Anthropic's routes, /v1/messages and /v1/messages/count_tokens, accept. The docstrings of fields are
their descriptions in the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from text_generation_router.api.common.fields import (
    I32,
    MESSAGE_LIMIT,
    U32,
    AnsweredRequest,
    Body,
    ModelName,
    Strings,
    kind_of,
    stop_limit,
)
from text_generation_router.api.common.form_fields import LIMITED, Object
from text_generation_router.api.common.messages import FunctionName
from text_generation_router.api.openai.schemas import Rendered
from text_generation_router.api.tgi.schemas import CacheSalt, Priority, SamplingFields, Timeout
from text_generation_router.errors import ValidationError


# The fields of Anthropic's routes about tools, thinking and the form of the answer, and their conversion to fields of
# chats.
class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    """The kind of tool."""
    name: FunctionName
    description: str | None = None
    """A description of the tool, which the model reads."""
    input_schema: dict[str, Any]
    """The JSON schema of the tool's arguments, an object."""
    strict: Annotated[
        bool | None, Field(description="Whether arguments are forced to be valid by the schema. Default: false.")
    ] = None

    def chat_tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        others = {"description": self.description, "strict": self.strict}
        function |= {name: value for name, value in others.items() if value is not None}
        return {"type": "function", "function": function}


def _are_custom(tools: Any) -> Any:
    """Raises ValidationError for a tool that Anthropic's own servers run."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValidationError.of(f"tools[{number}].type", f'must be "custom": `{kind[:64]}` is not supported')
    return tools


class ToolChoiceBody(Body):
    """Whether the answer calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto`: the model decides; `any`: at least one call; `tool`: the named tool; `none`: no call."""
    name: str | None = None
    """The tool's name, with the type `tool`."""
    disable_parallel_tool_use: Annotated[
        bool | None, Field(description="Whether the answer has at most one call. Default: false.")
    ] = None

    def chat_choice(self) -> str | dict[str, Any]:
        if self.type == "tool":
            if self.name is None:
                raise ValidationError.of("tool_choice", "of the type `tool` must have a `name`")
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Body):
    """Whether the model reasons before its answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """`enabled` and `disabled` set the template's variable `enable_thinking`; otherwise the template decides."""
    budget_tokens: U32 | None = None
    """Maximum number of tokens of the reasoning, with the type `enabled`."""
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        Field(description="`omitted` leaves the thinking out of the answer. It is never summarized."),
    ] = None

    def chat_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self.type in ("enabled", "disabled"):
            values["chat_template_kwargs"] = {"enable_thinking": self.type == "enabled"}
        if self.type == "enabled" and self.budget_tokens is not None:
            values["max_thinking_tokens"] = self.budget_tokens
        if self.display == "omitted":
            values["include_reasoning"] = False
        return values


class OutputConfig(Body):
    """How much the model reasons, and the form of its answer."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="The chat template's variable `reasoning_effort`."),
    ] = None
    format: Annotated[
        Object | None,
        LIMITED,
        Field(description='The form of the text: `{"type": "json_schema", "schema": …}`, with a JSON schema.'),
    ] = None

    def chat_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": self.effort}
        if self.format is not None:
            if self.format.get("type") != "json_schema" or not isinstance(self.format.get("schema"), dict):
                why = 'must have the `type` "json_schema" and a JSON schema as its `schema`'
                raise ValidationError.of("output_config.format", why)
            schema = {"schema": self.format.get("schema"), "strict": True}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return values


class PromptOptions(Body):
    """The fields that make a prompt, without the conversation."""

    tools: Annotated[list[CustomTool], Field(fail_fast=True), BeforeValidator(_are_custom)] | None = None
    """Tools that the model may call and the client runs; at most 128."""
    tool_choice: ToolChoiceBody | None = None
    """Whether the answer calls tools. Default: the model decides."""
    thinking: ThinkingConfig | None = None
    """Whether the model reasons before its answer. Default: as its chat template says."""
    output_config: OutputConfig | None = None
    """How much the model reasons, and the form of its answer."""

    def chat_values(self) -> dict[str, Any]:
        """These fields as fields of chats. Raises ValidationError."""
        values: dict[str, Any] = {}
        if self.tools:
            values["tools"] = [tool.chat_tool() for tool in self.tools]
        if self.tool_choice is not None:
            values["tool_choice"] = self.tool_choice.chat_choice()
            values["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if not values.get("tools") and values.get("tool_choice") == "auto":
            del values["tool_choice"]
        for part in (self.thinking, self.output_config):
            if part is not None:
                values |= part.chat_values()
        return values


class TextBlock(Body):
    type: Annotated[Literal["text"], kind_of("block")]
    text: str
    """The text of this block."""


class ThinkingBlock(Body):
    type: Annotated[Literal["thinking"], kind_of("block")]
    thinking: str
    """The text of the model's reasoning in an earlier answer."""
    signature: str = ""
    """Ignored: this server does not sign reasoning."""


class RedactedThinkingBlock(Body):
    type: Annotated[Literal["redacted_thinking"], kind_of("block")]
    data: str
    """Ignored: only the server that has made the encrypted reasoning can read it."""


class ToolUseBlock(Body):
    type: Annotated[Literal["tool_use"], kind_of("block")]
    id: str
    """The id of this call, which the `tool_use_id` of the tool_result block repeats."""
    name: str
    """The tool's name."""
    input: dict[str, Any]
    """The arguments of the call."""


BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
# Other kinds of blocks in Anthropic's API. Each would change the prompt, so none is supported.
OTHER_BLOCKS = frozenset(
    (
        "image", "document", "search_result", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
        "tool_search_tool_result", "tool_reference", "container_upload", "browser_state", "compaction", "fallback",
        "mcp_tool_use", "mcp_tool_result", "advisor_tool_result", "tool_addition", "tool_removal",
        "mcp_tool_listing",
    )
)  # fmt: skip


def _of_kinds(*kinds: str) -> BeforeValidator:
    """A check that a block is of one of `kinds`. A block of a known kind that is not supported is refused by the name
    of its kind."""

    def check_kind(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in OTHER_BLOCKS:
            raise ValidationError(f"`{kind}` in `messages` is not supported yet", "messages")
        if kind not in kinds:
            raise ValueError(f"Input should be an object whose `type` is one of {', '.join(kinds)}")
        return block

    return BeforeValidator(check_kind)


def _as_blocks(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("Input should be a string or a list of blocks")
    return value


TextOnly = Annotated[TextBlock, _of_kinds("text")]
# A string is read as a list of one text block.
TextBlocks = Annotated[
    list[TextOnly],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Body):
    type: Annotated[Literal["tool_result"], kind_of("block")]
    tool_use_id: str
    """The `id` of the tool_use block that made the call."""
    content: TextBlocks = Field(default_factory=list)
    """The result: a text, or a list of blocks of text."""
    is_error: Annotated[
        bool | None, Field(description="Whether the call has failed. The model then reads `Error: ` before the result.")
    ] = None


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    _of_kinds(*BLOCKS),
]


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """The sender of the message."""
    content: Annotated[
        list[Block],
        Field(fail_fast=True),
        BeforeValidator(
            _as_blocks,
            json_schema_input_type=str
            | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock],
        ),
    ]
    """The content of the message: a text, or a list of blocks."""


class TurnsBody(Body):
    """The fields that make a prompt."""

    system: TextBlocks | None = None
    """Instructions to the model before the conversation: a text, or a list of blocks of text."""
    messages: Annotated[list[Turn], MESSAGE_LIMIT] = Field(min_length=1, fail_fast=True)
    """The conversation, oldest message first."""


class MessagesOptions(PromptOptions, SamplingFields, AnsweredRequest):
    """All fields of /v1/messages that do not make the prompt."""

    max_tokens: U32
    """Maximum number of new tokens."""
    stop_sequences: Annotated[Strings, stop_limit("stop_sequences")] | None = None
    """The text ends before the first of these strings."""
    top_k: Annotated[I32 | None, Field(description="0 and -1 mean all tokens, as does a missing value.")] = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None


class MessagesRequest(TurnsBody, MessagesOptions):
    pass


class RenderedMessages(MessagesOptions, Rendered):
    """A request whose conversation the template has already turned into a prompt."""


class CountOptions(PromptOptions):
    model: ModelName = None


class CountTokensRequest(TurnsBody, CountOptions):
    pass


class RenderedCount(CountOptions, Rendered):
    """A CountTokensRequest whose conversation the template has already turned into a prompt."""
