"""Tools of a chat: the forms of `tools` and `tool_choice`, and which calls an answer may have."""

from typing import Any

import pytest

from text_generation_router.api.common.body_kinds import check
from text_generation_router.api.common.messages import MAX_TOOLS, Calling
from text_generation_router.api.openai.chat_pieces import delta_json, message_json, new_call_id, new_short_call_id
from text_generation_router.api.openai.schemas import ChatRequest
from text_generation_router.errors import ToolError, UnprocessableError, ValidationError
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Reasoning, Text

MESSAGES = [{"role": "user", "content": "x"}]


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def calling(tools: Any = None, **fields: Any) -> Calling | None:
    return check(ChatRequest, {"messages": MESSAGES, "tools": tools} | fields).calling()


def names(found: Calling) -> list[str]:
    return [tool.function.name for tool in found.tools]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tools": [tool()], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    ],
)
def test_a_chat_without_tools_calls_none(fields):
    assert calling(**fields) is None


@pytest.mark.parametrize(
    ("choice", "called", "is_required", "is_parallel"),
    [
        (None, ["f", "g"], False, True),
        ("auto", ["f", "g"], False, True),
        ("required", ["f", "g"], True, True),
        ("g", ["g"], True, False),
        ({"type": "function", "function": {"name": "g"}}, ["g"], True, False),
        ({"function": {"name": "g"}}, ["g"], True, False),
        ({"type": "function", "name": "g"}, ["g"], True, False),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}}, ["g"], False, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}]}, ["g"], True, True),
    ],
)
def test_a_choice_says_which_tools_may_or_must_be_called(choice, called, is_required, is_parallel):
    found = calling([tool("f"), tool("g")], tool_choice=choice)
    assert found is not None and names(found) == called and len(found.listed) == 2
    assert (found.is_required, found.is_parallel) == (is_required, is_parallel)
    single = calling([tool("f"), tool("g")], tool_choice=choice, parallel_tool_calls=False)
    assert single is not None and not single.is_parallel


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": [tool("f"), tool("f")]}, "`tools` has two functions named `f`"),
        ({"tool_choice": "required"}, "`tool_choice` is allowed only if `tools` has at least one tool"),
        ({"tools": [], "tool_choice": "f"}, "`tool_choice` is allowed only if `tools` has at least one tool"),
        ({"tools": [tool()] * (MAX_TOOLS + 1)}, "`tools` must have at most 128 tools. Given: 129"),
        ({"tools": [{"type": "custom"}]}, '`tools[0].type` must be "function": `custom` is not supported'),
    ],
)
def test_what_does_not_go_together_is_refused(fields, text):
    with pytest.raises(ValidationError) as refused:
        calling(**fields)
    assert refused.value.text == f"Input validation error: {text}"


def test_a_choice_of_a_tool_that_is_not_there_is_refused_with_tgis_words():
    with pytest.raises(ToolError, match="Tool with name g not found"):
        calling([tool("f")], tool_choice="g")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters=3)]}, "tools[0].function.parameters"),
        ({"tools": "f"}, "tools"),
        ({"tools": [tool()], "tool_choice": 3}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_a_wrong_form_is_refused_with_its_place(fields, path):
    with pytest.raises(UnprocessableError) as refused:
        calling(**fields)
    assert str(refused.value.param).startswith(path)


def test_tgis_name_of_the_parameters_is_taken():
    found = calling([tool("f", arguments={"type": "object"})])
    assert found is not None
    assert found.tools[0].for_template() == tool("f", parameters={"type": "object"})


def test_a_template_gets_a_tool_without_what_it_does_not_have_and_without_strict():
    found = calling([tool("f", strict=True)])
    assert found is not None and found.strict == {"f"} and found.tools[0].for_template() == tool("f")


PIECES = [Reasoning("R"), Text("T"), CallStart(0, "f", "id-0"), CallArguments(0, "{}"), CallStart(1, "g")]


def test_a_message_has_text_reasoning_and_calls():
    call = {"id": "id-0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"id": "new", "type": "function", "function": {"name": "g", "arguments": ""}}
    message = message_json(PIECES, lambda: "new")
    assert message == {
        "role": "assistant",
        "content": "T",
        "reasoning_content": "R",
        "reasoning": "R",
        "tool_calls": [call, other],
    }
    assert message_json(PIECES[2:], lambda: "new")["content"] is None
    assert message_json([], lambda: "new") == {"role": "assistant", "content": ""}


def test_deltas_name_a_call_once_and_then_add_to_its_arguments():
    assert [delta_json(piece, lambda: "new") for piece in PIECES[1:]] == [
        {"content": "T"},
        {"tool_calls": [{"index": 0, "id": "id-0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "new", "type": "function", "function": {"name": "g", "arguments": ""}}]},
    ]


def test_ids_of_calls_are_never_the_same():
    assert len({new_call_id() for _ in range(100)}) == len({new_short_call_id() for _ in range(100)}) == 100
    assert len(new_short_call_id()) == 9 and new_short_call_id().isalnum()
