"""Every field that other servers support and this server does not, on every route: a neutral value is accepted, any
other is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from text_generation_router.api.tests.conftest import ROUTES, Route

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

NATIVE = ("/", "/generate", "/generate_stream")
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
OPENAI = (COMPLETION, CHAT)
ALL = (*NATIVE, *OPENAI)

# (field, routes, values that must be refused, neutral values)
TABLE: list[tuple[str, tuple[str, ...], list[Any], list[Any]]] = TABLES["refused"]
# Fields that change no answer, whatever they say.
TOLERATED: list[tuple[str, Any]] = TABLES["tolerated"]
# (route, unknown field in the place where it stands, its path, the known field that is proposed)
UNKNOWN: list[tuple[str, dict[str, Any], str, str]] = [*TABLES["unknown"], (CHAT, {"x" * 1000: 1}, "x" * 64, "")]
BY_PATH = {route.path: route for route in ROUTES}
REFUSED = [
    pytest.param(path, name, value, id=f"{path} {name}={value}")
    for name, paths, asking, _ in TABLE
    for path in paths
    for value in asking
]
NEUTRAL = [
    pytest.param(path, name, value, id=f"{path} {name}={value}")
    for name, paths, _, neutral in TABLE
    for path in paths
    for value in [None, *neutral]
] + [pytest.param(path, name, value, id=f"{path} {name}={value}") for name, value in TOLERATED for path in ALL]


def test_the_table_is_large():
    assert len(REFUSED) + len(NEUTRAL) + len(UNKNOWN) >= 400


def places(route: Route, name: str, value: Any) -> list[dict[str, Any]]:
    """Bodies with the field in every place where it may stand: on native routes inside `parameters` and beside
    `parameters`."""
    fields = {name: value}
    return [route.body | fields] if route.is_openais else [route.body | {"parameters": fields}, route.body | fields]


@pytest.mark.parametrize(("path", "name", "value"), REFUSED)
def test_an_unsupported_field_is_refused_by_its_name(session_server, path, name, value):
    server = session_server
    for body in places(BY_PATH[path], name, value):
        before = server.failures("validation"), len(server.engine.asked), server.metric("tgi_request_count_total")
        answer = server.post(path, body)
        # On /generate_stream errors are events, as in TGI.
        told = answer.events[0] if path == "/generate_stream" else answer.json
        if path in OPENAI:
            assert (answer.status, told["error"]["param"], told["error"]["type"]) == (
                400, name, "invalid_request_error"
            )  # fmt: skip
        else:
            assert answer.status == (200 if path == "/generate_stream" else 422)
        text = told["error"]["message"] if path in OPENAI else told["error"]
        assert text.startswith(f"Input validation error: `{name}` ") and told["error_type"] == "validation"
        assert (server.failures("validation"), len(server.engine.asked)) == (before[0] + 1, before[1])
        assert server.metric("tgi_request_count_total") > before[2]


@pytest.mark.parametrize(("path", "name", "value"), NEUTRAL)
def test_a_field_that_asks_for_nothing_is_neither_refused_nor_named(session_server, path, name, value):
    for body in places(BY_PATH[path], name, value):
        before = len(session_server.engine.asked)
        answer = session_server.post(path, body)
        assert (answer.status, answer.headers.get("x-ignored-parameters")) == (200, None)
        assert len(session_server.engine.asked) == before + 1


@pytest.mark.parametrize(("path", "fields", "name", "known"), UNKNOWN)
def test_an_unknown_field_is_named_in_a_header_or_refused(server, make_server, path, fields, name, known):
    body = BY_PATH[path].body | fields
    answer = server.post(path, body)
    assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, name)
    assert server.metrics.registry.get_sample_value("tgi_request_ignored_parameters_total", {"name": name}) == 1
    strict = make_server(strict_parameters=True)
    answer = strict.post(path, body)
    told = answer.events[0] if path == "/generate_stream" else answer.json
    text = told["error"]["message"] if path in OPENAI else told["error"]
    assert answer.status == (400 if path in OPENAI else 200 if path == "/generate_stream" else 422)
    assert f"`{name}` is not a field of this route: " in text and (not known or f"did you mean `{known}`?" in text)
    assert not strict.engine.asked and strict.failures("validation") == 1


def test_few_names_of_unknown_fields_are_kept(server, caplog):
    for number in range(100):
        fields = {f"x{number}_{i}": 1 for i in range(40)}
        assert server.ask(BY_PATH[CHAT], **fields).headers["x-ignored-parameters"].count(",") == 15
    assert len([record for record in caplog.records if "no effect" in record.getMessage()]) == 64
    assert server.metrics.registry.get_sample_value("tgi_request_ignored_parameters_total", {"name": "other"}) == 1536


def test_the_answer_says_which_field_the_route_has_instead(server):
    error = server.post(CHAT, BY_PATH[CHAT].body | {"max_new_tokens": 5}).json["error"]
    assert error["message"].endswith("`max_new_tokens` is not a field of this route, send `max_tokens`")


def test_a_field_that_is_sent_under_both_names_asks_for_nothing_more(server):
    for path, name, here in (
        (COMPLETION, "max_completion_tokens", "max_tokens"),
        (CHAT, "max_new_tokens", "max_tokens"),
    ):
        body = BY_PATH[path].body | {here: 5}
        assert server.post(path, body | {name: 5}).status == 200
        assert server.post(path, body | {name: 6}).json["error"]["param"] == name


def test_tokenize_refuses_to_leave_special_tokens_out(server):
    body = {"inputs": "Hi"}
    answer = server.post("/tokenize", body | {"add_special_tokens": False})
    assert answer.status == 422 and "`add_special_tokens`" in answer.json["error"]
    assert server.post("/tokenize", body | {"add_special_tokens": True}).json == server.post("/tokenize", body).json


def test_no_sampling_means_the_most_likely_tokens_on_openais_routes(server):
    for path in OPENAI:
        assert server.post(path, BY_PATH[path].body | {"do_sample": False, "temperature": 0.7}).status == 200
        assert not server.engine.asked[-1].request.sampling.do_sample


def test_a_native_text_keeps_its_stop_string(server):
    body = {"inputs": "Hi", "parameters": {"stop": ["x"], "include_stop_str_in_output": True}}
    assert server.post("/generate", body).status == 200


@pytest.mark.parametrize("path", OPENAI)
def test_the_warpers_of_tgi_reach_the_engine_from_openais_routes(server, path):
    body = BY_PATH[path].body
    assert server.post(path, body | {"top_k": 5, "typical_p": 0.5}).status == 200
    sampling = server.engine.asked[-1].request.sampling
    assert (sampling.top_k, sampling.typical_p) == (5, 0.5)
    for off in (0, -1):
        assert server.post(path, body | {"top_k": off, "typical_p": 1}).status == 200
        sampling = server.engine.asked[-1].request.sampling
        assert (sampling.top_k, sampling.typical_p) == (0, 1.0)
    assert server.post(path, body | {"top_k": -2}).json["error"]["param"] == "top_k"


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("warper", [{"top_p": 0.9}, {"top_k": 5}, {"typical_p": 0.5}])
def test_temperature_0_is_greedy_whatever_else_is_asked_for(server, path, warper):
    assert server.post(path, BY_PATH[path].body | {"temperature": 0} | warper).status == 200
    assert not server.engine.asked[-1].request.sampling.do_sample


@pytest.mark.parametrize("path", OPENAI)
def test_a_timeout_in_the_body_counts_on_openais_routes(server, path):
    assert server.post(path, BY_PATH[path].body | {"timeout": 5}).status == 200
    timeout_s = server.engine.asked[-1].request.timeout_s
    assert timeout_s is not None and 0 < timeout_s <= 5
    assert server.post(path, BY_PATH[path].body | {"timeout": 0}).json["error"]["param"] == "timeout"
