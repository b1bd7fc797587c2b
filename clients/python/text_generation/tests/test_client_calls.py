"""Every method of both clients against canned answers: what is sent, and what comes back."""

import inspect
import json
from typing import Any

import httpx
import pytest

from text_generation import Client, errors
from text_generation.types import ChatComplete, Grammar, Message

TOKENS = [{"id": 7, "text": " grüß", "logprob": -0.5, "special": False}, {"id": 2, "text": "</s>", "special": True}]
DETAILS = {"finish_reason": "eos_token", "generated_tokens": 2, "seed": None, "prefill": [], "tokens": TOKENS}
RESPONSE = {"generated_text": " grüß", "details": DETAILS}
EVENTS = [
    {"index": 1, "token": TOKENS[0], "generated_text": None, "details": None},
    {
        "index": 2,
        "token": TOKENS[1],
        "generated_text": " grüß",
        "details": {"finish_reason": "eos_token", "generated_tokens": 2, "seed": None, "input_length": 3},
    },
]
HEAD = {"id": "", "created": 1700000000, "model": "m", "system_fingerprint": "1-native"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
CHAT = HEAD | {
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "OK"}, "logprobs": None, "finish_reason": "stop"}
    ],
    "usage": USAGE,
}
CHAT_CHUNKS = [
    HEAD
    | {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}],
        "usage": None,
    }
    for text, reason in (("O", None), ("K", "stop"))
] + [HEAD | {"object": "chat.completion.chunk", "choices": [], "usage": USAGE}]
COMPLETION = HEAD | {
    "object": "text_completion",
    "choices": [{"index": 0, "text": "OK", "logprobs": None, "finish_reason": "length"}],
    "usage": USAGE,
}
COMPLETION_CHUNKS = [
    HEAD | {"object": "text_completion", "choices": [{"index": 0, "text": "O", "logprobs": None, "finish_reason": ""}]},
    COMPLETION | {"choices": [{"index": 0, "text": "K", "logprobs": None, "finish_reason": "length"}]},
]
MESSAGES = [{"role": "user", "content": "hi"}]


def encode(payload: Any) -> bytes:
    return json.dumps(payload, ensure_ascii=False).encode()


def sse(*payloads: Any, done: bool = False) -> bytes:
    text = b"".join(b"data: " + encode(payload) + b"\n\n" for payload in payloads)
    return text + b"data: [DONE]\n\n" if done else text


def by_byte(body: bytes) -> list[bytes]:
    return [body[i : i + 1] for i in range(len(body))]


def sent(server: Any) -> dict[str, Any]:
    (request,) = server.seen
    assert request.method == "POST" and request.headers["content-type"] == "application/json"
    return json.loads(request.content)


@pytest.mark.parametrize("payload", [[RESPONSE], RESPONSE], ids=["list", "object"])
def test_generate_posts_to_the_base_url_and_reads_a_list_or_an_object(caller: Any, fake: Any, payload: Any) -> None:
    server = fake(body=encode(payload))
    response = caller.call("generate", "hi", max_new_tokens=3, stop_sequences=["x"], client=server.options)
    assert response.generated_text == " grüß" and response.details.tokens[1].special
    assert server.seen[0].url.path == "/"
    body = sent(server)
    assert body["inputs"] == "hi" and body["stream"] is False
    assert body["parameters"] == {
        "do_sample": False,
        "max_new_tokens": 3,
        "return_full_text": False,
        "stop": ["x"],
        "watermark": False,
        "details": True,
        "decoder_input_details": False,
    }


def test_generate_takes_its_arguments_by_position_too(caller: Any, fake: Any) -> None:
    server = fake(body=encode([RESPONSE]))
    caller.call("generate", "hi", True, 5, 2, 1.5, client=server.options)
    parameters = sent(server)["parameters"]
    assert parameters["do_sample"] is True and parameters["max_new_tokens"] == 5
    assert parameters["best_of"] == 2 and parameters["repetition_penalty"] == 1.5


def test_best_of_sequences_are_read(caller: Any, fake: Any) -> None:
    other = {"generated_text": "b"} | DETAILS
    server = fake(body=encode([RESPONSE | {"details": DETAILS | {"best_of_sequences": [other]}}]))
    response = caller.call("generate", "hi", do_sample=True, best_of=2, client=server.options)
    assert [sequence.generated_text for sequence in response.details.best_of_sequences] == ["b"]


def test_generate_stream_survives_any_cut(caller: Any, fake: Any) -> None:
    server = fake(body=by_byte(b":\n\n" + sse(*EVENTS)), content_type="text/event-stream")
    events = caller.call("generate_stream", "hi", seed=1, client=server.options)
    assert [event.token.text for event in events] == [" grüß", "</s>"]
    assert [event.generated_text for event in events] == [None, " grüß"]
    assert events[1].details.input_length == 3
    body = sent(server)
    assert body["stream"] is True and body["parameters"]["seed"] == 1 and body["parameters"]["details"] is True


def test_chat_takes_messages_as_models_or_dicts(caller: Any, fake: Any) -> None:
    for messages in (MESSAGES, [Message(role="user", content="hi")]):
        server = fake(body=encode(CHAT))
        answer = caller.call("chat", messages, max_tokens=3, stop=["x"], client=server.options)
        assert isinstance(answer, ChatComplete) and answer.choices[0].message.content == "OK"
        assert answer.usage["total_tokens"] == 4
        assert server.seen[0].url.path == "/v1/chat/completions"
        assert sent(server) == {"model": "tgi", "messages": MESSAGES, "stream": False, "max_tokens": 3, "stop": ["x"]}


def test_chat_stream_ends_at_done(caller: Any, fake: Any) -> None:
    server = fake(body=by_byte(sse(*CHAT_CHUNKS, done=True)), content_type="text/event-stream")
    chunks = caller.call("chat", MESSAGES, stream=True, client=server.options)
    assert "".join(choice.delta.content for chunk in chunks for choice in chunk.choices) == "OK"
    assert chunks[-1].usage == USAGE and sent(server)["stream"] is True


def test_completion_and_its_stream(caller: Any, fake: Any) -> None:
    server = fake(body=encode(COMPLETION))
    assert caller.call("completion", "hi", seed=3, client=server.options).choices[0].text == "OK"
    assert server.seen[0].url.path == "/v1/completions"
    assert sent(server) == {"model": "tgi", "prompt": "hi", "seed": 3, "stream": False}

    server = fake(body=by_byte(sse(*COMPLETION_CHUNKS, done=True)), content_type="text/event-stream")
    chunks = caller.call("completion", "hi", stream=True, client=server.options)
    assert [chunk.choices[0].text for chunk in chunks] == ["O", "K"] and chunks[-1].usage == USAGE


# A value for every parameter, other than its default.
NATIVE = {
    "do_sample": True, "max_new_tokens": 3, "best_of": 1, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "return_full_text": True, "seed": 5, "temperature": 0.5, "top_k": 4, "top_p": 0.25, "truncate": 6,
    "typical_p": 0.75, "watermark": True, "decoder_input_details": True, "top_n_tokens": 2,
    "min_p": 0.25, "presence_penalty": -0.5, "logit_bias": {"7": 1.5}, "stop_token_ids": [2], "min_new_tokens": 1,
    "bad_words": ["x"], "allowed_token_ids": [1, 2], "ignore_eos_token": True, "priority": -1, "timeout": 2.5,
    "cache_salt": "s", "adapter_id": "sql",
}  # fmt: skip
COMPLETING = {
    "frequency_penalty": 0.5, "max_tokens": 3, "repetition_penalty": 1.5, "seed": 5, "temperature": 0.5, "top_p": 0.25,
    "stop": ["x"],
}  # fmt: skip
CHATTING = COMPLETING | {
    "logit_bias": [0.5], "logprobs": True, "top_logprobs": 2, "n": 2, "presence_penalty": 0.75, "tool_prompt": "a",
    "tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "f"}}],
}  # fmt: skip


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
def test_every_parameter_of_generate_reaches_the_server(caller: Any, fake: Any, name: str) -> None:
    server = fake(body=encode([RESPONSE]) if name == "generate" else sse(*EVENTS))
    parameters = inspect.signature(getattr(Client, name)).parameters
    values = {key: value for key, value in NATIVE.items() if key in parameters}
    grammar = {"type": "regex", "value": "a"}
    caller.call(name, "hi", **values, stop_sequences=["x"], grammar=Grammar(**grammar), client=server.options)
    defaults = {"decoder_input_details": False}
    assert sent(server)["parameters"] == defaults | values | {"stop": ["x"], "grammar": grammar, "details": True}
    assert {"self", "prompt", "stop_sequences", "grammar", *values} == set(parameters)


def test_every_parameter_of_the_openai_routes_reaches_the_server(caller: Any, fake: Any) -> None:
    for name, prompt, values, answer in (
        ("chat", {"messages": MESSAGES}, CHATTING, CHAT),
        ("completion", {"prompt": "hi"}, COMPLETING, COMPLETION),
    ):
        server = fake(body=encode(answer))
        extra = {"min_p": 0.25, "response_format": None}
        caller.call(name, **prompt, **values, extra_body=extra, client=server.options)
        assert sent(server) == {"model": "tgi", "stream": False} | prompt | values | extra
        parameters = set(inspect.signature(getattr(Client, name)).parameters)
        assert {"self", "stream", "extra_body", *prompt, *values} == parameters


CALLS = [
    ("generate", "hi", {}),
    ("generate_stream", "hi", {}),
    ("chat", MESSAGES, {}),
    ("chat", MESSAGES, {"stream": True}),
    ("completion", "hi", {}),
    ("completion", "hi", {"stream": True}),
]


@pytest.mark.parametrize(("name", "prompt", "options"), CALLS)
def test_a_bad_status_raises_its_error_from_every_method(
    caller: Any, fake: Any, name: str, prompt: Any, options: dict[str, Any]
) -> None:
    server = fake(429, encode({"error": "Model is overloaded", "error_type": "overloaded"}))
    with pytest.raises(errors.OverloadedError, match=r"^Model is overloaded$"):
        caller.call(name, prompt, client=server.options, **options)
    server = fake(413, b"length limit exceeded", content_type="text/plain")
    with pytest.raises(errors.UnknownError, match="length limit exceeded"):
        caller.call(name, prompt, client=server.options, **options)


@pytest.mark.parametrize(("name", "prompt", "options"), CALLS)
def test_a_web_page_with_a_good_status_is_an_error(
    caller: Any, fake: Any, name: str, prompt: Any, options: dict[str, Any]
) -> None:
    server = fake(200, b"<html>Welcome</html>", content_type="text/html")
    with pytest.raises((errors.UnknownError, errors.IncompleteGenerationError)):
        caller.call(name, prompt, client=server.options, **options)


def test_an_error_event_raises_after_the_events_before_it(caller: Any, fake: Any) -> None:
    error = {"error": "Input validation error: `inputs` cannot be empty", "error_type": "validation"}
    server = fake(body=sse(EVENTS[0], error), content_type="text/event-stream")
    with pytest.raises(errors.ValidationError, match=r"^Input validation error: `inputs` cannot be empty$"):
        caller.call("generate_stream", "hi", client=server.options)


def test_an_openai_error_event_raises(caller: Any, fake: Any) -> None:
    body = sse({"error": {"message": "Model is overloaded", "http_status_code": 429}}, done=True)
    for name, prompt in (("chat", MESSAGES), ("completion", "hi")):
        server = fake(body=body, content_type="text/event-stream")
        with pytest.raises(errors.RateLimitExceededError, match=r"^Model is overloaded$"):
            caller.call(name, prompt, stream=True, client=server.options)


def test_a_stream_that_ends_early_is_incomplete(caller: Any, fake: Any) -> None:
    server = fake(body=sse(EVENTS[0]), content_type="text/event-stream")
    with pytest.raises(errors.IncompleteGenerationError):
        caller.call("generate_stream", "hi", client=server.options)
    server = fake(body=sse(*CHAT_CHUNKS), content_type="text/event-stream")
    with pytest.raises(errors.IncompleteGenerationError):
        caller.call("chat", MESSAGES, stream=True, client=server.options)


def test_nothing_is_sent_when_validation_fails(caller: Any, fake: Any) -> None:
    server = fake(body=encode([RESPONSE]))
    for name, prompt, options in (
        ("generate", "", {}),
        ("generate_stream", "hi", {"temperature": 0}),
        ("chat", [{"content": "no role"}], {}),
        ("completion", None, {}),
    ):
        with pytest.raises(errors.ValidationError):
            caller.call(name, prompt, client=server.options, **options)
    assert server.seen == []


def test_headers_and_cookies_are_sent(caller: Any, fake: Any) -> None:
    server = fake(body=encode([RESPONSE]))
    settings = {"headers": {"Authorization": "Bearer k"}, "cookies": {"a": "b"}, **server.options}
    caller.call("generate", "hi", client=settings)
    assert server.seen[0].headers["authorization"] == "Bearer k" and server.seen[0].headers["cookie"] == "a=b"


@pytest.mark.parametrize(
    ("base", "path"), [("http://h", "/v1/chat/completions"), ("http://h/x/", "/x/v1/chat/completions")]
)
def test_openai_routes_lie_below_the_base_url(caller: Any, fake: Any, base: str, path: str) -> None:
    server = fake(body=encode(CHAT))
    caller.call("chat", MESSAGES, client={"base_url": base, **server.options})
    assert server.seen[0].url.path == path


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://me:secret@127.0.0.1:1?key=secret"])
@pytest.mark.parametrize("name", ["generate", "generate_stream"])
def test_no_server_is_a_connection_error_that_tells_no_password(caller: Any, name: str, url: str) -> None:
    with pytest.raises(errors.ServerConnectionError) as caught:
        caller.call(name, "hi", client={"base_url": url})
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_connection_is_a_connection_error(caller: Any) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    with pytest.raises(errors.ServerConnectionError, match="reset by peer"):
        caller.call("generate", "hi", client={"transport": httpx.MockTransport(answer)})
