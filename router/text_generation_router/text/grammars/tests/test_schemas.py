import copy
import json
from pathlib import Path

import pytest

from text_generation_router.text.grammars.asked import GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.schemas import MAX_NAMES, prepare
from text_generation_router.text.grammars.tests.matching import grammar_of, matches

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
CLOSED_A, CLOSED_B = A | {"additionalProperties": False}, B | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({"properties": {"x": A}}, {"properties": {"x": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, B]}, {"anyOf": [CLOSED_A, CLOSED_B]}),
        ({"type": "object", "anyOf": [A, B]}, {"type": "object", "anyOf": [CLOSED_A, CLOSED_B]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        (
            {"$ref": "#/$defs/a~1b", "description": "d", "$defs": {"a/b": A}},
            {"$ref": "#/$defs/a~1b", "description": "d", "$defs": {"a/b": CLOSED_A}},
        ),
        ({"properties": {"x": {"$ref": "#"}}}, {"properties": {"x": {"$ref": "#"}}, "additionalProperties": False}),
        # The schema's own words about other properties stay.
        (A | {"additionalProperties": True}, None),
        (A | {"patternProperties": {"^x": {}}}, None),
        (A | {"required": ["b"]}, None),
        (A | {"minProperties": 2}, None),
        ({"type": "object"}, None),
        ({"required": ["a"]}, None),
        # Schemas that hold together stay open.
        ({"allOf": [A, B]}, None),
        ({"properties": {"b": {}}, "anyOf": [A, {}]}, None),
        ({"required": ["a"], "allOf": [A]}, None),
        ({"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": A}}, None),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": {"anyOf": [A, {"$ref": "#/$defs/b"}]}, "b": A}}, None),
        ({"$defs": {"a": A}}, None),
        # One reference among others is enough to keep a schema open.
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/a"}, B]}], "$defs": {"a": A}}, None),
    ],
)
def test_objects_that_list_their_properties_are_closed_unless_combined(schema, closed):
    prepared = copy.deepcopy(schema)
    prepare(prepared)
    assert prepared == (schema if closed is None else closed)


def test_an_object_made_of_two_schemas_has_the_properties_of_both():
    schema = {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]}
    schema["$defs"] = {"a": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    grammar = grammar_of(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert matches(grammar, '{"a":1,"b":2}') and not matches(grammar, '{"a":1}')


@pytest.mark.parametrize(("name", "text", "fits"), TABLES["dates"])
@pytest.mark.parametrize("more", [{}, {"pattern": "^[0-9]"}, {"allOf": [{"minLength": 3}]}])
def test_dates_are_days_that_there_were(name, text, fits, more):
    grammar = grammar_of(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "format": name} | more))
    assert matches(grammar, json.dumps(text)) == fits


@pytest.mark.parametrize("name", MAX_NAMES)
def test_an_object_has_a_bounded_number_of_properties(name):
    def schema(count):
        return {"items": {name: {f"^{number}$": {"type": "integer"} for number in range(count)}}}

    prepare(schema(MAX_NAMES[name]))
    with pytest.raises(RefusedGrammarError, match=f"more than {MAX_NAMES[name]} `{name}` in one object"):
        prepare(schema(MAX_NAMES[name] + 1))


def test_each_part_of_a_schema_is_followed_once():
    """Doubled references in each of many levels would otherwise take 2 ** 60 visits."""
    parts = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": parts | {"d60": copy.deepcopy(A)}}
    prepare(schema)
    assert schema["$defs"]["d60"] == CLOSED_A


def tagged(value, **more):
    return {"type": "object", "properties": {"kind": {"const": value}, "x": {"type": "integer"}}, **more}


@pytest.mark.parametrize(
    ("schemas", "told_apart"),
    [
        ([tagged("a", required=["kind"]), tagged("b", required=["kind"])], True),
        ([tagged(1, required=["kind"]), tagged(2, required=["kind"])], True),
        ([{"$ref": "#/$defs/a", "title": "A"}, {"$ref": "#/$defs/b"}], True),
        ([tagged("a", required=["kind"]), tagged("b")], False),  # {} matches the second only, {"kind": "a"} the first
        ([tagged("a", required=["kind"]), tagged("a", required=["kind"])], False),
        ([tagged(True, required=["kind"]), tagged(1, required=["kind"])], False),
        ([tagged("a", required=["kind"]), {"$ref": "#/$defs/b", "minProperties": 1}], False),
        ([{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/b"}], False),
        ([{"type": "string"}, {"type": "integer"}], False),  # which llguidance tells apart
    ],
)
def test_one_of_several_objects_is_any_of_them_if_a_property_tells_them_apart(schemas, told_apart):
    parts = {"a": tagged("a", required=["kind"]), "b": tagged("b", required=["kind"]), "loop": {"$ref": "#/$defs/loop"}}
    schema = {"oneOf": schemas, "$defs": parts}
    prepare(schema)
    assert ("anyOf" in schema, "oneOf" in schema) == (told_apart, not told_apart)
    if told_apart:
        grammar = grammar_of(GrammarKind.JSON_SCHEMA, json.dumps({"oneOf": schemas, "$defs": parts}))
        assert matches(grammar, '{"kind":' + ('"b"' if "1" not in str(schemas) else "2") + ',"x":1}')


@pytest.mark.parametrize(
    ("multiples", "supported"), [([10_000], True), ([10_001], False), ([0.01, 0.5, 60], True), ([97, 103, 3], False)]
)
def test_multiples_are_bounded_together(multiples, supported):
    schema = {"properties": {f"a{number}": {"multipleOf": number} for number in multiples}}
    try:
        prepare(schema)
        assert supported
    except RefusedGrammarError as error:
        assert not supported and "`multipleOf` is supported up to 10000" in str(error)
