import asyncio
import json
import logging
from dataclasses import astuple
from itertools import pairwise

import pytest
from starlette.requests import Request

from text_generation_common.logs import JsonFormatter
from text_generation_router.app import answers_at_once
from text_generation_router.scheduling.request import Share


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/ready"])
def test_health_is_an_empty_200_or_a_503(server, path):
    answer = server.get(path)
    assert (answer.status, answer.body) == (200, b"")
    server.engine.healthy = False
    answer = server.get(path)
    assert (answer.status, answer.json) == (503, {"error": "unhealthy", "error_type": "healthcheck"})


def test_a_server_that_stops_is_alive_and_not_ready_and_takes_no_requests(server):
    server.gate.shut()
    for method in ("GET", "HEAD"):
        assert server.get("/live", method).status == 200 == server.get("/info", method).status
        assert [server.get(path, method).status for path in ("/ready", "/health", "/ping", "/")] == [503] * 4
    for path in ("/generate", "/generate_stream", "/tokenize", "/v1/completions", "/v1/chat/completions"):
        answer = server.post(path, {"inputs": "Hi"})
        assert (answer.status, answer.json["error_type"]) == (503, "unavailable")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")


async def test_the_gate_counts_requests_inside(server):
    server.engine.script.hang_after = 1
    body = b'{"inputs": "Hi"}'
    asking = [asyncio.create_task(server.call("POST", "/generate", body, leave_after=0)) for _ in range(3)]
    while server.gate.num_unfinished < 3:
        await asyncio.sleep(0)
    assert not await server.gate.is_empty_within(0)
    await asyncio.gather(*asking)
    assert server.gate.num_unfinished == 0 and await server.gate.is_empty_within(0)


def test_info_has_todays_fields_and_the_older_ones(server):
    info = server.get("/info").json
    assert (info["model_id"], info["model_sha"], info["router"]) == ("local/model", None, "text-generation-router")
    assert info["max_input_tokens"] == info["max_input_length"] == 40
    assert (info["max_total_tokens"], info["max_batch_total_tokens"]) == (60, 300)
    assert (info["model_dtype"], info["model_device_type"]) == ("torch.float32", "cpu")
    assert info["model_implementation"] is None
    joining = server.engine.snapshot().joining
    assert (info["waiting_served_ratio"], info["max_waiting_tokens"], info["max_batch_size"]) == astuple(joining)


def test_models_lists_the_served_model(server):
    [model] = server.get("/v1/models").json["data"]
    limit = server.engine.limits.max_total_tokens
    assert model == {"id": "local/model", "object": "model", "created": 0, "owned_by": "local/model"} | {
        "root": "local/model", "max_model_len": limit
    }  # fmt: skip


def test_the_served_name_is_that_of_v1_and_info_keeps_the_id(make_server):
    server = make_server(served_model_name="mine")
    assert server.get("/v1/models").json["data"][0]["id"] == "mine"
    assert server.get("/info").json["model_id"] == "local/model"


def test_tokenize_counts_bytes(server):
    tokens = server.post("/tokenize", {"inputs": "aé!", "parameters": {"truncate": 1}}).json
    assert (tokens[0]["text"], tokens[0]["start"], tokens[0]["stop"]) == ("a", 0, 1)
    assert (tokens[-1]["text"], tokens[-1]["start"], tokens[-1]["stop"]) == ("!", 3, 4)
    assert list(tokens[0]) == ["id", "text", "start", "stop"]
    assert server.post("/tokenize", {"inputs": ""}).body == b"[]"
    assert server.metric("tgi_request_count_total") == 0


def test_long_texts_are_tokenized_in_one_list(server):
    text = "xyz " * 1500
    tokens = server.post("/tokenize", {"inputs": text}).json
    assert "".join(token["text"] for token in tokens) == text and len(tokens) > 4096


def test_a_text_of_several_parts_is_told_in_one_list(make_server):
    server = make_server(payload_limit=200_000)
    text = "hello wörld " * 4000
    answer = server.post("/tokenize", {"inputs": text})
    assert "content-length" not in answer.headers and answer.headers["content-type"] == "application/json"
    assert len(answer.chunks) > 2
    content, tokens = text.encode(), answer.json
    assert all(content[token["start"] : token["stop"]].decode() == token["text"] for token in tokens)
    assert (tokens[0]["start"], tokens[-1]["stop"]) == (0, len(content))
    assert all(before["stop"] in (after["start"], after["stop"]) for before, after in pairwise(tokens))
    assert server.permits.left == server.config.requests.max_concurrent_requests


def test_tokenize_takes_a_permit_and_gives_it_back(make_server):
    server = make_server(max_concurrent_requests=1)
    permit = server.permits.take(Share("peer 192.0.2.1"), 1)
    refused = server.post("/tokenize", {"inputs": "Hi"})
    assert (refused.status, refused.json["error_type"]) == (429, "overloaded") and "retry-after" in refused.headers
    assert server.failures("overloaded") == 1
    permit.give_back(1)
    assert server.post("/tokenize", {"inputs": "Hi"}).status == 200
    assert server.permits.left == 1


def test_a_tokenize_client_that_leaves_keeps_no_permit(make_server):
    server = make_server(payload_limit=200_000)
    body = b'{"inputs": "%s"}' % (b"hello world " * 10_000)
    asyncio.run(server.call("POST", "/tokenize", body, leave_after=2))
    assert server.permits.left == server.config.requests.max_concurrent_requests


def test_metrics_are_plain_text_and_move(server):
    before = server.get("/metrics")
    assert before.headers["content-type"] == "text/plain; charset=utf-8"
    assert b"\ntgi_request_success 0\n" in before.body
    server.post("/generate", {"inputs": "Hi"})
    after = server.get("/metrics").body
    for line in (b"tgi_request_count 1", b"tgi_request_success 1", b"tgi_request_generated_tokens_sum 2"):
        assert line in after.splitlines()


def test_head_works_where_get_does(server):
    for path in (
        "/ /health /ping /live /ready /info /metrics /version /v1/models /v1/models/local/model /docs /docs/ "
        "/docs/start.js /docs/swagger-ui.css /docs/swagger-ui-bundle.js /api-doc/openapi.json /openapi.json"
    ).split():
        assert server.get(path, "HEAD").status == 200, path


def test_unknown_paths_and_methods_are_refused_in_json(server):
    for path in ("/nowhere", "/info/", "/v1/nowhere"):
        answer = server.get(path)
        assert (answer.status, answer.json["error_type"]) == (404, "not_found")
        assert answer.headers["content-type"] == "application/json"
    allowed_of = {"/generate": "POST", "/info": "GET,HEAD", "/": "GET,HEAD,POST", "/v1/models/local/model": "GET,HEAD"}
    for path, allowed in allowed_of.items():
        answer = server.get(path, "DELETE")
        assert (answer.status, answer.json["error_type"], answer.headers["allow"]) == (
            405,
            "method_not_allowed",
            allowed,
        )
        assert answer.headers["content-type"] == "application/json"


def test_an_unexpected_exception_is_a_500_in_json_and_raised_again(server):
    async def mistaken(_: Request) -> None:
        raise RuntimeError("a secret")

    server.app.add_route("/mistaken", mistaken)
    answers = []

    async def send(message) -> None:
        answers.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/mistaken", "headers": [], "query_string": b""}
    with pytest.raises(RuntimeError):  # uvicorn logs the exception
        asyncio.run(server.app(scope, receive, send))
    start, body = answers[0], answers[1]
    assert start["status"] == 500 and (b"content-type", b"application/json") in start["headers"]
    assert json.loads(body["body"])["error_type"] == "internal" and b"secret" not in body["body"]


def test_any_origin_may_read_by_default(server):
    answer = server.get("/info", headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "*" and "origin" in answer.headers["vary"]
    answer = server.get("/generate", "OPTIONS")
    assert (answer.status, answer.headers["access-control-allow-methods"]) == (200, "GET,POST")
    allowed = "content-type,authorization,x-tenant,x-request-timeout,x-api-key,anthropic-version,anthropic-beta"
    assert answer.headers["access-control-allow-headers"] == allowed


def test_only_listed_origins_may_read(make_server):
    server = make_server(cors_allow_origin=("https://a.example",))
    allowed = server.get("/info", headers={"origin": "https://a.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in server.get("/info", headers={"origin": "https://b.example"}).headers


async def test_a_request_does_not_wait_for_all_of_another_address(server):
    ended: list[str] = []

    async def call(client: str) -> None:
        assert (await server.call("GET", "/live", b"", client=client)).status == 200
        ended.append(client)

    await asyncio.gather(*(call(client) for client in ["192.0.2.1"] * 20 + ["192.0.2.2"]))
    assert ended.index("192.0.2.2") <= 3


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("origins", [(), ("https://a.example",)])
def test_the_answer_at_once_to_live_is_the_route_s_answer(make_server, origins, method):
    server = make_server(cors_allow_origin=origins)
    headers = {"origin": "https://a.example"}
    by_route = server.get("/live", method, headers)
    del (
        by_route.headers["x-request-id"],
        by_route.headers["access-control-expose-headers"],
    )  # answers_at_once sends neither
    server.app = answers_at_once(server.config)[b"/live"]
    at_once = server.get("/live", method, headers)
    assert (at_once.status, at_once.headers, at_once.chunks) == (by_route.status, by_route.headers, by_route.chunks)


def test_a_model_is_told_by_its_name(server):
    entry = server.get("/v1/models/local/model")
    assert entry.json == server.get("/v1/models").json["data"][0] and entry.json["id"] == "local/model"
    answer = server.get("/v1/models/gpt-4o")
    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


def test_anthropics_clients_get_models_in_their_form(make_server):
    server, headers = make_server(served_model_name="mine"), {"anthropic-version": "2023-06-01"}
    entry = {"type": "model", "id": "mine", "display_name": "mine", "created_at": "1970-01-01T00:00:00Z"}
    listed = {"data": [entry], "has_more": False, "first_id": "mine", "last_id": "mine"}
    assert server.get("/v1/models", "GET", headers).json == listed
    for name in ("mine", "local/model"):
        assert server.get(f"/v1/models/{name}", "GET", headers).json == entry
    refused = server.get("/v1/models/claude", "GET", headers)
    assert (refused.status, refused.json["type"], refused.json["error"]["type"]) == (404, "error", "not_found_error")


def test_the_version_is_that_of_info(server):
    assert server.get("/version").json["version"] == server.get("/info").json["version"]


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ("a-1", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("a b", False),
        ("\u00e4", False),
        ("a\tb", False),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/generate", "/v1/completions", "/none"])
def test_every_answer_has_an_id(server, given, is_taken, path):
    answer = server.post(path, {"inputs": 1}, {"content-type": "application/json", "x-request-id": given})
    identity = answer.headers["x-request-id"]
    assert (identity == given) is is_taken and 0 < len(identity) <= 128
    assert answer.headers["x-request-id"] != server.post(path, {}).headers["x-request-id"]


def test_the_log_line_of_a_request_has_its_id(server, caplog):
    formatted = []

    class Handler(logging.Handler):
        def emit(self, record):
            formatted.append(JsonFormatter().format(record))

    handler = Handler()
    logging.getLogger("text_generation_router").addHandler(handler)
    try:
        with caplog.at_level("INFO"):
            server.post("/generate", {"inputs": "Hi"}, {"content-type": "application/json", "x-request-id": "mine"})
    finally:
        logging.getLogger("text_generation_router").removeHandler(handler)
    [line] = [json.loads(line) for line in formatted if "Success" in line]
    assert line["request_id"] == "mine"
