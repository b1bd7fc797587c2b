"""Mistakes of clients that once ended as errors of the server: each is refused, and names the field that is wrong."""

import json
import re
from typing import Any

import pytest

from text_generation_common.errors import GRAMMAR_FAULTS
from text_generation_router.api.tests.conftest import ROUTES, Route, Script
from text_generation_router.engine.protocol import Ended, EndReason, TokenLimits
from text_generation_router.text.json_depth import MAX_DEPTH

USER = {"role": "user", "content": "Hi"}
CHAT, RESPONSES, MESSAGES = ROUTES[4:]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
LARGE = TokenLimits(max_input_tokens=4000, max_total_tokens=5000, max_batch_total_tokens=9000)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
NATIVE = {"parameters": {"grammar": {"type": "json", "value": SCHEMA}}}
# A grammar for each route, and the field that it stands in.
GRAMMARS: tuple[tuple[Route, dict[str, Any], str], ...] = (
    *((route, NATIVE, "grammar") for route in ROUTES[:3]),
    (ROUTES[3], {"guided_json": SCHEMA}, "guided_json"),
    (CHAT, {"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tools"),
    (RESPONSES, {"text": {"format": FORMAT}}, "text.format"),
    (MESSAGES, {"output_config": {"format": FORMAT}}, "output_config.format"),
)
PADDING = "x" * 70_000  # makes a body so large that a child reads it


def nested(levels: int) -> str:
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


def with_field(body: dict[str, Any], value: str, padding: str) -> bytes:
    """The body with a field of JSON that Python would not write."""
    return f'{json.dumps(body | {"pad": padding})[:-1]},"extra":{value}}}'.encode()


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
def test_json_of_every_route_is_as_deep_as_the_limit_at_most(make_server, route: Route, padding: str) -> None:
    server = make_server(payload_limit=10**6)
    assert server.post(route.path, with_field(route.body, nested(MAX_DEPTH - 1), padding)).status == 200
    for levels in (MAX_DEPTH, 253, 300, 900, 2000):
        answer = server.post(route.path, with_field(route.body, nested(levels), padding))
        assert answer.status == 400 and answer.told["error_type"] == "invalid_json"


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 300, 900, 1200])
def test_arguments_as_text_are_as_deep_as_the_limit_at_most(make_server, levels: int, padding: str) -> None:
    server = make_server(payload_limit=10**6)
    server.engine.limits = LARGE
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": nested(levels)}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]
    item = {"type": "function_call", "call_id": "0", "name": "f", "arguments": nested(levels)}
    for route, fields in ((CHAT, {"messages": turns}), (RESPONSES, {"input": [USER, item, USER]})):
        answer = server.ask(route, **fields, metadata={"pad": padding})
        if levels <= MAX_DEPTH:
            assert answer.status == 200
        else:
            assert answer.status == 400 and answer.json["error"]["param"] == "arguments"


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice",
        ),
        (
            RESPONSES,
            {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []},
            },
            "tool_choice",
        ),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}},
            "tool_choice",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content"),
        (RESPONSES, {"temperature": -1.0}, "temperature"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": [USER, {"role": "user", "content": None}]}, "input[1].content"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSES, {"input": [{"type": "message", "role": "bad", "content": "Hi"}]}, "input[0].role"),
        (CHAT, {"messages": [{"role": "bad", "content": "Hi"}]}, "messages"),
        (CHAT, {"documents": [{"text": "a"}]}, "documents"),
        (CHAT, {"tool_choice": 5}, "tool_choice"),
        (CHAT, {"guided_json": 5}, "guided_json"),
        (CHAT, {"json_schema": ["a"]}, "json_schema"),
        (RESPONSES, {"tools": [FUNCTION | {"type": "function"}], "tool_choice": ["auto"]}, "tool_choice"),
    ],
)
def test_the_field_that_is_wrong_is_named(server, route: Route, fields: dict[str, Any], param: str) -> None:
    answer = server.ask(route, **fields)
    assert answer.status == 400 and answer.json["error"]["param"] == param


@pytest.mark.parametrize("padding", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(("length", "status"), [(1, 200), (63, 200), (64, 400), (128, 400)])
def test_names_of_a_namespace_and_its_tools_are_those_of_functions(make_server, length, status, padding: str) -> None:
    server = make_server(payload_limit=10**6)
    server.engine.limits = LARGE
    tool = {"type": "namespace", "name": "n" * length, "tools": [{"type": "custom", "name": "f" * length}]}
    answer = server.ask(RESPONSES, tools=[tool], pad=padding)
    assert answer.status == status and (status == 200 or answer.json["error"]["param"] == "tools[0]")


def test_tools_of_which_none_may_be_called_are_not_called(server) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": []}
    assert server.ask(CHAT, tools=[TOOL], tool_choice=choice, response_format={"type": "json_object"}).status == 200


def test_ids_of_calls_may_have_any_number_of_digits(make_server) -> None:
    call = {"id": "9" * 4301, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]
    server = make_server(tgi_dialect=True)
    server.engine.limits = LARGE
    answer = server.ask(CHAT, messages=turns, tools=[TOOL], tool_choice="required", stream=True)
    assert answer.status == 200 and answer.events


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "fields", "field"), GRAMMARS, ids=lambda value: getattr(value, "path", ""))
def test_a_grammar_that_fails_in_the_middle_of_a_text_is_its_clients(
    server, route: Route, fields: dict[str, Any], field: str, stream: bool
) -> None:
    server.engine.limits = LARGE
    for cause in GRAMMAR_FAULTS:
        server.engine.script = Script(ends_after=(1, Ended(EndReason.FAILED, cause=f"{cause}: too many states")))
        answer = server.ask(route, **fields, stream=stream)
        is_stream = answer.headers["content-type"] == "text/event-stream"
        assert answer.status == (200 if is_stream else route.status(422))
        text = f"{'grammar is not valid' if field == 'grammar' else f'`{field}`'}: {cause}: too many states"
        assert text in answer.body.decode()
        assert not {"server_error", "api_error", "generation"} & set(re.findall(r'"(\w+)"', answer.body.decode()))
