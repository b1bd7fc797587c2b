"""The fields that set the form of the text: what the engine gets for each, and how a wrong value is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from text_generation_router.api.common.body import LARGE_BYTES
from text_generation_router.api.common.form_fields import READERS
from text_generation_router.api.tests.conftest import ROUTES, Route
from text_generation_router.text.grammars.asked import MAX_BYTES, GrammarKind
from text_generation_router.text.grammars.tests.matching import grammar_of

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

NATIVE = [route for route in ROUTES if not route.is_openais]
OPENAI = [route for route in ROUTES if route.path in ("/v1/completions", "/v1/chat/completions")]
COMPLETION = OPENAI[0]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
BAD = {"type": "array", "uniqueItems": True}
GBNF = 'root ::= "a" | "b"'
OF_SCHEMA = grammar_of(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))
ANY_OBJECT = grammar_of(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
OF_REGEX = grammar_of(GrammarKind.REGEX, "a+")
OF_CHOICE = grammar_of(GrammarKind.CHOICE, '["a","b"]')
OF_RULES = grammar_of(GrammarKind.RULES, GBNF)


def tgis(kind: str, *value: Any) -> dict[str, Any]:
    return {"type": kind} | ({"value": value[0]} if value else {})


TGI_SHAPES = [
    (tgis("json", SCHEMA), OF_SCHEMA),
    (tgis("json", json.dumps(SCHEMA, separators=(",", ":"))), OF_SCHEMA),
    (tgis("json_object", SCHEMA), OF_SCHEMA),
    (tgis("json_schema", SCHEMA), OF_SCHEMA),
    (tgis("json_schema", {"name": "age", "schema": SCHEMA, "strict": True}), OF_SCHEMA),
    (tgis("json_object"), ANY_OBJECT),
    (tgis("regex", "a+"), OF_REGEX),
    (None, ""),
]
OPENAI_FIELDS = [
    *[({"response_format": shape}, grammar) for shape, grammar in TGI_SHAPES],
    *[({"grammar": shape}, grammar) for shape, grammar in TGI_SHAPES],
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, OF_SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "text"}, "regex": "a+"}, OF_REGEX),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, OF_SCHEMA),
    ({"structured_outputs": {"regex": "a+", "backend": "xgrammar", "disable_any_whitespace": False}}, OF_REGEX),
    ({"structured_outputs": {"choice": ["a", "b"], "json_object": False}}, OF_CHOICE),
    ({"structured_outputs": {"grammar": GBNF}}, OF_RULES),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT), ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": json.dumps(SCHEMA, separators=(",", ":")), "response_format": {"type": "text"}}, OF_SCHEMA),
    ({"guided_regex": "a+"}, OF_REGEX), ({"guided_choice": ["a", "b"]}, OF_CHOICE),
    ({"guided_grammar": GBNF}, OF_RULES), ({"json_schema": SCHEMA}, OF_SCHEMA), ({"regex": "a+"}, OF_REGEX),
    ({"ebnf": GBNF}, OF_RULES), ({"grammar": GBNF}, OF_RULES), (dict.fromkeys(READERS), ""),
]  # fmt: skip


def refused(server, route: Route, fields: dict[str, Any]) -> tuple[str, str | None]:
    """The text of the refusal, and the field that it names in OpenAI's way."""
    before = len(server.engine.asked), server.failures("validation")
    answer = server.post(route.path, route.body | fields)
    told = answer.events[0] if route.fails_as_event else answer.json
    assert answer.status == (200 if route.fails_as_event else route.status(422)), answer.body
    assert (len(server.engine.asked), server.failures("validation")) == (before[0], before[1] + 1)
    assert told["error_type"] == "validation"
    if route.is_openais and not server.config.http.tgi_dialect:
        return told["error"]["message"].removeprefix("Input validation error: "), told["error"]["param"]
    return told["error"].removeprefix("Input validation error: "), None


@pytest.mark.parametrize("route", NATIVE, ids=lambda route: route.path)
@pytest.mark.parametrize(("shape", "grammar"), TGI_SHAPES)
def test_native_routes_take_tgis_grammars(session_server, route, shape, grammar):
    assert session_server.ask(route, parameters={"grammar": shape}).status == 200
    assert session_server.engine.asked[-1].request.sampling.grammar == grammar


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route.path)
@pytest.mark.parametrize(("fields", "grammar"), OPENAI_FIELDS)
def test_v1_takes_the_fields_of_each_server(session_server, route, fields, grammar):
    answer = session_server.ask(route, **fields)
    assert (answer.status, answer.headers.get("x-ignored-parameters")) == (200, None)
    assert session_server.engine.asked[-1].request.sampling.grammar == grammar


@pytest.mark.parametrize("route", NATIVE, ids=lambda route: route.path)
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (tgis("json", BAD), "grammar is not valid: Grammar must have a 'properties' field"),
        (tgis("json", "{"), "grammar is not valid: the schema is not valid JSON: unexpected end of data"),
        (tgis("json", BAD | {"properties": {}}), "grammar is not valid: the schema's keyword `uniqueItems` is not"),
        (tgis("json", 5), "grammar is not supported"),
        (tgis("json"), "grammar is not supported"),
        (tgis("json_schema", None), "grammar is not supported"),
        (tgis("regex", "a("), "grammar is not valid: a regular expression cannot be read: unclosed group"),
        (tgis("regex", {}), "grammar is not valid: it must be a string"),
        (tgis("lark", "a"), "grammar is not valid: `type` must be json, json_object, json_schema or regex"),
        ({}, "grammar is not valid: `type` must be json, json_object, json_schema or regex"),
        (tgis("regex", "a" * MAX_BYTES), "grammar is not valid: it has "),
    ],
)
def test_native_routes_refuse_grammars_in_tgis_words(make_server, route, shape, text):
    server = make_server(payload_limit=10**6)
    told, _ = refused(server, route, {"parameters": {"grammar": shape}})
    assert told.startswith(text)


DEEP: Any = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route.path)
@pytest.mark.parametrize(("strict", "size"), [({}, 0), ({"strict": None}, 0), ({"strict": False}, LARGE_BYTES)])
def test_what_cannot_be_followed_is_left_out_and_named_unless_strict(make_server, route, strict, size):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    loose = copy.deepcopy(schema)
    loose["properties"]["a"] |= {"uniqueItems": True}
    loose |= {"not": {"required": ["b"]}}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": loose} | strict}}
    server, more = make_server(payload_limit=10**6), {"x" * size: 1} if size else {}
    for stream in (False, True):
        answer = server.ask(route, **form, **more, stream=stream)
        named = answer.headers["x-ignored-parameters"].removeprefix("x" * 64 + ", ").split(", ")
        assert (answer.status, named[-2:]) == (200, ["response_format.not", "response_format.uniqueItems"])
        grammar = server.engine.asked[-1].request.sampling.grammar
        assert grammar == grammar_of(GrammarKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":")))
    told, named = refused(make_server(strict_parameters=True), route, form)
    assert (told, named) == ("`response_format.not` is not supported", "response_format.not")


@pytest.mark.parametrize("route", OPENAI, ids=lambda route: route.path)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *TABLES["refused"],
        ({"guided_json": {"enum": DEEP}}, "`guided_json`: the schema has more than 64 levels"),
        ({"response_format": tgis("json", BAD)}, "`response_format`: Grammar must have a 'properties' field"),
        ({"regex": "a" * (MAX_BYTES - 1)}, f"`regex`: it has {MAX_BYTES + 1} bytes, at most {MAX_BYTES}"),
    ],
)
def test_v1_refuses_by_the_field_and_the_reason(make_server, route, fields, text):
    told, named = refused(make_server(payload_limit=10**6), route, fields)
    assert told.startswith(text) and named == text.split("`")[1]


def test_in_tgis_dialect_errors_have_tgis_words(make_server):
    server = make_server(tgi_dialect=True)
    told, _ = refused(server, Route("/generate", COMPLETION.body), {"inputs": "Hi", "parameters": {"grammar": {}}})
    answer = server.ask(COMPLETION, response_format=tgis("json", BAD))
    assert told.startswith("grammar is not valid: ")
    assert (answer.status, answer.json["error"]) == (
        422,
        "Input validation error: grammar is not valid: Grammar must have a 'properties' field",
    )


@pytest.mark.parametrize("route", [*NATIVE, *OPENAI], ids=lambda route: route.path)
def test_a_server_without_grammars_refuses_them_all(make_server, route):
    server = make_server(disable_grammar_support=True)
    fields = {"regex": "a"} if route.is_openais else {"parameters": {"grammar": tgis("regex", "a")}}
    assert refused(server, route, fields)[0] == "grammar is not supported"
    assert server.ask(route, **dict.fromkeys(fields)).status in (200, 422)  # `parameters` must not be null
    if route.is_openais:
        assert server.ask(route, response_format={"type": "text"}).status == 200


@pytest.mark.parametrize("route", [*NATIVE, *OPENAI], ids=lambda route: route.path)
def test_grammars_that_the_shards_cannot_serve_are_refused_before_the_queue(server, route):
    server.engine.grammar_refusal = "grammars are not supported for this model's tokenizer.json: no bytes"
    fields = {"regex": "a"} if route.is_openais else {"parameters": {"grammar": tgis("regex", "a")}}
    assert server.engine.grammar_refusal in refused(server, route, fields)[0]
    assert server.engine.asked == []


def test_all_texts_of_a_request_share_one_checked_grammar(server):
    drawn = {"grammar": tgis("regex", "a+"), "best_of": 2, "do_sample": True}
    assert server.ask(NATIVE[1], parameters=drawn).status == 200
    assert server.ask(COMPLETION, prompt=["a", "b"], n=2, regex="a+").status == 200
    grammars = [asked.request.sampling.grammar for asked in server.engine.asked]
    assert len(grammars) == 6 and set(grammars) == {OF_REGEX} and len({id(one) for one in grammars}) == 1


@pytest.mark.parametrize("size", [0, LARGE_BYTES])
def test_bodies_of_every_size_and_of_clouds_have_grammars(make_server, size):
    server = make_server(payload_limit=10**6)
    more = {"x" * size: 1}
    native, chat = {"grammar": tgis("json", SCHEMA)}, {"messages": [{"role": "user", "content": "Hi"}]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    bodies: list[tuple[str, dict[str, Any], int]] = [
        ("/generate", {"inputs": "Hi", "parameters": native}, 1),
        ("/v1/chat/completions", chat | form, 1),
        ("/invocations", {"inputs": "Hi", "parameters": native}, 1),
        ("/invocations", chat | form, 1),
        ("/vertex", {"instances": [{"inputs": "Hi", "parameters": native}, chat | form]}, 2),
    ]
    for path, body, count in bodies:
        done = len(server.offload.done)
        assert server.post(path, body | more).status == 200
        assert len(server.offload.done) == done + bool(size)
        assert [asked.request.sampling.grammar for asked in server.engine.asked[-count:]] == [OF_SCHEMA] * count


def test_a_grammar_beside_parameters_is_not_passed_over(server):
    told, _ = refused(server, NATIVE[1], {"grammar": tgis("regex", "a")})
    assert told == "`grammar` is a field of `parameters`"
