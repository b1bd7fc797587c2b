import json
from pathlib import Path

import pytest

from text_generation_router.text.grammars.asked import MAX_CHOICES, MAX_DEPTH, GrammarKind
from text_generation_router.text.grammars.checking_child import explained
from text_generation_router.text.grammars.keywords import FORMATS, OTHER_FORMATS, REFUSED, SUPPORTED
from text_generation_router.text.grammars.tests.matching import grammar_of, matches, refusal_of
from text_generation_router.text.schema_references import ANNOTATIONS

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}


def schema_grammar(schema) -> str:
    return grammar_of(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def schema_refusal(schema) -> str:
    return refusal_of(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name":"Ann","age":3}', True),
        ('{ "name": "Ann", "age": 3 }', True),
        ('{"age":3}', True),
        ('{"name":"Ann"}', False),
        ('{"age":"3"}', False),
        ('{"age":3,"size":1}', False),  # another property
        ('{  "age":3}', False),  # two spaces
        ('{\n"age":3}', False),
        ('{"age":3} ', False),
        ('{"age":3', False),
    ],
)
def test_a_schema_allows_its_values_as_json_with_single_spaces(text, fits):
    assert matches(schema_grammar(PERSON), text) == fits


@pytest.mark.parametrize(
    ("expression", "fitting", "unfitting"),
    [
        ("a+/b", ["aa/b"], ["/b", "a/bc", "xa/b"]),
        ("^(yes|no)$", ["yes"], ["yesno", "maybe"]),
        (r"\d{2}-[\w.]+", ["12-a_b."], ["1-a", "12-é", "١٢-a"]),
        ("(?i)ok", ["oK"], ["k"]),
        ("é\n'\"", ["é\n'\""], ["e"]),
    ],
)
def test_the_whole_answer_matches_a_regular_expression(expression, fitting, unfitting):
    grammar = grammar_of(GrammarKind.REGEX, expression)
    assert all(matches(grammar, text) for text in fitting)
    assert not any(matches(grammar, text) for text in unfitting)


def test_the_answer_is_one_of_the_choices_whatever_characters_they_have():
    choices = ["yes", "yes, indeed", 'a "b" \\n', "é\n\t\x07", "/*", "yes"]
    grammar = grammar_of(GrammarKind.CHOICE, json.dumps(choices))
    assert all(matches(grammar, choice) for choice in choices)
    assert not any(matches(grammar, text) for text in ("", "ye", "yesyes", "no"))


@pytest.mark.parametrize(
    "rules", ['root ::= "a" digit+ | "b"\ndigit ::= [0-9]', 'start: "a" DIGIT+ | "b"\nDIGIT: /[0-9]/']
)
def test_rules_are_gbnf_or_lark(rules):
    grammar = grammar_of(GrammarKind.RULES, rules)
    assert matches(grammar, "a12") and matches(grammar, "b") and not matches(grammar, "a")


ANY = {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_without_support_is_refused_by_its_name_wherever_it_stands(keyword):
    beside = {"if": {"then": False}, "then": {"if": {}}, "else": {"if": {}}}
    beside |= {name: {"contains": {}} for name in ("minContains", "maxContains")}
    schema = {keyword: {"pattern": "a"}} | beside.get(keyword, {})
    named = {keyword, *beside.get(keyword, ())} & REFUSED.keys()
    places = (
        schema,
        {"type": "object", "properties": {"a": schema}},
        {"anyOf": [{"type": "string"}, schema]},
        {"type": "array", "items": schema},
        {"$ref": "#/$defs/a", "$defs": {"a": schema}},
        {"type": "object", "additionalProperties": schema},
        {"$ref": "#/$functions/a", "$functions": {"a": schema}},
    )
    for place in places:
        assert schema_refusal(place) in {f"the schema's keyword `{name}` is not supported" for name in named}
    for neutral in REFUSED[keyword]:
        assert schema_refusal(ANY | {keyword: neutral}) == ""


def test_a_property_may_have_the_name_of_any_keyword():
    names = (*REFUSED, *SUPPORTED, *ANNOTATIONS)
    assert schema_refusal({"type": "object", "properties": {name: {"type": "integer"} for name in names}}) == ""


@pytest.mark.parametrize("keyword", [*sorted(ANNOTATIONS), "x-order", "customs"])
def test_annotations_change_nothing(keyword):
    grammar = schema_grammar({"type": "integer", keyword: {"not": {}}})
    assert matches(grammar, "12") and not matches(grammar, '"a"')


@pytest.mark.parametrize(
    "idle",
    [
        {"propertyNames": {"type": "string", "title": "Key"}},
        {"propertyNames": {"$ref": "#/$defs/key"}, "$defs": {"key": {"type": ["string", "null"]}}},
        {"uniqueItems": True, "contains": {"type": "string"}},  # which limit lists
        {"minContains": 2, "maxContains": 3},
        {"then": {"required": ["b"]}},
        {"if": {"required": ["b"]}},
        {"properties": {"a": {"type": "string", "format": "ipv4network"}}},
        {"properties": {"a": {"format": "binary", "contentEncoding": "base64", "contentMediaType": "text/x"}}},
    ],
)
def test_what_says_nothing_is_taken(idle):
    grammar = schema_grammar({"type": "object", "additionalProperties": {"type": "string"}} | idle)
    assert matches(grammar, '{"a": "b"}') and not matches(grammar, "12")


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "string", "maxLength": 1}, ["null", '"a"'], ['"ab"', "1"]),
        ({"type": ["string", "null"]}, ["null", '"a"'], ["1"]),
        ({"enum": ["a", 1]}, ["null", '"a"', "1"], ['"b"']),
        ({"type": "string", "const": "a"}, ["null", '"a"'], ['"b"']),
        ({"$ref": "#/$defs/a"}, ["null", '"a"'], ["1"]),
        ({"allOf": [{"$ref": "#/$defs/a"}], "description": "d"}, ["null", '"a"'], ["1"]),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}]}, ["null", '"a"', "1"], ["true"]),
        ({}, ["null", '"a"', "1"], []),
    ],
)
def test_nullable_is_or_null_wherever_it_stands(schema, values, others):
    definitions = {"$defs": {"a": {"type": "string", "enum": ["a"]}}}
    inner = {"type": "array", "items": schema | {"nullable": True}, "minItems": 1, "maxItems": 1} | definitions
    root = schema | {"nullable": True} | definitions
    for grammar, form in ((schema_grammar(inner), "[{}]"), (schema_grammar(root), "{}")):
        assert [value for value in values if not matches(grammar, form.format(value))] == []
        assert [value for value in others if matches(grammar, form.format(value))] == []
    strict = schema_grammar(schema | {"nullable": False} | definitions)
    assert matches(strict, "null") == (schema == {} or schema.get("type") == ["string", "null"])


def test_no_keyword_is_in_two_tables():
    assert not (SUPPORTED & ANNOTATIONS or SUPPORTED & REFUSED.keys() or ANNOTATIONS & REFUSED.keys())


@pytest.mark.parametrize("name", FORMATS)
def test_strings_have_a_format_that_is_supported(name):
    assert not matches(schema_grammar({"type": "string", "format": name}), '"§"')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        *TABLES["refused"],
        ({"type": "integer", "minimum": -(2**63)}, "a bound of a number is too large or has too many digits"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(schema, reason):
    assert schema_refusal(schema).startswith(reason)


def test_what_is_too_large_for_a_models_tokens_alone_is_told_in_the_same_words():
    assert explained("lexer precomputation failed; either increase limits") == "it is too large or complex"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "the schema is not valid JSON: "),
        (GrammarKind.REGEX, "", "the regular expression is empty"),
        *(
            (GrammarKind.REGEX, text, "the regular expression ends with a backslash")
            for text in ("\\", "a\\", "\\\\\\")
        ),
        (GrammarKind.REGEX, "a(?!b)", "a regular expression must not have look-around"),
        (GrammarKind.REGEX, "a{2", "a regular expression cannot be read: "),
        (GrammarKind.CHOICE, "[]", "there is nothing to choose from"),
        (GrammarKind.CHOICE, '["a", ""]', "an empty string cannot be chosen"),
        (GrammarKind.CHOICE, json.dumps(list(map(str, range(MAX_CHOICES + 1)))), f"at most {MAX_CHOICES} choices"),
        (GrammarKind.RULES, "root ::= word", "the GBNF grammar cannot be read: Rule 'word' not found"),
        (GrammarKind.RULES, "root ::= " + "(" * 5000, "the grammar is nested too deeply"),
        (GrammarKind.RULES, "", "no start rule found"),
        (GrammarKind.RULES, 'start: "a" b', "line 1, column 8: unknown name"),
        (GrammarKind.RULES, 'start: "a" <|end|>', "special tokens are not supported"),
        (GrammarKind.RULES, "start: <[5]>", "special tokens are not supported"),
        (GrammarKind.RULES, "start: a\na[temperature=0.5]: /x/", "the attribute `temperature` of a rule is not"),
        (GrammarKind.RULES, "start[capture]: /x/", "the attribute `capture` of a rule is not supported"),
        (GrammarKind.RULES, 'start: %json {"uniqueItems": true}', "the schema's keyword `uniqueItems` is not"),
        (
            GrammarKind.RULES,
            'start: %json {"uniqueItems": true, "x-guidance": {"lenient": true}}',
            "the schema's keyword `uniqueItems` is not supported",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(kind, text, reason):
    assert refusal_of(kind, text).startswith(reason)


def test_a_schema_is_as_deep_as_the_limit_at_most():
    def nested(levels: int) -> str:
        return '{"anyOf":[' * (levels // 2) + "{}" + "]}" * (levels // 2)

    assert refusal_of(GrammarKind.JSON_SCHEMA, nested(MAX_DEPTH - 2)) == ""
    for levels in (MAX_DEPTH + 2, 900, 40_000):
        refusal = refusal_of(GrammarKind.JSON_SCHEMA, nested(levels))
        assert "levels" in refusal or "not valid JSON" in refusal


def test_tgis_schemas_have_properties():
    refusal = refusal_of(GrammarKind.JSON_SCHEMA, "{}", needs_properties=True)
    assert refusal == "Grammar must have a 'properties' field"
    assert refusal_of(GrammarKind.JSON_SCHEMA, '{"properties": {}}', needs_properties=True) == ""


def test_tgis_schemas_are_those_of_objects_without_saying_so():
    schema = '{"properties": {"a": {"type": "integer"}}}'
    tgis, others = (grammar_of(GrammarKind.JSON_SCHEMA, schema, needs_properties=only) for only in (True, False))
    assert matches(tgis, '{"a": 1}') and not matches(tgis, "3")
    assert matches(others, "3")  # as the standard says


def test_the_documents_name_every_keyword_and_format():
    page = (Path(__file__).parents[5] / "docs/grammars.md").read_text()
    table = page[page.index("| keywords |") :]
    missing = [
        name
        for name in (*SUPPORTED, *ANNOTATIONS, *REFUSED, *FORMATS, *OTHER_FORMATS, "nullable")
        if f"`{name}`" not in table
    ]
    assert missing == []
