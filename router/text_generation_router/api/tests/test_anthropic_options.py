"""What Anthropic's fields of tools, thinking and form mean in chats."""

import pytest

from text_generation_router.api.anthropic.chat import chat_of, counted_chat_of
from text_generation_router.api.anthropic.schemas import CountTokensRequest, MessagesRequest, RenderedMessages
from text_generation_router.errors import ValidationError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
CASES = [
    ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
    ({"tools": [TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}}]}, {"tools": [CHAT_TOOL]}),
    ({"tools": []}, {}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        {"tools": [CHAT_TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
        {
            "tools": [CHAT_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": True,
        },
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"tools": [CHAT_TOOL], "tool_choice": "none", "parallel_tool_calls": True},
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"chat_template_kwargs": {"enable_thinking": True}, "max_thinking_tokens": 1024},
    ),
    ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"include_reasoning": False}),
    ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
    ),
]


@pytest.mark.parametrize(("fields", "told"), CASES)
def test_fields_have_their_meaning_in_chats(fields, told):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    asked = MessagesRequest.model_validate(body | {"max_tokens": 5})
    chat = chat_of(asked)
    values = chat.model_dump(exclude_none=True, exclude={"messages", "max_tokens", "include_stop_str_in_output"})
    assert values == told
    # The prompt of count_tokens, and a prompt that a child process has rendered, are made with the same fields.
    counted = counted_chat_of(CountTokensRequest.model_validate(body))
    assert counted.model_dump(exclude_none=True, exclude={"messages"}) == told
    dumped = asked.model_dump(exclude_unset=True, exclude={"messages"})
    large = chat_of(RenderedMessages.model_validate(dumped | {"prompt": "Hi"}))
    assert large.model_dump(exclude={"prompt", "prompt_without_tools"}) == chat.model_dump(
        exclude={"messages", "documents"}
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`web_search_20250305` is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, '`tools\\[0\\].type` must be "custom"'),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "must have a `name`"),
        ({"output_config": {"format": {"type": "text"}}}, "`output_config.format` must have"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "`output_config.format` must have"),
    ],
)
def test_wrong_fields_are_refused(fields, text):
    with pytest.raises(ValidationError, match=text):
        chat_of(
            MessagesRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5} | fields)
        )
