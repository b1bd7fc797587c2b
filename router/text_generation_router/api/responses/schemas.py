"""The body that OpenAI's newer route, /v1/responses, accepts. The docstrings of fields are their descriptions in the
OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from text_generation_router.api.common.fields import I32, U32, AnsweredRequest, Body, item_limit, kind_of
from text_generation_router.api.common.form_fields import LIMITED, Object
from text_generation_router.api.common.known_fields import NOT_STORED
from text_generation_router.api.common.messages import Choice, flattened
from text_generation_router.api.openai.schemas import Rendered, StreamOptions
from text_generation_router.api.responses.tools import KINDS, Tool, chat_name, known_tools
from text_generation_router.api.tgi.schemas import CacheSalt, Priority, SamplingFields, Timeout
from text_generation_router.errors import ValidationError

# The fields of /v1/responses about tools, reasoning and the form of the text, and their conversion to fields of chats.

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
    """Returns the value. Raises ValidationError if it chooses a tool that is left out."""
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
        """These fields as fields of chats. Raises ValidationError."""
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
        """These fields in the form in which the answer repeats them."""
        reasoning = self.reasoning or ReasoningConfig()
        return {
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "text": {"format": {"type": "text"}} | (self.text or TextConfig()).model_dump(exclude_none=True),
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [tool.model_dump() for tool in self.tools or ()],
        }


LOGPROBS = "message.output_text.logprobs"
Content = Annotated[str, BeforeValidator(flattened, json_schema_input_type=str | list[dict[str, Any]])]


class InputMessage(Body):
    """A message of the conversation."""

    type: Annotated[Literal["message"], kind_of("item")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    """The sender; `developer` is the same as `system`."""
    content: Content
    """The text, or a list of parts such as `{"type": "input_text", "text": …}`."""


class FunctionCallItem(Body):
    """A function call of an earlier answer, as the item of that answer."""

    type: Annotated[Literal["function_call"], kind_of("item")]
    call_id: str
    """The name by which the result refers to this call."""
    name: str
    """The function's name."""
    namespace: str | None = None
    """The namespace of the function, if it is in one."""
    arguments: str
    """The arguments of the call, as JSON."""


class CustomCallItem(Body):
    """A custom tool's call of an earlier answer, as the item of that answer."""

    type: Annotated[Literal["custom_tool_call"], kind_of("item")]
    call_id: str
    """The name by which the result refers to this call."""
    name: str
    """The tool's name."""
    namespace: str | None = None
    """The namespace of the tool, if it is in one."""
    input: str
    """The text that the tool gets."""


class WebSearchItem(Body):
    """A web search that another server has made. It is not part of the prompt."""

    type: Annotated[Literal["web_search_call"], kind_of("item")]


class FunctionResultItem(Body):
    """The result of a function or of a custom tool."""

    type: Annotated[Literal["function_call_output", "custom_tool_call_output"], kind_of("item")]
    call_id: str
    """The `call_id` of the call that returned this result."""
    output: Content
    """The result: a text, or a list of parts."""


class ReasoningPart(Body):
    type: Annotated[Literal["reasoning_text", "summary_text"], kind_of("part")]
    text: str
    """The text of this part of the reasoning."""


class ReasoningItem(Body):
    """Reasoning that the model wrote in an earlier answer, as the item of that answer."""

    type: Annotated[Literal["reasoning"], kind_of("item")]
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] = Field(default_factory=list)
    """A summary of the reasoning, which is used only if the item has no `content`."""
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    """The text of the reasoning, in parts."""


PromptItem = InputMessage | FunctionCallItem | CustomCallItem | FunctionResultItem | ReasoningItem
Item = PromptItem | WebSearchItem
ITEMS = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
    "web_search_call",
)  # fmt: skip
# Other types of items in OpenAI's API. Each would change the prompt, so none is supported.
OTHER_ITEMS = frozenset(
    (
        "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "compaction_trigger", "computer_call", "computer_call_output", "configuration_update", "file_search_call",
        "image_generation_call", "item_reference", "local_shell_call",
        "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
        "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
    )
)  # fmt: skip


def _with_kind(item: Any) -> Any:
    """The item with its `type`, which a message need not have. Raises ValidationError for a known kind of item that is
    not supported."""
    if isinstance(item, dict) and item.get("type") is None and "role" in item:
        return item | {"type": "message"}
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "item_reference":
        raise ValidationError(f"`item_reference` in `input` {NOT_STORED} `input`", "input")
    if isinstance(kind, str) and kind in OTHER_ITEMS:
        raise ValidationError(f"`{kind}` in `input` is not supported yet", "input")
    if kind not in ITEMS:
        raise ValueError(f"Input should be an object whose `type` is one of {', '.join(ITEMS)}")
    return item


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("Input should be a string or a list of items")
    return value


class ResponsesOptions(AnswerOptions, SamplingFields, AnsweredRequest):
    """All fields except the conversation."""

    instructions: str | None = None
    """Instructions to the model before the conversation. The answer repeats them."""
    max_output_tokens: Annotated[U32 | None, Field(description="Most new tokens. Default: as many as fit.")] = None
    include: Annotated[
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None,
        Field(
            description=f"`{LOGPROBS}` adds the log-probability of each token of the text. The others add nothing here:"
            " reasoning is part of the answer as it is."
        ),
    ] = None
    top_logprobs: Annotated[
        U32 | None,
        Field(description="With log-probabilities: those of this many most likely tokens as well; at most 20."),
    ] = None
    metadata: Annotated[
        dict[str, str] | None, Field(max_length=16, description="Repeated in the answer; at most 16 pairs.")
    ] = None
    stream_options: StreamOptions | None = None
    """Has no effect: a stream always ends with the usage."""
    top_k: Annotated[I32 | None, Field(description="0 and -1 mean all tokens, as does a missing value.")] = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None


class ResponsesRequest(ResponsesOptions):
    input: Annotated[
        list[
            Annotated[
                Annotated[Item, Field(discriminator="type")], BeforeValidator(_with_kind, json_schema_input_type=Item)
            ]
        ],
        Field(min_length=1, fail_fast=True),
        item_limit("input"),
        BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    ]
    """A text, or the items of the conversation, oldest first."""


class RenderedResponses(ResponsesOptions, Rendered):
    """A request whose conversation the template has already turned into a prompt."""
