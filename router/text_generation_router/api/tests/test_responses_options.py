"""What the fields of functions, reasoning and form of /v1/responses mean in chats."""

import pytest

from text_generation_router.api.responses.chat import chat_of
from text_generation_router.api.responses.schemas import RenderedResponses, ResponsesRequest
from text_generation_router.errors import ValidationError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
TEXT_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TEXT_TOOL = {"type": "function", "function": {"name": "patch", "description": "d", "parameters": TEXT_PARAMETERS}}
CASES = [
    ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
    (
        {"tools": [{"type": "function", "name": "f"}], "parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False},
    ),
    ({"tools": [], "tool_choice": "auto"}, {}),
    ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "name": "weather"}},
    ),
    ({"tools": [{"type": "web_search"}, TOOL, {"type": "mcp"}]}, {"tools": [CHAT_TOOL]}),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, {"type": "web_search"}]}]},
        {"tools": [{"type": "function", "function": CHAT_TOOL["function"] | {"name": "n__weather"}}]},
    ),
    (
        {
            "tools": [{"type": "custom", "name": "patch", "description": "d"}],
            "tool_choice": {"type": "custom", "name": "patch"},
        },
        {"tools": [TEXT_TOOL], "tool_choice": {"type": "function", "name": "patch"}},
    ),
    (
        {
            "tools": [{"type": "namespace", "name": "n", "tools": [TOOL]}],
            "tool_choice": {"type": "function", "name": "weather", "namespace": "n"},
        },
        {
            "tools": [{"type": "function", "function": CHAT_TOOL["function"] | {"name": "n__weather"}}],
            "tool_choice": {"type": "function", "name": "n__weather"},
        },
    ),
    ({"text": {"verbosity": "low"}}, {"chat_template_kwargs": {"verbosity": "low"}}),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    ),
]


@pytest.mark.parametrize(("fields", "told"), CASES)
def test_fields_have_their_meaning_in_chats(fields, told):
    asked = ResponsesRequest.model_validate({"input": "Hi"} | fields)
    chat = chat_of(asked)
    assert chat.model_dump(exclude_none=True, exclude={"messages", "logprobs"}) == told
    assert chat.calling() is None or chat.calling().tools
    dumped = asked.model_dump(exclude_unset=True, exclude={"input"})
    large = chat_of(RenderedResponses.model_validate(dumped | {"prompt": "Hi"}))
    assert large.model_dump(exclude={"prompt", "prompt_without_tools"}) == chat.model_dump(
        exclude={"messages", "documents"}
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "`tool_choice` demands a tool of the type `web_search`, which is not supported",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "only if `tools` has at least one tool"),
        ({"text": {"format": {"type": "grammar"}}}, "`text.format` must have a `type` of text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "`text.format` must have a JSON schema"),
    ],
)
def test_wrong_fields_are_refused(fields, text):
    with pytest.raises(ValidationError, match=text):
        chat_of(ResponsesRequest.model_validate({"input": "Hi"} | fields)).calling()
