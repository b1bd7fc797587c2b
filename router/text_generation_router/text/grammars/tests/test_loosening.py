"""What a loose schema keeps, and what it leaves out."""

import json
from pathlib import Path

import pytest

from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.call_arguments import ArgumentStyle, asked_arguments
from text_generation_router.text.grammars.checking_child import check
from text_generation_router.text.grammars.keywords import OTHER_FORMATS, REFUSED
from text_generation_router.text.grammars.tests.make_schemas import UNSUPPORTED
from text_generation_router.text.grammars.tests.matching import matches

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

LIMIT = {"type": "integer", "minimum": 3}
LEFT_OUT = TABLES["left_out"]


@pytest.mark.parametrize(("schema", "left_out", "taken", "refused"), LEFT_OUT)
@pytest.mark.parametrize("is_inner", [False, True])
def test_only_what_cannot_be_followed_is_left_out(schema, left_out, taken, refused, is_inner):
    if is_inner and "$defs" not in schema:
        schema = {"type": "object", "properties": {"a": schema, "b": LIMIT}, "required": ["a", "b"]}
        taken, refused = (f'{{"a": {value}, "b": 3}}' for value in (taken, refused))
        assert not matches(check(loose(schema)).grammar, taken.replace('"b": 3', '"b": 2'))
    checked = check(loose(schema))
    assert (checked.refusal, list(checked.left_out)) == ("", left_out)
    assert matches(checked.grammar, taken) and not matches(checked.grammar, refused)


def loose(schema: object) -> AskedGrammar:
    return AskedGrammar("f", GrammarKind.JSON_SCHEMA, json.dumps(schema), is_loose=True)


@pytest.mark.parametrize("style", [None, ArgumentStyle(CALL_FORMATS["qwen3-coder"].xml), ArgumentStyle()])
def test_every_unsupported_keyword_is_left_out_of_values_and_of_arguments(style):
    beside = {"if": {"then": {"type": "string"}}, "then": {"if": {}}, "else": {"if": {}}}
    beside |= {name: {"contains": {"type": "string"}} for name in ("minContains", "maxContains")}
    parts = [{name: {"pattern": "b"}} | beside.get(name, {}) for name in REFUSED]
    parts += [{"type": "string", "format": name} for name in OTHER_FORMATS] + list(UNSUPPORTED)
    for part in parts:
        schema = {"type": "object", "properties": {"a": part, "b": LIMIT}, "required": ["a", "b"]}
        asked = loose(schema) if style is None else asked_arguments(style, schema, is_loose=True)
        checked = check(asked)
        assert checked.refusal == "" and checked.left_out, part
        followed = json.loads(checked.followed)
        assert (followed if style is None else followed[1])["properties"]["b"] == LIMIT


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", '{"type": "integer", "enum": []}', '{"enum": ["a"], "minimum": 1, "$ref": "#"}']
)
def test_a_text_without_a_schema_and_a_schema_without_values_are_refused(text):
    assert check(AskedGrammar("f", GrammarKind.JSON_SCHEMA, text, is_loose=True)).refusal
