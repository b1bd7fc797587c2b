"""The OpenAI routes speak OpenAI's dialect or TGI's: both clients read both, and make the same values of them."""

import json
from typing import Any

import pytest

from text_generation import Client, errors
from text_generation.types import ChatComplete, Completion

MESSAGES = [{"role": "user", "content": "hi"}]
OPENAI = {"id": "chatcmpl-1", "created": 1, "model": "m"}
TGI = {"id": "", "created": 1, "model": "m", "system_fingerprint": "1-native"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


def chunk(head: dict[str, Any], delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return head | {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
    }


def completed(head: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return head | {"object": "text_completion", "choices": [choice]}


CHAT_STREAMS = {
    "openai": [
        chunk(OPENAI, {"role": "assistant", "content": ""}),
        chunk(OPENAI, {"content": "O"}),
        chunk(OPENAI, {"content": "K"}),
        chunk(OPENAI, {}, "stop"),
        OPENAI | {"object": "chat.completion.chunk", "choices": [], "usage": USAGE},
    ],
    "tgi": [
        chunk(TGI, {"role": "assistant", "content": "O"}),
        chunk(TGI, {"role": "assistant", "content": "K"}, "stop"),
        TGI | {"object": "chat.completion.chunk", "choices": [], "usage": USAGE},
    ],
}
COMPLETION_STREAMS = {
    "openai": [
        completed(OPENAI, "O", None),
        completed(OPENAI, "K", "stop"),
        OPENAI | {"object": "text_completion", "choices": [], "usage": USAGE},
    ],
    "tgi": [completed(TGI, "O", ""), completed(TGI, "K", "stop") | {"usage": USAGE}],
}


def sse(payloads: list[Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("dialect", ["openai", "tgi"])
def test_a_chat_is_the_same_value_in_both_dialects_whole_or_as_a_stream(caller: Any, fake: Any, dialect: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "OK"}, "finish_reason": "stop"}
    head = {"openai": OPENAI, "tgi": TGI}[dialect]
    body = head | {"object": "chat.completion", "choices": [choice], "usage": USAGE}
    whole = caller.call("chat", MESSAGES, client=fake(body=json.dumps(body).encode()).options)
    server = fake(body=sse(CHAT_STREAMS[dialect]))
    final = caller.call("chat", MESSAGES, stream=True, then="final", client=server.options)
    assert isinstance(final, ChatComplete) and final == whole
    pieces = caller.call("chat", MESSAGES, stream=True, then="text", client=server.options)
    assert pieces == ["O", "K"]


@pytest.mark.parametrize("dialect", ["openai", "tgi"])
def test_a_completion_is_the_same_value_in_both_dialects_whole_or_as_a_stream(
    caller: Any, fake: Any, dialect: str
) -> None:
    body = completed({"openai": OPENAI, "tgi": TGI}[dialect], "OK", "stop") | {"usage": USAGE}
    whole = caller.call("completion", "hi", client=fake(body=json.dumps(body).encode()).options)
    server = fake(body=sse(COMPLETION_STREAMS[dialect]))
    final = caller.call("completion", "hi", stream=True, then="final", client=server.options)
    assert isinstance(final, Completion) and final == whole
    pieces = caller.call("completion", "hi", stream=True, then="text", client=server.options)
    assert pieces == ["O", "K"]


def call_parts(head: dict[str, Any], *parts: dict[str, Any]) -> list[Any]:
    return [chunk(head, {"tool_calls": [part]}) for part in parts] + [chunk(head, {}, "tool_calls")]


@pytest.mark.parametrize(
    "events",
    [
        call_parts(
            OPENAI,
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": '{"a":'}},
            {"index": 0, "function": {"arguments": "1}"}},
        ),
        call_parts(
            TGI,
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}},
            {"index": 0, "id": "c1", "type": "function", "function": {"name": None, "arguments": "1}"}},
        ),
    ],
    ids=["openai", "tgi"],
)
def test_the_parts_of_a_tool_call_are_put_together(caller: Any, fake: Any, events: list[Any]) -> None:
    server = fake(body=sse(events))
    (choice,) = caller.call("chat", MESSAGES, stream=True, then="final", client=server.options).choices
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert choice.message.tool_calls == [call] and choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_choices_and_log_probabilities_are_put_together(caller: Any, fake: Any) -> None:
    row = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []}]}
    events = [chunk(OPENAI, {"content": text}) for text in ("a", "b", "c")]
    for event, index in zip(events, (1, 0, 1), strict=True):
        event["choices"][0] |= {"index": index, "logprobs": row}
    server = fake(body=sse(events))
    first, second = caller.call("chat", MESSAGES, stream=True, then="final", client=server.options).choices
    assert (first.message.content, second.message.content) == ("b", "ac")
    assert first.logprobs == row and second.logprobs == {"content": row["content"] * 2}
    assert caller.call("chat", MESSAGES, stream=True, then="text", client=server.options) == ["b"]


# What a server sends for the same refusal: native routes, `/v1` in OpenAI's dialect, `/v1` in TGI's, other servers.
REFUSALS = {
    "native": {"error": "too long", "error_type": "validation"},
    "openai": {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        },
        "error_type": "validation",
    },
}


@pytest.mark.parametrize("dialect", REFUSALS)
@pytest.mark.parametrize("as_event", [False, True])
def test_a_refusal_is_the_same_error_in_both_dialects(caller: Any, fake: Any, dialect: str, as_event: bool) -> None:
    refusal = REFUSALS[dialect]
    headers = {"X-Request-Id": "r-7"}
    server = fake(body=sse([refusal]), headers=headers)
    if not as_event:
        server = fake(400, json.dumps(refusal).encode(), headers=headers)
    with pytest.raises(errors.ValidationError, match=r"^too long$") as caught:
        caller.call("chat", MESSAGES, stream=True, client=server.options)
    error = caught.value
    assert error.request_id == "r-7" and error.status == (None if as_event else 400)
    wanted = ("context_length_exceeded", "messages") if dialect == "openai" else (None, None)
    assert (error.code, error.param) == wanted


def test_fields_that_the_server_ignores_are_logged_once(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps(completed(OPENAI, "OK", "stop")).encode()
    server = fake(body=body, headers={"X-Ignored-Parameters": "model, nonsense,x"})
    with Client("http://server", **server.options) as client:
        for _ in range(2):
            client.completion("hi", extra_body={"nonsense": 1, "x": 2})
    assert [(record.name, record.levelname) for record in caplog.records] == [("text_generation", "WARNING")] * 2
    assert caplog.messages == [f"the server does not know `{name}`, and ignores it" for name in ("nonsense", "x")]


def test_an_error_without_the_header_has_no_request_id(caller: Any, fake: Any) -> None:
    with pytest.raises(errors.NotFoundError) as caught:
        caller.call("generate", "hi", client=fake(404).options)
    assert caught.value.request_id is None and caught.value.status == 404
