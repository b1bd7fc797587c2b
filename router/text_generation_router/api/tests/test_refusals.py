"""Every field that other servers support and this server does not, on every route: a neutral value is accepted, any
other is refused by name.
"""

from typing import Any

import pytest

from text_generation_router.api.tests.conftest import ROUTES, Route

NATIVE = ("/", "/generate", "/generate_stream")
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
OPENAI = (COMPLETION, CHAT)
ALL = (*NATIVE, *OPENAI)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "object", "properties": {}}

# (fields, routes, values that must be refused, neutral values)
TABLE: list[tuple[str, tuple[str, ...], list[Any], list[Any]]] = [
    ("grammar", ALL, [{"type": "regex", "value": "a"}, {"type": "json", "value": SCHEMA}, "root ::= a"], []),
    ("guided_json", ALL, [SCHEMA, "{}"], []),
    ("guided_regex", ALL, ["a+"], []),
    ("guided_choice", ALL, [["yes", "no"], []], []),
    ("guided_grammar", ALL, ["root ::= a"], []),
    ("guided_decoding_backend", ALL, ["xgrammar"], []),
    ("guided_whitespace_pattern", ALL, [" ?"], []),
    ("structured_outputs", ALL, [{"regex": "a"}, {"json": SCHEMA}], []),
    (
        "response_format",
        ALL,
        [
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            {"type": "json", "value": SCHEMA},
            {"type": "regex", "value": "a"},
            {"type": "text", "value": SCHEMA},
            {"type": "grammar"},
            {},
            [],
            "json",
            1,
        ],
        [{"type": "text"}],
    ),
    ("json_schema", ALL, ["{}"], []),
    ("regex", ALL, ["a"], []),
    ("ebnf", ALL, ["root ::= a"], []),
    ("structural_tag", ALL, ["{}"], []),
    ("adapter_id", ALL, ["lora", ""], []),
    ("lora_path", ALL, ["lora"], []),
    ("tools", ALL, [[TOOL]], [[]]),
    ("tool_choice", ALL, ["required", "f", {"type": "function", "function": {"name": "f"}}], ["none", "auto"]),
    ("tool_prompt", ALL, ["Use tools."], [""]),
    ("functions", ALL, [[TOOL]], [[]]),
    ("function_call", ALL, [{"name": "f"}], ["none", "auto"]),
    ("chat_template", ALL, ["{{ messages }}"], []),
    ("chat_template_kwargs", ALL, [{"enable_thinking": False}], [{}]),
    ("documents", ALL, [[{"text": "a"}]], [[]]),
    ("truncate_prompt_tokens", ALL, [5, -1], []),
    ("prompt_logprobs", ALL, [0, 1], []),
    ("echo", ALL, [True], [False]),
    ("n", ALL, [2, True, 0], [1]),
    ("num_return_sequences", ALL, [2], [1]),
    ("logits_processors", ALL, [["x"]], [[]]),
    ("use_beam_search", ALL, [True], [False]),
    ("length_penalty", ALL, [2.0], [1, 1.0]),
    ("early_stopping", ALL, [True], [False]),
    ("min_tokens", NATIVE, [1], [0]),
    ("min_new_tokens", OPENAI, [1], [0]),
    ("skip_special_tokens", ALL, [False], [True]),
    ("return_token_ids", ALL, [True], [False]),
    ("return_tokens_as_token_ids", ALL, [True], [False]),
    ("include_stop_str_in_output", ALL, ["no", 1], [True, False]),
    ("add_special_tokens", (*NATIVE, COMPLETION), [False], [True]),
    ("add_special_tokens", (CHAT,), [True], [False]),
    ("add_generation_prompt", (*NATIVE, COMPLETION), [True], [False]),
    ("add_generation_prompt", (CHAT,), [False], [True]),
    ("continue_final_message", ALL, [True], [False]),
    ("stop_sequences", ALL, [["x"]], [[]]),
    ("max_tokens", NATIVE, [5], []),
    ("max_completion_tokens", (*NATIVE, COMPLETION), [5], []),
    ("logprobs", NATIVE, [True, 2], [False, 0]),
    ("top_logprobs", (*NATIVE, COMPLETION), [2], [0]),
    ("ignore_eos", NATIVE, [True], [False]),
    ("best_of", OPENAI, [2], [1]),
    ("watermark", OPENAI, [True], [False]),
    ("truncate", OPENAI, [5], []),
    ("return_full_text", OPENAI, [True], [False]),
    ("decoder_input_details", OPENAI, [True], [False]),
    ("max_new_tokens", OPENAI, [5], []),
    ("do_sample", OPENAI, [False], [True]),
    ("ignore_eos_token", OPENAI, [True], [False]),
    ("top_n_tokens", OPENAI, [2], [0]),
]
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
]


def places(route: Route, name: str, value: Any) -> list[dict[str, Any]]:
    """Bodies with the field in every place where it may stand: on native routes inside `parameters` and beside
    `parameters`.
    """
    fields = {name: value}
    return [route.body | fields] if route.is_openais else [route.body | {"parameters": fields}, route.body | fields]


@pytest.mark.parametrize(("path", "name", "value"), REFUSED)
def test_an_unsupported_field_is_refused_by_its_name(session_server, path, name, value):
    server = session_server
    for body in places(BY_PATH[path], name, value):
        before = server.failures("validation"), len(server.engine.asked), server.metric("tgi_request_count_total")
        answer = server.post(path, body)
        error = answer.events[0] if path == "/generate_stream" else answer.json
        assert answer.status == (
            200 if path == "/generate_stream" else 422
        )  # on /generate_stream errors are events, as in TGI
        assert error["error"].startswith(f"Input validation error: `{name}` ") and error["error_type"] == "validation"
        assert (server.failures("validation"), len(server.engine.asked)) == (before[0] + 1, before[1])
        assert server.metric("tgi_request_count_total") > before[2]


@pytest.mark.parametrize(("path", "name", "value"), NEUTRAL)
def test_a_field_that_asks_for_nothing_is_not_refused(session_server, path, name, value):
    for body in places(BY_PATH[path], name, value):
        before = len(session_server.engine.asked)
        assert session_server.post(path, body).status == 200
        assert len(session_server.engine.asked) == before + 1


def test_the_answer_says_which_field_the_route_has_instead(server):
    error = server.post(CHAT, BY_PATH[CHAT].body | {"max_new_tokens": 5}).json["error"]
    assert error.endswith("`max_new_tokens` is not a field of this route, send `max_tokens`")


def test_a_field_that_is_sent_under_both_names_asks_for_nothing_more(server):
    for path, name, here in (
        (COMPLETION, "max_completion_tokens", "max_tokens"),
        (CHAT, "max_new_tokens", "max_tokens"),
    ):
        body = BY_PATH[path].body | {here: 5}
        assert server.post(path, body | {name: 5}).status == 200
        assert f"`{name}`" in server.post(path, body | {name: 6}).json["error"]


def test_no_sampling_is_temperature_0_on_openais_routes(server):
    for path in OPENAI:
        body = BY_PATH[path].body | {"do_sample": False}
        assert server.post(path, body | {"temperature": 0}).status == 200
        assert not server.engine.asked[-1].request.sampling.do_sample
        assert "`temperature` 0" in server.post(path, body | {"temperature": 1}).json["error"]


def test_unknown_field_names_are_ignored(server, route):
    assert server.ask(route, favourite_colour="red", user="x", metadata={"a": "b"}).status == 200


def test_a_stop_string_cannot_be_cut_off_yet(server):
    for path in OPENAI:
        body = BY_PATH[path].body | {"stop": ["x"]}
        assert server.post(path, body | {"include_stop_str_in_output": False}).status == 422
        assert server.post(path, body | {"include_stop_str_in_output": True}).status == 200


def test_fields_about_the_next_turn_must_agree_with_the_last_message(server):
    user, assistant = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    for messages, continued in (([user], False), ([user, assistant], True)):
        said = {"messages": messages, "add_generation_prompt": not continued, "continue_final_message": continued}
        assert server.post(CHAT, said).status == 200
        for name in ("add_generation_prompt", "continue_final_message"):
            answer = server.post(CHAT, said | {name: not said[name]})
            assert answer.status == 422 and f"`{name}` must be" in answer.json["error"]


def test_tokenize_refuses_to_leave_special_tokens_out(server):
    body = {"inputs": "Hi"}
    answer = server.post("/tokenize", body | {"add_special_tokens": False})
    assert answer.status == 422 and "`add_special_tokens`" in answer.json["error"]
    assert server.post("/tokenize", body | {"add_special_tokens": True}).json == server.post("/tokenize", body).json


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
    assert "`top_k`" in server.post(path, body | {"top_k": -2}).json["error"]


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
    assert "`timeout`" in server.post(path, BY_PATH[path].body | {"timeout": 0}).json["error"]
