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
from text_generation_router.api.common.contract import MAX_NAME_CHARS, MAX_NAMES, Contract
from text_generation_router.api.common.known_fields import RULES
from text_generation_router.api.openai.fields import unknown_stream_options
from text_generation_router.api.responses.schemas import (
    CustomCallItem,
    FunctionCallItem,
    FunctionResultItem,
    InputMessage,
    ReasoningConfig,
    ReasoningItem,
    RenderedResponses,
    ResponsesOptions,
    ResponsesRequest,
    TextConfig,
    WebSearchItem,
)
from text_generation_router.api.responses.tools import FunctionTool, NamespaceTool, TextTool, is_left_out

RESPONSES = Contract.of(ResponsesRequest, RULES["responses"])
TEXT = Contract.of(TextConfig)
REASONING = Contract.of(ReasoningConfig, RULES["responses.reasoning"])
TOOLS = {
    kind: Contract.of(schema, RULES["responses.tools"])
    for kind, schema in (("function", FunctionTool), ("custom", TextTool), ("namespace", NamespaceTool))
}
RESULT = Contract.of(FunctionResultItem, RULES["items"], RULES["items.function_call_output"])
ITEMS = {
    "web_search_call": Contract.of(WebSearchItem, RULES["items"], RULES["items.web_search_call"]),
    "message": Contract.of(InputMessage, RULES["items"]),
    "function_call": Contract.of(FunctionCallItem, RULES["items"]),
    "function_call_output": RESULT,
    "custom_tool_call_output": RESULT,
    "custom_tool_call": Contract.of(CustomCallItem, RULES["items"]),
    "reasoning": Contract.of(ReasoningItem, RULES["items"], RULES["items.reasoning"]),
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
    """The unknown fields of tools, and the paths of the tools that are left out."""
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
