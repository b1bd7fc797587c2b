"""Timeouts of requests: read from the header or the parameters, and answered when the time is over."""

import pytest

from text_generation_router.engine.protocol import Ended
from text_generation_router.errors import DeadlineError
from text_generation_router.scheduling.request import EndReason

BAD_HEADER = (
    "Input validation error: `X-Request-Timeout` must be a number of seconds > 0 and < 1000000000, such as 30 or 0.5"
)


def timeout_of(server, route, header=None, **fields):
    """The timeout that the engine receives, in seconds."""
    server.ask(route, {} if header is None else {"x-request-timeout": header}, **fields)
    return server.engine.asked[-1].request.timeout_s


def test_the_header_reaches_the_engine_less_what_has_passed(server, route):
    assert timeout_of(server, route) is None
    assert 0 < timeout_of(server, route, header=" 60.5 ") < 60.5


def test_of_header_and_parameter_the_smaller_one_counts(server, route):
    def told(timeout, header=None):
        place = {"timeout": timeout} if route.is_openais else {"parameters": {"timeout": timeout}}
        return timeout_of(server, route, header, **place)

    assert 10 < told(100) < 100
    assert 0 < told(100, "10") < 10
    assert 0 < told(10.0, "100") < 10
    assert told(None) is None


@pytest.mark.parametrize(
    "value",
    [
        *["0", "0.0", "-1", "+1", "nan", "inf", "1e3", "1_0", "30s", "0x10", "1.", ".5", "1,5", "1 2", "now"],
        *["\u0661", "1000000000", "9" * 10_000, "1." + "0" * 10_000, "x" * 10_000],
    ],
)
def test_a_header_that_is_not_a_number_of_seconds_is_refused_by_name(server, route, value):
    answer = server.ask(route, {"x-request-timeout": value})
    assert answer.told == {"error": BAD_HEADER, "error_type": "validation"}
    assert answer.status == (200 if route.fails_as_event else route.status(422))
    assert not server.engine.asked and server.permits.left == 4 and server.failures("validation") == 1


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        (b"0", 422, "`timeout` must be strictly positive"),
        (b"-0.5", 422, "`timeout` must be strictly positive"),
        (b"1e-60", 422, "`timeout` must be strictly positive"),
        (b"1e300", 422, "parameters.timeout: Input should fit a 32-bit float"),
        (b"true", 422, "parameters.timeout: "),
        (b'"1"', 422, "parameters.timeout: "),
        (b"NaN", 400, "Failed to parse"),
        (b"1e999", 400, "Failed to parse"),
    ],
)
def test_a_timeout_among_the_parameters_is_a_positive_number(server, value, status, text):
    answer = server.post("/generate", b'{"inputs":"Hi","parameters":{"timeout":%b}}' % value)
    assert answer.status == status and text in answer.json["error"]
    assert not server.engine.asked


def test_a_request_whose_time_is_over_never_waits(server, route):
    answer = server.ask(route, {"x-request-timeout": "0.000000001"})
    assert answer.told == {
        "error": "The request timed out before its first token: give it a longer timeout, or send it again later",
        "error_type": "deadline",
    }
    assert answer.status == (200 if route.fails_as_event else 504) and "retry-after" not in answer.headers
    assert not server.engine.asked and server.permits.left == 4 and server.failures("deadline") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_expires_in_the_queue_gets_a_deadline_error(server, route, stream):
    server.engine.script.ends_after = (0, Ended(EndReason.DEADLINE))
    answer = server.ask(route, stream=stream)
    native = {"error": DeadlineError().text, "error_type": "deadline"}
    if route.path == "/v1/responses" and stream:
        last = answer.events[-1]["response"]
        assert (last["status"], last["error"]) == ("failed", {"code": "server_error", "message": DeadlineError().text})
    elif route.path == "/generate" or not (stream or route.fails_as_event):
        assert (answer.status, answer.told) == (504, native)
    else:
        assert answer.told == native and answer.events[1:] == (["[DONE]"] if route.ends_with_done else [])
    assert server.permits.left == 4 and server.failures("deadline") == 1


def test_an_expired_text_ends_as_it_is(server):
    server.engine.script.expires = True
    parameters = {"details": True, "top_n_tokens": 1}
    answer = server.post("/generate", {"inputs": "Hi", "parameters": parameters}).json
    details = answer["details"]
    assert (answer["generated_text"], details["finish_reason"]) == (" there!", "deadline")
    assert len(details["tokens"]) == len(details["top_tokens"]) == details["generated_tokens"] == 2
    assert server.metric("tgi_request_success_total") == 1


def test_the_last_event_of_an_expired_stream_has_an_empty_special_token(server):
    server.engine.script.expires = True
    body = {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 1}}
    *tokens, last = server.post("/generate_stream", body).events
    assert [event["token"]["text"] for event in tokens] == [" there", "!"]
    assert all(event["generated_text"] is None and event["top_tokens"] for event in tokens)
    assert last == {
        "index": 3,
        "token": {"id": 0, "text": "", "logprob": 0.0, "special": True},
        "generated_text": " there!",
        "details": {
            "finish_reason": "deadline",
            "generated_tokens": 2,
            "seed": None,
            "cached_tokens": 0,
            "input_length": 2,
        },
    }


def test_the_last_event_of_an_expired_stream_shows_text_that_was_held_back(server):
    server.engine.script.expires = server.engine.script.cuts_character = True
    *_, last = server.post("/generate_stream", {"inputs": "Hi"}).events
    assert last["token"] == {"id": 0, "text": "\ufffd", "logprob": 0.0, "special": False}
    assert last["generated_text"] == " there!\ufffd"


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho!"]])
def test_an_expired_completion_stream_ends_with_an_empty_text(server, prompt):
    server.engine.script.expires = True
    body = {"prompt": prompt, "logprobs": 1, "stream": True}
    *events, done = server.post("/v1/completions", body).events
    assert done == "[DONE]"
    for index in range(len([prompt] if isinstance(prompt, str) else prompt)):
        chunks = [event for event in events if event["choices"][0]["index"] == index]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == [" there", "!", ""]
        assert chunks[-1]["choices"] == [{"index": index, "text": "", "logprobs": None, "finish_reason": "length"}]


def test_an_expired_chat_stream_ends_with_an_empty_delta(server):
    server.engine.script.expires = True
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "stream": True}
    *chunks, usage, _ = server.post("/v1/chat/completions", body | {"stream_options": {"include_usage": True}}).events
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == ["", " there", "!", "", None]  # the role's chunk, the text, and the reason's chunk
    empty = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert chunks[-1]["choices"] == [empty] and usage["usage"]["completion_tokens"] == 2


def test_an_expired_answer_in_one_piece_has_its_reason_and_its_logprobs(server):
    server.engine.script.expires = True
    for path, body in (
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}),
    ):
        [choice] = server.post(path, body).json["choices"]
        logprobs = choice["logprobs"]
        assert choice["finish_reason"] == "length" and len(logprobs.get("tokens") or logprobs["content"]) == 2
