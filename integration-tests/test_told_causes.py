"""Every cause of the router's tree of errors, made by real requests to a whole server: the names and numbers that a
refusal tells are those of its request, in the dialect of its route."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mutants
import processes
import psutil
import pytest
from calls import metric
from scale import SHORT
from server_process import ServerProcess, wait_until

from text_generation_router import errors

KEY = {"authorization": "Bearer a-key"}
USER = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "Hi"},
    "/generate_stream": {"inputs": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
}
NATIVE, _, COMPLETION, CHAT, RESPONSES, MESSAGES = BODIES
MAX_CONCURRENT = 1
Fields = dict[str, Any]
# [class, route or "" for all of them, fields that cause it, what it tells, the field that is wrong in OpenAI's words]
CAUSES = [json.loads(line) for line in Path(__file__).with_name("told_causes.jsonl").read_text().splitlines()]
# What causes no refusal of a body, by the headers or the path of a request, in `test_what_surrounds_a_body_is_refused`.
AROUND = {"UnauthorizedError", "NoSuchRouteError", "MethodError", "UnsupportedMediaTypeError", "PayloadTooLargeError",
          "InvalidJsonError", "HeadersTooLargeError", "DeadlineError", "OverloadedError", "TooLongError",
          "EncodedBodyError"}  # fmt: skip
# Causes that are not in a request, and where a test makes them.
ELSEWHERE = {
    "BodyError": "the parent of others",
    "InternalError": "a mistake of ours: no request is known that causes it",
    "GenerationError": "a request that kills shards: faults.py",
    "IncompleteGenerationError": "the end of the server: router http/tests/test_graceful_stop.py",
    "IncompleteStreamError": "the same in a stream",
    "ShuttingDownError": "the end of the server: router http/tests/test_graceful_stop.py",
    "UnhealthyError": "a dead shard: outside.py",
    "TooManyConnectionsError": "thousands of connections: router http/tests",
    "RequestTimeoutError": "a body that does not arrive: router http/tests",
    "InvalidRequestError": "bytes that are not HTTP: router http/tests",
    "CodingError": "chunks in a coding: router http/tests",
    "PipelineError": "requests ahead of their answers: router http/tests",
    "SmallChunksError": "chunks of a byte: router http/tests",
    "TooExpensiveError": "a body that takes ten seconds: router api/tests/test_large_bodies.py",
    "ScalingError": "an administrator's request: router api/tests/test_admin.py",
    "AdapterError": "the same: router api/tests/test_adapters_loaded.py",
    "NoSuchAdapterError": "the same",
    "AdapterUnsettledError": "the same",
}


def classes(parent: type[errors.InferenceError]) -> Iterator[type[errors.InferenceError]]:
    for child in parent.__subclasses__():
        yield child
        yield from classes(child)


ERRORS = {kind.__name__: kind for kind in classes(errors.InferenceError) if kind.__module__ == errors.__name__}
CASES = [(name, route, *case) for name, key, *case in CAUSES for route in ([key] if key else BODIES)]


@dataclass(frozen=True, slots=True)
class Target:
    server: ServerProcess
    client: httpx.Client  # one for all requests: the making of a client takes longer than most answers
    is_tgis: bool  # whether OpenAI's routes tell errors as TGI does


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="dialects"),
        pytest.param(("--tgi-dialect",), id="tgi-dialect", marks=pytest.mark.slow),
    ],
)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    flags = ("--strict-parameters", "--api-key", "a-key", "--max-concurrent-requests", str(MAX_CONCURRENT))
    with (
        SHORT.server(1, "--max-total-tokens", "64", "--max-client-batch-size", "4", *flags, *request.param) as server,
        httpx.Client(base_url=server.url, headers=KEY, timeout=60, verify=False) as client,
    ):
        yield Target(server, client, bool(request.param))


def ask(target: Target, route: str, fields: Fields, headers: dict[str, str] | None = None) -> httpx.Response:
    body = dict(BODIES[route])
    if route.startswith("/v1/"):
        body |= fields
    else:
        body |= {"parameters": {name: value for name, value in fields.items() if name != "inputs"}}
        body |= {name: value for name, value in fields.items() if name == "inputs"}
    return target.client.post(route, json=body, headers=headers)


def has_dialect(target: Target, route: str) -> bool:
    """Whether the route tells errors as TGI does."""
    return not route.startswith("/v1/") or (target.is_tgis and route in (COMPLETION, CHAT))


def check(target: Target, route: str, response: httpx.Response, name: str, text: str, param: str | None) -> None:
    kind, is_tgis = ERRORS[name], has_dialect(target, route)
    content = response.content.removeprefix(b"data: ")
    if not (route == "/generate_stream" and response.status_code == 200):  # TGI's streams tell refusals as events
        assert response.status_code == (kind.status if is_tgis or kind.status != 422 else 400), response.text
    told = json.loads(content)
    assert told["error_type"] == kind.error_type
    message = told["error"] if is_tgis else told["error"]["message"]
    assert text in message
    assert is_tgis or mutants.wrong_form(route, response.status_code, content) == ""
    if not is_tgis and route != MESSAGES and response.status_code == 400:
        assert told["error"]["param"] == param or param is None


def test_every_cause_is_made_here_or_elsewhere() -> None:
    assert {name for name, *_ in CAUSES} | AROUND | ELSEWHERE.keys() == ERRORS.keys()


@pytest.mark.parametrize(("name", "route", "fields", "text", "param"), CASES, ids=lambda value: str(value)[:30])
def test_a_refusal_tells_what_is_wrong_with_its_request(
    target: Target, name: str, route: str, fields: Fields, text: str, param: str | None
) -> None:
    if name == "GrammarError" and has_dialect(target, route):
        text = text.partition("`: ")[2] or text
    check(target, route, ask(target, route, fields), name, text, param)


@pytest.mark.parametrize("route", BODIES)
def test_what_surrounds_a_body_is_refused_in_the_dialect(target: Target, route: str) -> None:
    def post(content: bytes, **headers: str) -> httpx.Response:
        return target.client.post(route, content=content, headers={"content-type": "application/json"} | headers)

    check(target, route, post(b"{}", authorization="Bearer other"), "UnauthorizedError", "needs an API key", None)
    check(target, route, target.client.get(route), "MethodError", "Allowed: POST", None)
    missing = target.client.post(f"{route}/nothing", json={})
    check(target, route, missing, "NoSuchRouteError", "no such route", None)
    wrong = post(b"{}", **{"content-type": "text/plain"})
    check(target, route, wrong, "UnsupportedMediaTypeError", "`Content-Type: application/json`", None)
    coded = post(b"{}", **{"content-encoding": "gzip"})
    check(target, route, coded, "EncodedBodyError", "`Content-Encoding: gzip` is not supported", None)
    check(target, route, post(b"{"), "InvalidJsonError", "line 1 column 2", None)
    deep = b'{"a":' * 200 + b"1" + b"}" * 200
    check(target, route, post(deep), "InvalidJsonError", "more than 128 levels", None)
    check(target, route, post(b" " * 2_000_001), "PayloadTooLargeError", "at most 2000000 bytes", None)
    late = ask(target, route, {}, {"x-request-timeout": "0.000001"})
    check(target, route, late, "DeadlineError", "before its first token", None)


NAMES = {
    "/generate": ("inputs", "max_new_tokens"),
    COMPLETION: ("prompt", "max_tokens"),
    CHAT: ("messages", "max_tokens"),
    RESPONSES: ("input", "max_output_tokens"),
    MESSAGES: ("messages", "max_tokens"),
}
LIMIT, TOTAL = 63, 64


@pytest.mark.parametrize("route", NAMES)
@pytest.mark.parametrize("is_chat_of_many", [False, True])
def test_a_prompt_that_is_too_long_is_told_its_number_of_tokens(
    target: Target, route: str, is_chat_of_many: bool
) -> None:
    prompt, tokens = NAMES[route]
    is_chat = route in (CHAT, RESPONSES, MESSAGES)
    seen = set()
    for words in range(1 if is_chat_of_many else 30, 3 * LIMIT, 9):
        turns = [{"role": ("user", "assistant")[i % 2], "content": "fox"} for i in range(2 * (words // 4) + 1)]
        messages = turns if is_chat_of_many else [{"role": "user", "content": "fox " * words}]
        given = messages if is_chat else "fox " * words
        if is_chat and len(messages) > LIMIT:  # refused by the number of messages
            break
        count = _count(target, messages if is_chat else None, "fox " * words)
        if count < LIMIT - 3:
            continue
        for wanted in (None, 1, 9):
            if wanted is None and route == MESSAGES:
                continue
            fields = {prompt: given} | ({} if wanted is None else {tokens: wanted})
            response = ask(target, route, fields)
            text = ""
            if wanted is not None and count + wanted > TOTAL:
                text = f"`{prompt}` tokens + `{tokens}` must be <= {TOTAL}."
                text += f" Given: {count} `{prompt}` tokens and {wanted} `{tokens}`"
            elif count > LIMIT:
                text = f"`{prompt}` must have less than {LIMIT} tokens. Given: {count}"
            seen.add(text.partition(" ")[2][:6])
            if text:
                check(target, route, response, "TooLongError", text, prompt)
            else:
                assert response.status_code == 200, response.text
        if route in (COMPLETION, CHAT):
            assert (
                ask(target, route, {prompt: given, "truncate_prompt_tokens": LIMIT - 1, tokens: 1}).status_code == 200
            )
    assert {"tokens"} <= seen


def _count(target: Target, messages: Any, text: str) -> int:
    if messages is None:
        return len(target.client.post("/tokenize", json={"inputs": text}).json())
    response = target.client.post("/chat_tokenize", json={"messages": messages})
    return len(response.json()["tokenize_response"])


def test_an_overloaded_server_tells_so_in_each_dialect(target: Target) -> None:
    """One request holds the only permit, because the shard is stopped. If its launcher replaces the shard, after some
    seconds, the request goes on and holds the permit still."""
    received = metric(target.server.url, "tgi_request_count")
    body = BODIES["/generate"] | {"parameters": {"max_new_tokens": 60, "ignore_eos_token": True}}
    [shard] = processes.shards(target.server.pid).values()
    shard.suspend()
    try:
        with ThreadPoolExecutor(1) as thread:
            held = thread.submit(target.client.post, "/generate", json=body)
            wait_until(
                lambda: metric(target.server.url, "tgi_request_count") > received, 60, "a request holds the permit"
            )
            for route in BODIES:
                check(target, route, ask(target, route, {}), "OverloadedError", "overloaded", None)
            shard.resume()
            assert held.result().status_code == 200
    finally:
        with suppress(psutil.NoSuchProcess):
            shard.resume()


def test_headers_that_are_too_large_are_refused_in_each_dialect(target: Target) -> None:
    for route in BODIES:
        large = target.client.post(route, json={}, headers={"x-large": "a" * 100_000})
        check(target, route, large, "HeadersTooLargeError", "headers are too large", None)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_grammar_that_grows_too_large_in_the_middle_of_a_text_is_told_by_its_field(
    target: Target, is_streamed: bool
) -> None:
    num_rules = 280
    rules = [f"y{i}: y{i + 1} y{i + 1} | y{i + 1}" for i in range(num_rules)]
    grammar = "\n".join(['start: "once upon a time" y0', *rules, f'y{num_rules}: "a"'])
    response = ask(
        target, COMPLETION, {"guided_grammar": grammar, "max_tokens": 20, "min_tokens": 15, "stream": is_streamed}
    )
    assert response.status_code == (200 if is_streamed else 422 if has_dialect(target, COMPLETION) else 400)
    field = "grammar is not valid" if has_dialect(target, COMPLETION) else "`guided_grammar`"
    assert f"{field}: the grammar cannot be followed any further: Parser Error: Current row has" in response.text
    assert '"server_error"' not in response.text and '"generation"' not in response.text


@pytest.mark.parametrize("route", [NATIVE, "/generate_stream", COMPLETION])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_fields_that_leave_no_token_are_told_by_their_names(target: Target, route: str, is_streamed: bool) -> None:
    """Also in the middle of a text, which begins with the brace and the quotation mark."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    if route.startswith("/v1/"):
        fields: Fields = {"guided_json": schema, "bad_words": [":", '":'], "max_tokens": 20, "stream": is_streamed}
    else:
        fields = {"grammar": {"type": "json", "value": schema}, "bad_words": [":", '":'], "max_new_tokens": 20}
    response = ask(target, route, fields)
    text = "no token that could come next is left by the grammar and `bad_words`"
    assert text in response.text and '"server_error"' not in response.text and '"generation"' not in response.text
    is_event = route == "/generate_stream" or (route == COMPLETION and is_streamed)
    assert response.status_code == (200 if is_event else 422 if has_dialect(target, route) else 400)
