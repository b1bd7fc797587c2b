"""The fields of completions and chats, and the kinds of their bodies."""

from collections.abc import Iterator
from typing import Any

from text_generation_router.api.common.body_kinds import RequestBody, body_kind, object_of, objects_of, unknown_fields
from text_generation_router.api.common.contract import Contract, Refused, Renamed, Tolerated
from text_generation_router.api.common.known_fields import COMMON, OTHER_FORMS, Rules
from text_generation_router.api.common.messages import MessageBody
from text_generation_router.api.common.tools import FunctionBody, ToolBody
from text_generation_router.api.openai.schemas import (
    ChatOptions,
    ChatRequest,
    CompletionRequest,
    RenderedChat,
    StreamOptions,
)
from text_generation_router.errors import SuffixError

OPENAI: Rules = COMMON | {
    "best_of": Refused(neutral=(1,)),
    "watermark": Refused(neutral=(False,)),
    "truncate": Renamed("truncate_prompt_tokens"),
    "return_full_text": Refused("is not a field of this route, send `echo`", (False,)),
    "decoder_input_details": Refused("is not a field of this route, send `prompt_logprobs`", (False,)),
    "details": Tolerated("the details are always part of the answer"),
    "do_sample": Refused("is not a field of this route, send `temperature` 0 for the most likely tokens", (True,)),
    "max_new_tokens": Renamed("max_tokens"),
    "min_new_tokens": Renamed("min_tokens", (0,)),
    "stop_sequences": Renamed("stop", ([],)),
    "ignore_eos_token": Renamed("ignore_eos", (False,)),
    "inputs": Refused("is a field of /generate"),
    "parameters": Refused("is a field of /generate: on this route its fields stand in the body itself", ({},)),
}
COMPLETION_RULES: Rules = OPENAI | {
    "add_special_tokens": Refused(neutral=(True,)),
    "max_completion_tokens": Renamed("max_tokens"),
    "top_logprobs": Renamed("logprobs", (0,)),
    "top_n_tokens": Renamed("logprobs", (0,)),
    "messages": Refused("is a field of /v1/chat/completions"),
    "suffix": Refused(),
}
CHAT_RULES: Rules = (
    OPENAI
    | OTHER_FORMS
    | {
        "add_special_tokens": Refused(neutral=(False,)),
        "top_n_tokens": Renamed("top_logprobs", (0,)),
        "suffix": Refused(),
        "modalities": Refused(neutral=(["text"],)),
        "audio": Refused(),
        "prediction": Refused(),
        "reasoning": Refused("is not a field of this route, send `reasoning_effort`"),
        "thinking_token_budget": Renamed("max_thinking_tokens"),
        "thinking_budget_tokens": Renamed("max_thinking_tokens", (-1,)),
        "verbosity": Refused(neutral=("medium",)),
        "web_search_options": Refused(),
        "prompt": Refused("is a field of /v1/completions"),
    }
)

COMPLETION = Contract.of(CompletionRequest, COMPLETION_RULES)
CHAT = Contract.of(ChatRequest, CHAT_RULES)
# A message's other fields go to the chat template, as in transformers.
MESSAGE = Contract.of(
    MessageBody,
    {
        "audio": Refused(),
        "function_call": Refused(neutral=({},)),
    },
)
TOOL = Contract.of(
    ToolBody,
    {
        "cache_control": Tolerated("every prompt is looked up in the prefix cache"),
        "defer_loading": Refused("is not supported: the model is told of every tool", (False,)),
    },
)
FUNCTION = Contract.of(
    FunctionBody,
    {
        "arguments": Tolerated("is TGI's name of `parameters`"),
        "response": Tolerated("the model is told of a result by the result itself"),
    },
)
STREAM_OPTIONS = Contract.of(
    StreamOptions,
    {
        "include_obfuscation": Tolerated("events are not padded"),
    },
)


def _unknown_in_completion(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    """Also raises SuffixError, an error that TGI has."""
    if value.get("suffix") is not None:
        raise SuffixError
    return *unknown_fields(value, contract), *unknown_stream_options(value)


def _unknown_in_chat(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    unknown = *unknown_fields(value, contract), *unknown_stream_options(value), *_unknown_in_tools(value.get("tools"))
    for where, message in objects_of(value.get("messages"), "messages"):
        MESSAGE.refuse(message, where)
    return unknown


def _unknown_in_tools(tools: Any) -> Iterator[str]:
    for where, tool in objects_of(tools, "tools"):
        yield from unknown_fields(tool, TOOL, where)
        yield from unknown_fields(object_of(tool.get("function")), FUNCTION, f"{where}function.")


def unknown_stream_options(value: dict[str, Any]) -> tuple[str, ...]:
    return unknown_fields(object_of(value.get("stream_options")), STREAM_OPTIONS, "stream_options.")


COMPLETION_BODY = body_kind(CompletionRequest, "completion", _unknown_in_completion, COMPLETION)
CHAT_BODY: RequestBody[ChatOptions] = body_kind(ChatRequest, "chat", _unknown_in_chat, CHAT, RenderedChat)
