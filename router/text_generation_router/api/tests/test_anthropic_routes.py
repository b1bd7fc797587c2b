"""/v1/messages and /v1/messages/count_tokens through the application."""

import asyncio
import json
from functools import partial

import pytest

from text_generation_router.api.common import answer
from text_generation_router.api.tests.conftest import HEADERS
from text_generation_router.engine.protocol import Ended
from text_generation_router.http.sse import EventStream
from text_generation_router.scheduling.request import EndReason, Share

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "Hi"}]


def body(**fields):
    return {"messages": USER, "max_tokens": 2} | fields


def prompt_of(server):
    ids = list(server.engine.asked[-1].request.input_ids)
    return server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_message_has_the_shape_of_the_contract(server):
    server.engine.script.cached_tokens = 3
    answer = server.post(PATH, body(model="claude"), HEADERS | {"anthropic-version": "2023-06-01"})
    prompt_tokens = len(server.engine.asked[0].request.input_ids)
    assert answer.json == {
        "id": "msg_test",
        "type": "message",
        "role": "assistant",
        "model": "local/model",
        "content": [{"type": "text", "text": " there!"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "test"
    assert answer.headers["x-ignored-parameters"] == "model"
    assert server.metric("tgi_request_count_total") == 1 and server.metric("tgi_request_success_total") == 1


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        *((path, {"messages": USER}) for path in (COUNT, "/chat_tokenize")),
        *((path, {"inputs": "Hi"}) for path in ("/tokenize", "/generate")),
        ("/detokenize", {"tokens": [5]}),
        (PATH, body()),
    ],
)
def test_only_a_route_that_generates_takes_a_half_closed_client_for_one_that_left(server, monkeypatch, path, asked):
    marked: list[object] = []
    monkeypatch.setattr(answer, "end_at_half_close", marked.append)
    assert server.post(path, asked).status == 200
    assert bool(marked) is (path in (PATH, "/generate"))


def test_a_stream_is_the_answer_in_parts(server):
    server.engine.script.cached_tokens = 3
    whole = server.post(PATH, body()).json
    start, ping, begun, *deltas, ended, last, stop = server.post(PATH, body(stream=True)).events
    assert ping == {"type": "ping"}
    usage = whole["usage"]
    assert start["message"] == whole | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    assert begun["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in deltas) == whole["content"][0]["text"]
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and last["usage"] == usage
    assert (ended["type"], stop) == ("content_block_stop", {"type": "message_stop"})


@pytest.mark.parametrize("hang_after", [0, 1])
def test_silence_is_filled_with_pings_before_and_behind_the_first_token(server, monkeypatch, hang_after):
    monkeypatch.setattr(answer, "EventStream", partial(EventStream, keep_alive_s=0.01))
    server.engine.script.hang_after = hang_after
    content = json.dumps(body(stream=True)).encode()
    chunks = asyncio.run(server.call("POST", PATH, content, leave_after=4)).chunks
    assert chunks[hang_after:] == [b'event: ping\ndata: {"type":"ping"}\n\n'] * (4 - hang_after)


def test_the_template_makes_the_prompt(server):
    server.post(PATH, body(system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert prompt_of(server) == "<system>a\n\nb</s><user>Hi</s><assistant>"
    server.post(PATH, body(messages=[*USER, {"role": "assistant", "content": "He"}]))
    assert prompt_of(server) == "<user>Hi</s><assistant>He"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "reason", "stop", "text"),
    [
        ({"last_is_special": True, "reason": EndReason.EOS_TOKEN}, {}, "end_turn", None, " there"),
        ({}, {}, "max_tokens", None, " there!"),
        ({}, {"max_tokens": 20}, "model_context_window_exceeded", None, " there!"),
        ({"expires": True}, {}, "max_tokens", None, " there!"),
        ({}, {"max_tokens": 9, "stop_sequences": ["xyz", "er", "re"]}, "stop_sequence", "er", " th"),
        ({}, {"max_tokens": 9, "stop_sequences": ["e!"]}, "stop_sequence", "e!", " ther"),
        ({"texts": ("</s>",), "last_is_special": True, "reason": EndReason.EOS_TOKEN}, {}, "end_turn", None, ""),
    ],
)
def test_a_message_says_why_it_ended(server, script, fields, reason, stop, text, stream):
    for name, value in script.items():
        setattr(server.engine.script, name, value)
    answer = server.post(PATH, body(stream=stream, **fields))
    if stream:
        told = next(event["delta"] for event in answer.events if event["type"] == "message_delta")
        texts = [event["delta"]["text"] for event in answer.events if event["type"] == "content_block_delta"]
        assert "".join(texts) == text and all(texts)
    else:
        told = answer.json
        assert told["content"] == [{"type": "text", "text": text}]
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, stop)


def test_the_tgi_dialect_changes_nothing(server, make_server):
    tgis = make_server(tgi_dialect=True)
    for asked in (body(), body(stream=True), body(stop_sequences=["er"]), body(max_tokens=0), {}):
        first, second = (one.post(PATH, asked, HEADERS) for one in (server, tgis))
        assert (first.status, first.body) == (second.status, second.body)


def test_a_prompt_is_counted_with_the_same_tokens(server):
    asked = {"system": "a", "messages": USER}
    answer = server.post(COUNT, asked)
    assert server.post(PATH, asked | {"max_tokens": 1}).status == 200
    assert answer.json == {"input_tokens": len(server.engine.asked[-1].request.input_ids)}
    assert server.permits.left == 4 and server.metric("tgi_request_count_total") == 2
    assert server.post(COUNT, asked | {"max_tokens": 5, "stream": True}).status == 200


def test_a_long_conversation_is_counted_too(make_server):
    server = make_server(payload_limit=10**6)
    asked = {"messages": [{"role": "user", "content": "a" * 70_000}]}
    assert server.post(COUNT, asked).json["input_tokens"] > 70_000 / 3 and server.offload.done == ["count_tokens"]


def test_no_permit_is_an_error_of_anthropics(server):
    permit = server.permits.take(Share("peer 192.0.2.1"), 4)
    permit.begin()
    for path in (PATH, COUNT):
        answer = server.post(path, body())
        assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"]


ERRORS = [
    (PATH, {}, 400, "invalid_request_error", "max_tokens: Field required"),
    (PATH, {"max_tokens": 1}, 400, "invalid_request_error", "messages: Field required"),
    (PATH, body(messages=[]), 400, "invalid_request_error", "messages: List should have at least 1 item"),
    (PATH, b"{", 400, "invalid_request_error", "Failed to parse"),
    (PATH, body(max_tokens=0), 400, "invalid_request_error", "`max_tokens` must be strictly positive"),
    (PATH, body(max_tokens="9"), 400, "invalid_request_error", "max_tokens: Input should be a valid integer"),
    (PATH, body(stop_sequences=["a"] * 9), 400, "invalid_request_error", "`stop_sequences` supports up to 4"),
    (PATH, body(stop_sequences=[""]), 400, "invalid_request_error", "`stop_sequences` must not contain an empty"),
    (PATH, body(temperature=-1), 400, "invalid_request_error", "`temperature` must be >= 0.0"),
    (PATH, body(messages=[{"role": "bad", "content": "a"}]), 400, "invalid_request_error", "messages[0].role: "),
    (PATH, body(messages=[{"role": "user", "content": 1}]), 400, "invalid_request_error", "a string or a list"),
    (PATH, body(messages=[{"role": "user", "content": "a" * 200}]), 400, "invalid_request_error", "prompt is too long"),
    (COUNT, {}, 400, "invalid_request_error", "messages: Field required"),
    (PATH + "/batches", {}, 404, "not_found_error", "There is no such route"),
]


@pytest.mark.parametrize(("path", "asked", "status", "kind", "text"), ERRORS)
def test_errors_have_anthropics_envelope(server, path, asked, status, kind, text):
    answer = server.post(path, asked)
    told = answer.json
    assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert text in told["error"]["message"] and told["request_id"] == answer.headers["request-id"] == "test"
    assert not server.engine.asked


def test_a_wrong_method_a_large_body_and_a_closed_server_are_told_in_the_same_way(server):
    get = server.get(PATH)
    assert (get.status, get.headers["allow"], get.json["error"]["type"]) == (405, "POST", "invalid_request_error")
    large = server.post(PATH, body(messages=[{"role": "user", "content": "a" * 20_000}]))
    assert (large.status, large.json["error"]["type"]) == (413, "request_too_large")
    server.gate.shut()
    closed = server.post(PATH, body())
    assert (closed.status, closed.json["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "status", "kind"),
    [(Ended(EndReason.FAILED, cause="boom"), 500, "api_error"), (Ended(EndReason.DEADLINE), 504, "timeout_error")],
)
def test_a_failure_is_an_error_or_an_event(server, end, status, kind, stream):
    server.engine.script.ends_after = (0, end)
    answer = server.post(PATH, body(stream=stream))
    told = answer.events[-1] if stream else answer.json
    assert answer.status == (200 if stream else status)
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", kind, "test")
    assert server.permits.left == 4


def test_a_stream_that_fails_on_its_way_ends_with_the_error(server):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    kinds = [event["type"] for event in server.post(PATH, body(stream=True)).events]
    assert kinds == ["message_start", "ping", "content_block_start", "content_block_delta", "error"]


def test_unknown_fields_are_named_with_their_place(server):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "x": 1}]},
        {"role": "user", "content": "b", "y": 1},
    ]
    answer = server.post(PATH, body(messages=messages, system=[{"type": "text", "text": "c", "z": 1}], max_token=3))
    assert answer.headers["x-ignored-parameters"] == ("max_token, system[0].z, messages[0].content[0].x, messages[1].y")
