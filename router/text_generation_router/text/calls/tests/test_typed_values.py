"""Raw text becomes a JSON value of the type that a schema asks for."""

import pytest

from text_generation_router.text.calls.typed_values import json_of, types_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null", 5]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": [1.5]}, {"array"}),
        ({"anyOf": [{"type": "string"}, {"const": True}]}, {"string", "boolean"}),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}, set()),
        ({"$ref": "#/$defs/size", "description": "of a shoe"}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/size"}]}, {"integer"}),
        ({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, {"integer", "null"}),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_that_a_schema_allows(schema: object, types: set[str]) -> None:
    assert types_of(schema, {"$defs": {"size": {"type": "integer"}}}) == types


def test_alternatives_that_nest_too_deep_say_nothing() -> None:
    schema: object = {"type": "string"}
    for _ in range(1000):
        schema = {"anyOf": [schema]}
    assert types_of(schema, {}) == frozenset()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 3 ", {"integer"}, "3"),
        ("1.50", {"number"}, "1.50"),
        ("7", {"number"}, "7"),
        ("many", {"integer"}, '"many"'),
        ("NaN", {"number"}, '"NaN"'),
        ("[1,", {"array"}, '"[1,"'),
        ("False", {"boolean"}, "false"),
        ("None", {"null", "string"}, "null"),
        ("null", {"string", "integer"}, '"null"'),
        ("5", {"string", "null"}, '"5"'),
        ("5", set(), "5"),
        ("true", set(), "true"),
        ('"5"', set(), '"\\"5\\""'),
        (" a ", set(), '" a "'),
        ('{"a": 1}', {"object"}, '{"a": 1}'),
        ('{"a": 1}', {"array"}, '{"a": 1}'),
        ("[" * 100_000, {"array"}, '"' + "[" * 100_000 + '"'),
        ("9" * 5000, {"integer"}, '"' + "9" * 5000 + '"'),
    ],
)
def test_a_text_is_read_as_its_type(text: str, types: set[str], value: str) -> None:
    assert json_of(text, frozenset(types)) == value
