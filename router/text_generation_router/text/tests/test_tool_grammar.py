"""Calls by a grammar: the schema of the answer, and reading it."""

import json
import re

import jsonschema
import pytest

from text_generation_router.text.grammars.tool_grammar import (
    GrammarCallReader,
    calls_schema,
    chosen_name,
    described,
    name_pattern,
)
from text_generation_router.text.templates.chat_template import Conversation, Message
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, PieceReader, Text, merged

WEATHER = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}}
EMPTY: dict[str, object] = {}


def pieces(reader: PieceReader, text: str, size: int):
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return merged([piece for part in parts for piece in reader.push(part)] + [*reader.finish()])


def test_a_call_of_each_function_is_valid_and_others_are_not():
    schema = calls_schema([("weather", WEATHER), ("stop", EMPTY)])

    def is_valid(function: object) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid({"function": function})

    assert is_valid({"_name": "weather", "city": "Rome"}) and is_valid({"_name": "stop"})
    assert not is_valid({"_name": "weather", "city": 3}) and not is_valid({"_name": "stop", "city": "Rome"})
    assert not is_valid({"city": "Rome"}) and not is_valid({"_name": "other"})


def test_the_name_comes_first_so_that_it_is_known_before_the_arguments():
    schema = calls_schema([("weather", WEATHER)])
    assert list(schema["$functions"]["weather"]["properties"]) == ["_name", "city"]


def test_what_a_choice_begins_with_matches_its_pattern_to_the_end_of_the_name():
    pattern = name_pattern(["a.b", "no_tool"])
    assert re.fullmatch(pattern, '{"function": {"_name": "a.b"')
    assert not re.fullmatch(pattern, '{"function": {"_name": "axb"')
    assert chosen_name('{"function": {"_name": "a.b"') == "a.b" and chosen_name('{"function": {"_na') is None


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"function": {"_name": "f", "a": "}}", "b": {"c": [1]}}}', {"a": "}}", "b": {"c": [1]}}),
        ('{"function":{"_name":"f","a":{"b":{}}}}', {"a": {"b": {}}}),
        ('{ "function" : { "_name" : "f" } }', {}),
        ('{"function": {"_name": "f"}}', {}),
        ('{"function": {"_name": "f",\n "a": 1\n}\n}', {"a": 1}),
    ],
)
def test_a_call_is_read_the_same_however_its_text_arrives(text, arguments, size):
    start, given = pieces(GrammarCallReader(), text, size)
    assert start == CallStart(0, "f") and isinstance(given, CallArguments)
    assert json.loads(given.text) == arguments


def test_a_text_that_is_cut_off_loses_nothing():
    assert pieces(GrammarCallReader(), '{"function": {"_na', 3) == (Text('{"function": {"_na'),)
    start, given = pieces(GrammarCallReader(), '{"function": {"_name": "f", "a": {"b": 1', 3)
    assert (start, given.text) == (CallStart(0, "f"), '{"a": {"b": 1')


@pytest.mark.parametrize("in_template", [True, False])
def test_tools_are_described_in_the_last_message(in_template):
    chat = Conversation((Message("system", "S"), Message("user", "U")))
    first, last = described(chat, [{"name": "f"}], "Call one.", in_template).messages
    assert first == chat.messages[0]
    assert last.content == ("U\n---\nCall one." if in_template else 'U\n---\n[{"name":"f"}]\nCall one.')
