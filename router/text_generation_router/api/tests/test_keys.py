import asyncio
import json
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from text_generation_router.api.tests.conftest import HEADERS
from text_generation_router.http.keys import names_of_keys
from text_generation_router.page.routes import FILES

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

KEY = "Secret-Key-1"
DIGESTS = names_of_keys([KEY, "another"], None)
ALWAYS_OPEN = {("GET", path) for path in ("/", "/health", "/ping", "/live", "/ready")}
OPEN_BY_DEFAULT = {
    ("GET", path)
    for path in (
        "/info /version /metrics /v1/models /v1/models/{name:path} /docs /docs/ /docs/start.js /docs/swagger-ui.css "
        "/docs/swagger-ui-bundle.js /api-doc/openapi.json /openapi.json /ui/state"
    ).split()
} | {("GET", file.path) for file in FILES}
PACKED = {"accept-encoding": "gzip"}  # the files of pages are not unpacked for each answer
WRONG = [*TABLES["wrong"], {"authorization": f"Bearer {KEY.lower()}"}, {"authorization": f"Bearer {KEY.upper()}"}]


@pytest.fixture(scope="module")
def guarded(tokenizer, session_server):
    """Two servers with keys: one whose informative routes are closed, and one whose informative routes are open."""
    make = type(session_server)
    return {closed: make(tokenizer, api_keys=DIGESTS, closed_routes=closed) for closed in (False, True)}


def routes_of(server):
    return [(method, route.path) for route in server.app.routes for method in sorted(route.methods)]


@pytest.mark.parametrize("closed", [False, True])
def test_every_route_but_the_open_ones_needs_the_key(guarded, closed):
    server = guarded[closed]
    open_routes = ALWAYS_OPEN if closed else ALWAYS_OPEN | OPEN_BY_DEFAULT
    routes = routes_of(server)
    assert {("POST", "/generate"), ("POST", "/tokenize"), ("HEAD", "/metrics")} | OPEN_BY_DEFAULT <= set(routes)
    for method, pattern in routes:
        path = pattern.replace("{name:path}", "local/model")
        is_open = ("GET" if method == "HEAD" else method, pattern) in open_routes
        for headers in WRONG:
            answer = server.get(path, method, headers | PACKED)
            assert (answer.status != 401) == is_open, (method, path, headers)
            if not is_open:
                assert (answer.told["error_type"], answer.headers["www-authenticate"]) == ("unauthorized", "Bearer")
        answer = server.get(path, method, {"authorization": f"Bearer {KEY}"})
        assert answer.status == (415 if method == "POST" else 200), (method, path)
    assert not server.engine.asked


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/v1//models", "/V1/models", "/generate/", "/health/../generate", "/%2e/generate", "/docs/x", "*"],
)
def test_no_other_spelling_of_a_path_avoids_the_key(guarded, closed, path):
    for method in ("GET", "POST", "HEAD", "PUT", "TRACE"):
        assert guarded[closed].get(path, method, {}).status in (401, 404)


def test_a_route_added_later_is_closed(make_server):
    server = make_server(api_keys=DIGESTS)

    async def late(_: Request) -> Response:
        return Response(b"inside")

    server.app.add_route("/late", late)
    server.app.router.routes.append(Route("/later", late))
    for path in ("/late", "/later"):
        assert server.get(path).status == 401


def test_the_right_key_generates_and_the_second_one_too(guarded):
    for key, scheme in ((KEY, "Bearer"), ("another", "Bearer"), (KEY, "bEARER")):
        headers = {"authorization": f"{scheme} {key}", "content-type": "application/json"}
        assert guarded[True].post("/generate", {"inputs": "Hi"}, headers).status == 200


def status_of(app, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Status of the answer to a request whose body must not be read."""

    async def receive():
        raise AssertionError("the body was read")

    statuses: list[int] = []

    async def send(message):
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    return statuses[0]


def test_anthropics_routes_take_the_key_in_a_header_of_its_own_and_no_other_route_does(guarded, make_server):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    headers = {"content-type": "application/json", "x-api-key": KEY}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert guarded[True].post(path, body, headers).status == 200
        refused = guarded[True].post(path, body, headers | {"x-api-key": "x"})
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
    for method, pattern in routes_of(guarded[True]):
        if not pattern.startswith("/v1/messages") and (method.replace("HEAD", "GET"), pattern) not in ALWAYS_OPEN:
            assert guarded[True].get(pattern.replace("{name:path}", "m"), method, headers).status == 401
    owners = {guarded[True].engine.asked[-1].request.share.owner}
    guarded[True].post("/v1/messages", body, {**HEADERS, "authorization": f"Bearer {KEY}"})
    assert owners == {guarded[True].engine.asked[-1].request.share.owner}
    two = [(b"x-api-key", KEY.encode()), (b"x-api-key", b"x")]
    assert status_of(guarded[True].app, "POST", "/v1/messages", two) == 401


def test_a_closed_list_of_models_takes_the_header_of_anthropics_clients(guarded):
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    for path in ("/v1/models", "/v1/models/local/model"):
        assert guarded[True].get(path, headers=headers).status == 200
        assert guarded[True].get(path, headers=headers | {"x-api-key": "x"}).status == 401
        assert guarded[True].get(path, headers=headers | {"authorization": "Bearer x"}).status == 401


def test_nothing_of_the_body_is_read_without_a_key(guarded):
    assert status_of(guarded[False].app, "POST", "/generate", [(b"content-type", b"application/json")]) == 401


def test_preflight_requests_need_no_key(guarded):
    answer = guarded[True].get("/generate", "OPTIONS", {"origin": "https://a.example"})
    assert answer.status == 200 and "authorization" in answer.headers["access-control-allow-headers"].split(",")


def test_a_browser_may_read_the_refusal(guarded):
    answer = guarded[True].get("/info", headers={"origin": "https://a.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, "*")


def test_two_authorization_headers_are_refused_even_if_one_key_is_right(guarded):
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"authorization", b"Bearer x")]
    assert status_of(guarded[True].app, "GET", "/info", headers[:1]) == 200
    assert status_of(guarded[True].app, "GET", "/info", headers) == 401


def test_without_keys_requests_need_no_key(server):
    assert server.post("/generate", {"inputs": "Hi"}).status == 200
