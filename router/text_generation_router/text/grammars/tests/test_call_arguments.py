"""Schemas of arguments that are odd or large, and strings without quotes, beside what the readers' tests show."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.calls.tests.walks import Calls, Schema, tokenizer_of
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.call_arguments import ArgumentStyle, asked_arguments
from text_generation_router.text.grammars.keywords import FORMATS, REFUSED, SUPPORTED
from text_generation_router.text.grammars.rules import MAX_CHARS
from text_generation_router.text.grammars.tests.matching import check, problems_of

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

STYLES = (ArgumentStyle(CALL_FORMATS["qwen3-coder"].xml), ArgumentStyle())
ODD = TABLES["odd"]


odd_values = st.sampled_from(
    (
        *(None, True, False, 0, -1, 2, 0.5, "", "x", "string", "object", "#", [], {}, [1], ["a"], [{}], [["a"]]),
        *({"a": 2}, ["string", "null"], {"a": {}}, [{"type": "string"}], {"a": {"type": False, "const": "x"}}),
    )
)
odd_schemas = st.dictionaries(st.sampled_from(sorted({*SUPPORTED, *REFUSED})), odd_values, min_size=1, max_size=4)


def refusal_of(style: ArgumentStyle, schema: Schema) -> str:
    return check(asked_arguments(style, {"type": "object"} | schema)).refusal


@pytest.mark.parametrize("style", STYLES, ids=["tags", "Python"])
def test_odd_schemas_are_refused(style: ArgumentStyle) -> None:
    assert [part for part in ODD if not refusal_of(style, {"properties": part, "required": ["a"]})] == []
    assert refusal_of(style, {"properties": {"a": {}}, "required": [5, {}]})
    assert refusal_of(style, {"properties": [], "required": 5})


@given(part=odd_schemas)
def test_a_schema_whose_keywords_have_any_types_is_followed_or_refused(part: Schema) -> None:
    schema = {"properties": {"a": part}, "required": ["a"]}
    checked = [check(asked_arguments(style, {"type": "object"} | schema)) for style in STYLES]
    checked.append(check(AskedGrammar("guided_json", GrammarKind.JSON_SCHEMA, json.dumps(schema))))
    assert all(bool(one.grammar) != bool(one.refusal) for one in checked)


@pytest.mark.parametrize("style", STYLES, ids=["tags", "Python"])
def test_rules_do_not_grow_with_the_number_of_references_to_a_large_schema(style: ArgumentStyle) -> None:
    large = {"type": "object", "properties": {f"q{i}": {"type": "string"} for i in range(300)}}
    both = {"$ref": "#/$defs/large"}
    parts: Schema = {f"p{i}": {"allOf": [both, {"minProperties": 0}]} for i in range(400)}
    found = check(asked_arguments(style, {"type": "object", "properties": parts, "$defs": {"large": large}}))
    assert len(found.grammar) < MAX_CHARS
    parts = {name: {"allOf": [both, {"minProperties": i % 50}]} for i, name in enumerate(parts)}
    refusal = refusal_of(style, {"properties": parts, "$defs": {"large": large}})
    assert refusal.endswith("it is too large or complex") == (style.tags is not None)  # tags are kept out of strings


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format_without_quotes_are_valid(name: str) -> None:
    calls, rng = Calls("qwen3-coder", tokenizer_of(())), random.Random(5)
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "format": name}}, "required": ["a"]}
    tools: dict[str, Schema] = {"f": schema}
    grammar, values = calls.grammar(tools, several=False), list[str]()
    for _ in range(20):
        ids = calls.walk(grammar, rng, ["\n</parameter>", "0", "a", "-"])
        assert ids is not None
        [(_, arguments)] = calls.read(ids, tools)
        assert not list(problems_of(json.dumps(schema), json.dumps(arguments)))
        values += [arguments["a"]] if arguments["a"] else []
    assert values
