"""/v1/responses through the application."""

import pytest

from text_generation_router.api.tests.conftest import HEADERS
from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"


def body(**fields):
    return {"input": "Hi"} | fields


def prompt_of(server):
    ids = list(server.engine.asked[-1].request.input_ids)
    return server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)


def without_time(value):
    assert value.pop("created_at") > 1_600_000_000
    return value


def test_an_answer_has_the_shape_of_the_contract(server):
    server.engine.script.cached_tokens = 3
    answer = server.post(
        PATH, body(model="gpt", instructions="Be short.", metadata={"a": "b"}, max_output_tokens=2, temperature=0.5)
    )
    prompt_tokens = len(server.engine.asked[0].request.input_ids)
    part = {"type": "output_text", "text": " there!", "annotations": [], "logprobs": []}
    item = {"id": "msg_test_0", "type": "message", "status": "incomplete", "role": "assistant", "content": [part]}
    assert without_time(answer.json) == {
        "id": "resp_test",
        "object": "response",
        "status": "incomplete",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": "Be short.",
        "max_output_tokens": 2,
        "metadata": {"a": "b"},
        "model": "local/model",
        "output": [item],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + 2,
        },
    }


@pytest.mark.parametrize("fields", [{}, {"include": [LOGPROBS], "top_logprobs": 2, "instructions": "a"}])
@pytest.mark.parametrize("ending", [{}, {"last_is_special": True, "reason": EndReason.EOS_TOKEN}, {"expires": True}])
def test_a_stream_is_the_answer_in_parts(server, ending, fields):
    for name, value in ending.items():
        setattr(server.engine.script, name, value)
    whole = server.post(PATH, body(**fields)).json
    events = server.post(PATH, body(stream=True, **fields)).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == f"response.{whole['status']}"
    told = events[-1]["response"]
    assert told | {"created_at": whole["created_at"]} == whole
    told = [event["response"]["instructions"] for event in events if "response" in event]
    assert told == [fields.get("instructions")] * 3
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    part = whole["output"][0]["content"][0]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) == (2 if fields else 0)
    assert whole["status"] == ("completed" if "reason" in ending else "incomplete")


def test_log_probabilities_are_those_of_chats(server):
    asked = {"top_logprobs": 1, "include": [LOGPROBS]}
    part = server.post(PATH, body(**asked)).json["output"][0]["content"][0]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
    assert part["logprobs"] == server.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]


def test_the_template_makes_the_prompt(server):
    server.post(PATH, body(instructions="a"))
    assert prompt_of(server) == "<system>a</s><user>Hi</s><assistant>"


def test_the_tgi_dialect_changes_nothing(server, make_server, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    tgis = make_server(tgi_dialect=True)
    for asked in (body(), body(stream=True), body(max_output_tokens=0), {}, body(store=True)):
        first, second = (one.post(PATH, asked, HEADERS) for one in (server, tgis))
        assert (first.status, first.body) == (second.status, second.body)


ERRORS = [
    ({}, 400, "input", "Field required"),
    (body(input=[]), 400, "input", "at least 1 item"),
    (body(input=3), 400, "input", "a string or a list of items"),
    (body(input=[{"type": "x"}]), 400, "input[0]", "one of message"),
    (body(max_output_tokens=0), 400, "max_output_tokens", "must be strictly positive"),
    (body(input="a" * 200), 400, "input", "exceeds the available context size"),
    (body(previous_response_id="resp_1"), 400, "previous_response_id", "send the whole conversation in `input`"),
    (body(store=True), 400, "store", "answers are not stored"),
    (body(top_logprobs=2), 400, "top_logprobs", "allowed only if `include` has"),
    (body(text={"format": {"type": "json"}}), 400, "text.format", "must have a `type` of text"),
    (body(reasoning={"effort": "most"}), 400, "reasoning.effort", "Input should be"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "status", "param", "text"), ERRORS)
def test_errors_are_openais(server, asked, status, param, text):
    answer = server.post(PATH, asked)
    told = answer.json["error"]
    assert (answer.status, told["param"], told["type"]) == (status, param, "invalid_request_error")
    assert text in told["message"] and not server.engine.asked


def test_other_routes_of_responses_are_not_there(server):
    for method, path in (("GET", PATH + "/resp_1"), ("POST", PATH + "/resp_1/cancel"), ("DELETE", PATH + "/resp_1")):
        answer = server.get(path, method)
        assert (answer.status, answer.json["error"]["type"]) == (404, "invalid_request_error")


def test_a_failure_is_an_error_or_the_last_event(server):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    answer = server.post(PATH, body())
    assert (answer.status, answer.headers["x-should-retry"]) == (500, "false")
    last = server.post(PATH, body(stream=True)).events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error" and "boom" in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["content"][0]["text"] == " there" and server.permits.left == 4


def test_unknown_fields_are_named_with_their_place(server):
    result = {"type": "function_call_output", "call_id": "c", "output": "b", "y": 1}
    items = [{"role": "user", "content": "a", "x": 1}, result]
    answer = server.post(PATH, body(input=items, text={"z": 1}, max_output_token=3))
    assert answer.headers["x-ignored-parameters"] == "max_output_token, text.z, input[0].x, input[1].y"
