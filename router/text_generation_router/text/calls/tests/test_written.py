"""What a grammar is told to demand is what the readers read, and what the grammar then lets the model write."""

import json
import random
import re
from pathlib import Path

import jsonschema
import pytest

from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.calls.tests.walks import Calls, Schema, spelled, tokenizer_of, tool
from text_generation_router.text.calls.written import WRITTEN_FORMS
from text_generation_router.text.grammars.asked import RefusedGrammarError

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

TAGGED = ("qwen3-coder", "seed-oss", "minimax-m2", "glm45")
PYTHONIC = ("llama4", "lfm2", "olmo3")
SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}
SPELLED, SPECIAL = "markers are text", "markers are special tokens"


def calls_of(name: str, kind: str = SPELLED) -> Calls:
    texts = " ".join(CALL_FORMATS[name].texts)
    special = dict.fromkeys(re.findall(r"<[^\s<>]+>|\[/?[A-Z_]+\]", texts)) if kind == SPECIAL else ()
    return Calls(name, tokenizer_of(tuple(special)), tuple(special))


def hints(calls: Calls) -> list[str]:
    """Texts without which a text at random hardly ends."""
    xml = calls.syntax.xml
    ends = 8 * ["\n" * xml.is_framed + xml.after_value] if xml else []
    return [*calls.syntax.texts, *ends, '"', "'", "]", "}", "\n", ", ", ")", "null", "true", "1", "ab"]


def test_every_format_has_a_form() -> None:
    assert WRITTEN_FORMS.keys() == CALL_FORMATS.keys()


@pytest.mark.parametrize("kind", [SPELLED, SPECIAL])
@pytest.mark.parametrize("name", WRITTEN_FORMS)
def test_what_a_grammar_lets_a_model_write_is_read_as_valid_calls(name: str, kind: str) -> None:
    calls = calls_of(name, kind)
    read = []
    for seed in range(4):
        rng = random.Random(seed)
        tools: dict[str, Schema] = {f"f{i}": tool(rng)[0] for i in range(rng.randint(1, 3))}
        ids = calls.walk(calls.grammar(tools), rng, hints(calls))
        read += [(tools[name], arguments) for name, arguments in calls.read(ids, tools)] if ids is not None else []
    assert len(read) > 2
    for schema, arguments in read:
        jsonschema.Draft202012Validator(schema).validate(arguments)


@pytest.mark.parametrize("name", (*TAGGED, *PYTHONIC))
def test_a_call_of_any_valid_arguments_can_be_written_and_is_read_as_they_are(name: str) -> None:
    calls = calls_of(name)
    for seed in range(8):
        rng = random.Random(seed)
        schema, make = tool(rng)
        grammar = calls.grammar({"f": schema})
        for _ in range(3):
            arguments = make(rng)
            text = spelled(calls.syntax, ("f", arguments))
            assert calls.allows(grammar, text), text
            assert calls.read(calls.ids(text), {"f": schema}) == [("f", arguments)]


@pytest.mark.parametrize("name", WRITTEN_FORMS)
def test_a_grammar_demands_calls_and_several_where_they_may_be(name: str) -> None:
    calls, form = calls_of(name), WRITTEN_FORMS[name]
    several, single = calls.grammar(SCHEMAS), calls.grammar(SCHEMAS, several=False)
    weather, clock = ("weather", {"city": "Rome"}), ("clock", {})
    two = spelled(calls.syntax, weather, clock)
    weather, clock = spelled(calls.syntax, weather), spelled(calls.syntax, clock)
    assert calls.allows(several, weather) and calls.allows(single, clock)
    assert calls.allows(several, two) == form.several and not calls.allows(single, two)
    if form.several:
        assert calls.read(calls.ids(two), SCHEMAS) == [("weather", {"city": "Rome"}), ("clock", {})]
    for wrong in ("", "Hi.", weather.replace("city", "town"), weather.replace("weather", "other")):
        assert not calls.allows(several, wrong)


@pytest.mark.parametrize("name", [row.name for row in CALL_FORMATS.values() if not row.is_bare])
def test_strict_tools_are_called_within_a_text_by_their_schemas_only(name: str) -> None:
    calls = calls_of(name)
    grammar = calls.grammar(SCHEMAS, is_required=False)
    weather, wrong = (spelled(calls.syntax, ("weather", {key: "Rome"})) for key in ("city", "town"))
    for text in ("Hi.", f"Well. {weather}", f"{weather} Done."):
        assert calls.allows(grammar, text)
    for start in calls.syntax.starts:
        assert not calls.allows(grammar, f"Well. {wrong[max(0, wrong.find(start)) :]}")
        assert not calls.allows(grammar, f"Well. {start}")


def test_markers_are_parts_of_their_own() -> None:
    for name, form in WRITTEN_FORMS.items():
        texts = [part for part in (*form.opening, *form.call, *form.closing) if isinstance(part, str)]
        known = [mark for mark in CALL_FORMATS[name].markers if len(mark) > 3]
        known = [mark for mark in known if mark[-1] in ">]"]  # the others, such as <function=, cannot be tokens
        assert not [(text, mark) for text in texts for mark in known if mark in text and mark != text]


@pytest.mark.parametrize("kind", [SPELLED, SPECIAL])
@pytest.mark.parametrize("name", TAGGED)
def test_no_value_contains_the_tag_that_ends_it(name: str, kind: str) -> None:
    calls = calls_of(name, kind)
    end = calls.syntax.xml.after_value
    listed = {"type": "array", "items": {"type": "string", "maxLength": 30}}
    open_object = {"type": "object", "patternProperties": {"^x": {}}}
    kinds = (
        {"type": "string"}, {"type": "array", "items": {"type": "string"}}, listed,
        {"type": "object", "additionalProperties": True}, {"type": ["string", "array"]}, {"enum": ["a", f"b{end}"]},
        {"enum": [["a"], [f"b{end}"]]}, {"allOf": [listed, {"minItems": 1}]}, {},
    )  # fmt: skip
    for schema in kinds:
        tools: dict[str, Schema] = {"f": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
        grammar = calls.grammar(tools)
        for value in (f"b{end}", [f"b{end}"], {f"b{end}": 1}):
            wrong = calls.ids(spelled(calls.syntax, ("f", {"a": value})))
            for i, token in enumerate(wrong):  # spelled: not the special token
                if calls.text([token]) == end and i < len(wrong) - 8:
                    wrong[i : i + 1] = [calls.ids(byte)[0] for byte in end]
                    break
            matcher = calls.matcher(grammar)
            assert matcher.validate_tokens(wrong) < len(wrong)
    with pytest.raises(RefusedGrammarError, match="the argument `a`: the keyword `patternProperties`"):
        calls.grammar({"f": {"type": "object", "properties": {"a": open_object}}})


# Schemas of strings among other types, with texts between tags that have a value, and texts that have none.
UNIONS = (
    ({"anyOf": [{"type": "string"}, {"const": True}]}, ("abc", "true", "1"), ("false", " False")),
    ({"type": ["string", "integer"], "minimum": 3}, ("3", "abc"), ("1", "-7", " 12 ")),
    ({"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]}, ("abc", "null"), ("None", "abcdefg")),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, ("[1]", "a ["), ('["a"]', " [")),
    ({"enum": ["a", 1, "1"]}, ("a", "1"), ("b", "2")),
)


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_that_reads_as_another_type_is_written_only_if_this_value_is_valid(name: str) -> None:
    calls = calls_of(name)
    for schema, written, others in UNIONS:
        tools: dict[str, Schema] = {"f": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
        grammar = calls.grammar(tools)
        for text in (*written, *others):
            ids = calls.ids(spelled(calls.syntax, ("f", {"a": text})))
            assert calls.allows(grammar, calls.text(ids)) == (text in written), (schema, text)
            [(_, arguments)] = calls.read(ids, tools)
            assert text in others or jsonschema.Draft202012Validator(schema).is_valid(arguments["a"])


# Schemas of arguments that a form cannot follow, each with a word of the refusal for tags and for Python.
REFUSED = TABLES["refused"]


@pytest.mark.parametrize("name", ["qwen3-coder", "glm45", "llama4"])
def test_what_a_form_cannot_follow_is_refused_by_name_or_counts_as_any_arguments(name: str) -> None:
    calls = calls_of(name)
    for schema, for_tags, for_python in REFUSED:
        words, tools = for_tags if name in TAGGED else for_python, {"f": {"type": "object"} | schema}
        if words:
            with pytest.raises(RefusedGrammarError, match=re.escape(words)):
                calls.grammar(tools)
        grammar = calls.grammar(tools, strict=not words)
        rng = random.Random(1)
        while (ids := calls.walk(grammar, rng, hints(calls))) is None:
            pass
        assert all(name == "f" for name, _ in calls.read(ids, tools))


@pytest.mark.parametrize("name", PYTHONIC)
def test_python_has_its_own_constants_and_both_quotes(name: str) -> None:
    calls, tools = calls_of(name), {"f": {"type": "object", "properties": {"a": {}, "b": {"type": "boolean"}}}}
    grammar = calls.grammar(tools)
    text = spelled(calls.syntax, ("f", {"a": "ARGUMENT", "b": True}))
    for literal, value in (("'it\\'s'", "it's"), ('"a\\n"', "a\n"), ("[None, {'k': False}]", [None, {"k": False}])):
        written = text.replace('"ARGUMENT"', literal)
        assert "True" in written and calls.allows(grammar, written)
        assert calls.read(calls.ids(written), tools) == [("f", {"a": value, "b": True})]
    assert not calls.allows(grammar, text.replace("True", "true"))


def test_what_llguidance_itself_writes_within_a_call_of_python_is_read() -> None:
    calls, rng = calls_of("lfm2"), random.Random(3)
    part = {"allOf": [{"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}, {}]}
    tools: dict[str, Schema] = {"f": {"type": "object", "properties": {"a": part}, "required": ["a"]}}
    grammar = calls.grammar(tools)
    assert calls.allows(grammar, spelled(calls.syntax, ("f", {"a": {"n": 2.5}})))
    for _ in range(5):
        ids = calls.walk(grammar, rng, [*hints(calls), "0", "e", "9"])
        assert ids is None or calls.read(ids, tools)
