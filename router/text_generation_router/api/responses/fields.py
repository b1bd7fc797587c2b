"""The fields of /v1/responses, and the kind of its body."""

from typing import Any

from text_generation_router.api.common.body_kinds import (
    RequestBody,
    body_kind,
    object_of,
    objects_of,
    unknown_fields,
    unknown_fields_of_kind,
)
from text_generation_router.api.common.contract import MAX_NAME_CHARS, MAX_NAMES, Contract, Refused, Renamed, Tolerated
from text_generation_router.api.common.known_fields import COMMON, OTHER_FORMS, Rules
from text_generation_router.api.openai.fields import unknown_stream_options
from text_generation_router.api.responses.options import ReasoningConfig, TextConfig
from text_generation_router.api.responses.schemas import (
    NOT_STORED,
    CustomCallItem,
    FunctionCallItem,
    FunctionResultItem,
    InputMessage,
    ReasoningItem,
    RenderedResponses,
    ResponsesOptions,
    ResponsesRequest,
    WebSearchItem,
)
from text_generation_router.api.responses.tools import FunctionTool, NamespaceTool, TextTool, is_left_out

RESPONSES_RULES: Rules = (
    COMMON
    | OTHER_FORMS
    | {
        "previous_response_id": Refused(NOT_STORED),
        "conversation": Refused(NOT_STORED),
        "store": Refused("is not supported: answers are not stored, leave the field out", (False,)),
        "background": Refused("is not supported: keep the connection, or send `stream`", (False,)),
        "background_options": Tolerated("has no effect without `background`"),
        "prompt": Refused("is not supported: there are no stored prompts, send `input` and `instructions`"),
        "context_management": Refused("is not supported: every item is part of the prompt", ([],)),
        "truncation": Refused("is not supported: a conversation that is too long is refused", ("disabled",)),
        "client_metadata": Tolerated("the client's own notes"),
        "access_programs": Tolerated("there are no such programs here"),
        "image": Tolerated("there are no images here"),
        "max_tokens": Renamed("max_output_tokens"),
        "max_completion_tokens": Renamed("max_output_tokens"),
        "max_new_tokens": Renamed("max_output_tokens"),
        "messages": Refused("is a field of /v1/chat/completions, send `input`"),
        "response_format": Refused("is not a field of this route, send `text`", ({"type": "text"},)),
        "reasoning_effort": Refused("is not a field of this route, send `reasoning`", ("none",)),
        "verbosity": Refused("is not a field of this route, send `text`", ("medium",)),
        "logprobs": Refused("is not a field of this route, send `include`", (False,)),
        "stop": Refused("is not supported on this route, send the request to /v1/chat/completions", ([],)),
    }
)
RESPONSES = Contract.of(ResponsesRequest, RESPONSES_RULES)
TEXT = Contract.of(TextConfig)
SUMMARY = Tolerated("the reasoning itself is part of the answer")
REASONING = Contract.of(
    ReasoningConfig,
    {
        "summary": SUMMARY,
        "generate_summary": SUMMARY,
        "context": Tolerated("the chat template says which reasoning is part of the prompt"),
        "mode": Refused(neutral=("standard",)),
    },
)
_OF_TOOLS: Rules = {
    "allowed_callers": Refused("is not supported: the model alone calls functions", (["direct"],)),
    "async": Refused("is not supported: a result is part of the next request", (False,)),
    "defer_loading": Refused("is not supported: the model is told of every function", (False,)),
    "output_schema": Tolerated("the client alone reads what a function returns"),
}
TOOLS = {
    "function": Contract.of(FunctionTool, _OF_TOOLS),
    "custom": Contract.of(TextTool, _OF_TOOLS),
    "namespace": Contract.of(NamespaceTool, _OF_TOOLS),
}
_OF_ITEMS: Rules = {
    "id": Tolerated("items are not stored"),
    "status": Tolerated("an item stands as it is"),
    "phase": Tolerated("the chat template knows no phases"),
    "caller": Tolerated("every function is called directly"),
    "async": Tolerated("a result is part of the prompt when it is sent"),
}
CALLED = Tolerated("the call has the function's name")
IN_OTHER_SEARCHES: Rules = {"action": Tolerated("another server has searched")}
ITEMS = {
    "web_search_call": Contract.of(WebSearchItem, _OF_ITEMS, IN_OTHER_SEARCHES),
    "message": Contract.of(InputMessage, _OF_ITEMS),
    "function_call": Contract.of(FunctionCallItem, _OF_ITEMS),
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output"),
        Contract.of(FunctionResultItem, _OF_ITEMS, {"name": CALLED, "namespace": CALLED}),
    ),
    "custom_tool_call": Contract.of(CustomCallItem, _OF_ITEMS),
    "reasoning": Contract.of(
        ReasoningItem, _OF_ITEMS, {"encrypted_content": Tolerated("only the server that has made it can read it")}
    ),
}


def _unknown_in_response(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    unknown = [*unknown_fields(value, contract), *unknown_stream_options(value)]
    unknown += unknown_fields(object_of(value.get("text")), TEXT, "text.")
    unknown += unknown_fields(object_of(value.get("reasoning")), REASONING, "reasoning.")
    unknown += _responses_tools(value.get("tools"), "tools")
    for where, item in objects_of(value.get("input"), "input"):
        kind = item.get("type", "message")
        unknown += [where + kind] if kind == "web_search_call" else ()
        unknown += unknown_fields_of_kind(item, kind, ITEMS, where)
    return tuple(unknown[:MAX_NAMES])


def _responses_tools(tools: Any, place: str) -> list[str]:
    """The unknown fields of tools, and the tools that are left out."""
    unknown: list[str] = []
    for where, tool in objects_of(tools, place):
        if is_left_out(tool):
            unknown.append(where + tool["type"][:MAX_NAME_CHARS])
        elif isinstance(kind := tool.get("type"), str):
            unknown += unknown_fields(tool, TOOLS[kind], where)
            unknown += _responses_tools(tool.get("tools"), f"{where}tools")
            if kind == "custom" and "definition" in object_of(tool.get("format")):
                unknown.append(f"{where}format")
    return unknown


RESPONSES_BODY: RequestBody[ResponsesOptions] = body_kind(
    ResponsesRequest, "responses", _unknown_in_response, RESPONSES, RenderedResponses
)
