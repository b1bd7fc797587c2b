import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.tests.examples import examples
from text_generation_router.api.common.body import LARGE_BYTES, OWNERS_BODIES

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

ROUTES = (
    "/generate", "/generate_stream", "/", "/tokenize", "/v1/completions", "/v1/chat/completions", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/responses",
)  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"inputs": "a"',
        b"\xff\xfe",
        b'{"inputs": "\xff"}',
        b'{"inputs": "\\ud800"}',
        b'{"parameters": {"top_p": NaN}}',
        b'{"parameters": {"top_p": 1e999}}',
        b"[" * 5000,
        b'{"a":' * 900 + b"[" * 900,
    ],
)
def test_a_body_that_is_not_json_is_400(server, path, body):
    answer = server.post(path, body)
    assert answer.status == 400
    assert answer.told["error_type"] == "invalid_json"
    assert answer.told["error"].startswith("Failed to parse the request body as JSON: ")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *TABLES["wrong_shapes"],
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2**32}}, "parameters.max_new_tokens"),
        ("/generate", {"inputs": "a", "parameters": {"top_k": 2**31}}, "parameters.top_k"),
        ("/generate", {"inputs": "a", "parameters": {"seed": 10**30}}, "parameters.seed"),
    ],
)
def test_a_wrong_shape_is_422_and_names_the_field(server, path, body, field):
    answer = server.post(path, body)
    assert answer.status == (400 if path.startswith("/v1/") else 422)
    assert answer.told["error_type"] == "unprocessable"
    prefix = f"Failed to deserialize the JSON body into the target type: {field}: "
    assert answer.told["error"].startswith(prefix), answer.json
    assert not server.engine.asked


@pytest.mark.parametrize("body", [[], 1, "x", None, True])
def test_json_that_is_not_an_object_is_422(server, body):
    answer = server.post("/generate", body)
    assert (answer.status, answer.json["error_type"]) == (422, "unprocessable")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/jsonx", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_415(server, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = server.post("/generate", {"inputs": "Hi"}, headers)
    assert (answer.status, answer.json["error_type"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"])
def test_all_json_content_types_are_read(server, kind):
    assert server.post("/generate", {"inputs": "Hi"}, {"content-type": kind}).status == 200


def test_a_large_body_is_refused_by_its_announced_length(server):
    for length in ("10001", "9" * 5000):
        headers = {"content-type": "application/json", "content-length": length}
        # The body itself is small, so the header alone is the reason of the refusal.
        answer = server.post("/generate", {"inputs": "Hi"}, headers)
        assert (answer.status, answer.json["error_type"]) == (413, "payload_too_large")


def test_a_large_body_without_a_length_is_refused_while_it_is_read(server):
    pieces = [b"x" * 4000 for _ in range(50)]
    answer = asyncio.run(server.call("POST", "/generate", b"", None, pieces=pieces))
    assert answer.status == 413 and "10000 bytes" in answer.json["error"]


def test_a_body_in_pieces_is_put_together(server):
    content = json.dumps({"inputs": "Hi", "parameters": {}}).encode()
    pieces = [content[at : at + 3] for at in range(0, len(content), 3)]
    assert asyncio.run(server.call("POST", "/generate", b"", None, pieces=pieces)).status == 200


def test_doubled_keys_and_nul_characters_are_accepted(server):
    assert server.post("/generate", b'{"inputs":"a","inputs":"b\\u0000"}').status == 200


def test_errors_show_nothing_of_what_was_sent(server):
    canary = "canary-7f3a"
    bodies = [
        {"inputs": {canary: canary}},
        {"inputs": "a", "parameters": {"top_k": canary}},
        {"inputs": "a", "parameters": {"stop": [canary] * 9}},
        {"messages": [{"role": canary, "content": 1}]},
        {"prompt": {canary: 1}},
        f'{{"inputs": "{canary}'.encode(),
    ]
    for body in bodies:
        for path in ROUTES:
            answer = server.post(path, body)
            assert answer.status >= 400 or path == "/tokenize" or answer.headers["content-type"] == "text/event-stream"
            assert canary.encode() not in answer.body or path == "/tokenize"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = "inputs stream prompt messages stop seed logprobs max_tokens temperature n tools".split()
parameters = st.dictionaries(st.sampled_from(["top_k", "stop", "seed", "best_of", "truncate", "details"]), values)
bodies = st.dictionaries(st.sampled_from(names), values) | st.fixed_dictionaries(
    {"inputs": st.text(), "parameters": parameters}
)


@examples(60)
@given(body=bodies, path=st.sampled_from(ROUTES))
def test_no_body_is_a_server_error(session_server, body, path):
    answer = session_server.post(path, body)
    assert answer.status in (200, 400, 413, 422)


async def test_the_number_of_one_owners_large_bodies_in_memory_is_bounded(make_server):
    """If one owner sends several large bodies, only a limited number is received in full. The server reads the
    others only until it sees that they are large."""
    server = make_server(payload_limit=10**6)
    piece = b"x" * (LARGE_BYTES // 2)
    taken: list[int] = []

    async def drip(number: int) -> None:
        async def receive():
            taken[number] += 1
            if taken[number] > 4:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": piece, "more_body": True}

        async def send(message):
            raise AssertionError("an answer to a body that has not ended")

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, "query_string": b""}
        await server.app(scope | {"client": ("192.0.2.1", 1)}, receive, send)

    taken.extend([0] * (OWNERS_BODIES + 5))
    tasks = [asyncio.create_task(drip(number)) for number in range(OWNERS_BODIES + 5)]
    await asyncio.sleep(0.1)
    large = json.dumps({"inputs": "Hi", "padding": "x" * LARGE_BYTES}).encode()
    small = (await server.call("POST", "/generate", b'{"inputs": "Hi"}')).status
    other = (await server.call("POST", "/generate", large, client="192.0.2.2")).status
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (small, other) == (200, 200)
    assert sorted(taken) == [3] * 5 + [5] * OWNERS_BODIES
