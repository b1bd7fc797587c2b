"""Access to the engine view, and what no answer of it contains."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request

from text_generation_common.flags.http import HttpFlags, view_refusal
from text_generation_common.json_values import as_json
from text_generation_common.logs import request_id
from text_generation_router.errors import UnauthorizedError
from text_generation_router.metrics.tracing import GenerationSummary
from text_generation_router.page.engine import routes
from text_generation_router.page.engine.access import OF_PROXIES, ViewAccess
from text_generation_router.page.engine.history import COLUMNS, NUM_SAMPLES
from text_generation_router.page.engine.records import MAX_RECORDS, Records
from text_generation_router.page.engine.tests.watched import STATE, viewed
from text_generation_router.scheduling.request import GenerationRequest

ADMIN, CLIENT = hashlib.sha256(b"admin").digest(), hashlib.sha256(b"client").digest()
HOST = {"host": "127.0.0.1:3000"}
PATHS = ("/engine/state", "/engine/history", "/engine/requests", "/engine/requests/test")
REQUEST = GenerationRequest((1, 2, 3), 9)


@pytest.fixture
def make(make_server: Any) -> Callable[..., Any]:
    return partial(viewed, make_server)


def scope(
    server: tuple[str, int] | None = ("127.0.0.1", 3000), headers: dict[str, str] | None = None
) -> dict[str, Any]:
    given = HOST if headers is None else headers
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    return {"type": "http", "method": "GET", "path": "/engine/state", "headers": raw, "server": server}


OWN = [
    HOST,
    {"host": "localhost:3000"},
    {"host": "[::1]:3000"},
    HOST | {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-origin"},
    {"host": "localhost:3000", "origin": "http://localhost:3000"},
]
FOREIGN = [
    {},
    {"host": ""},
    {"host": "127.0.0.1"},
    {"host": "127.0.0.1:3001"},
    {"host": "127.0.0.1:3000:3000"},
    {"host": "evil.example:3000"},
    {"host": "localhost.evil.example:3000"},
    {"host": "127.0.0.1.nip.io:3000"},
    {"host": "LOCALHOST:3000"},
    {"host": "0.0.0.0:3000"},
    HOST | {"origin": "http://localhost:3000"},
    HOST | {"origin": "https://127.0.0.1:3000"},
    HOST | {"origin": "http://127.0.0.1:8000"},
    HOST | {"origin": "null"},
    HOST | {"origin": ""},
    HOST | {"sec-fetch-site": "cross-site"},
    HOST | {"sec-fetch-site": "same-site"},
    HOST | {"sec-fetch-site": "none"},
    *(HOST | {name: "192.0.2.1"} for name in OF_PROXIES),
]


def may_see(access: ViewAccess, asked: dict[str, Any]) -> bool:
    try:
        access.check(Request(asked))
    except UnauthorizedError:
        return False
    return True


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_programs_and_the_page_of_this_machine_see_the_engine(headers: dict[str, str]):
    assert may_see(ViewAccess(None, is_open_here=True), scope(headers=headers))
    assert not may_see(ViewAccess(None, is_open_here=False), scope(headers=headers))
    assert not may_see(ViewAccess(ADMIN, is_open_here=False), scope(headers=headers))


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_other_names_other_pages_and_proxies_do_not(headers: dict[str, str]):
    for access in (ViewAccess(None, is_open_here=True), ViewAccess(ADMIN, is_open_here=True)):
        assert not may_see(access, scope(headers=headers))
        assert not may_see(access, scope(headers=headers | {"authorization": "Bearer client"}))
    assert may_see(ViewAccess(ADMIN, is_open_here=True), scope(headers=headers | {"authorization": "Bearer admin"}))


def test_only_a_loopback_address_counts_and_its_port():
    access = ViewAccess(None, is_open_here=True)
    assert not may_see(access, scope(server=("192.0.2.7", 3000)))
    assert not may_see(access, scope(server=None)) and not may_see(access, scope(server=("/socket", 3000)))
    assert may_see(access, scope(server=("::1", 80), headers={"host": "[::1]"}))
    twice = scope()
    twice["headers"] *= 2
    assert not may_see(access, twice)


@pytest.mark.parametrize(
    ("hostname", "proxies", "is_refused"),
    [
        ("127.0.0.1", (), False),
        ("127.8.8.8", (), False),
        ("::1", (), False),
        ("0.0.0.0", (), True),
        ("::", (), True),
        ("192.0.2.1", (), True),
        ("some-name", (), True),
        ("127.0.0.1", ("10.0.0.1",), True),
    ],
)
def test_a_start_with_a_proxy_or_an_open_address_is_refused(hostname: str, proxies: tuple[str, ...], is_refused: bool):
    refusal = view_refusal(HttpFlags(hostname=hostname, engine_view=True), proxies)
    assert (refusal is not None) is is_refused
    assert view_refusal(HttpFlags(hostname=hostname), proxies) is None


@pytest.mark.parametrize("path", PATHS)
def test_without_flag_and_key_there_is_no_such_route(make: Any, path: str):
    answer = make().get(path, headers={"host": "127.0.0.1:80"})
    assert answer.status == 404 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
def test_keys_of_clients_open_nothing_and_no_answer_depends_on_an_id(make: Any, path: str):
    server = make(admin_key_digest=ADMIN, api_keys={CLIENT: ""})
    for key in ("", "Bearer client", "Bearer ", "Basic admin", "Bearer admin2"):
        answer = server.get(path, headers={"host": "127.0.0.1:80"} | ({"authorization": key} if key else {}))
        assert answer.status == 401 and answer.json["error_type"] == "unauthorized"
    assert server.watched.num_watches == 0


@pytest.mark.parametrize("path", [*PATHS, "/engine/nothing"])
def test_no_answer_has_a_cors_header_and_a_preflight_is_refused(make: Any, path: str):
    server = make(admin_key_digest=ADMIN, engine_view=True, cors_allow_origin=("https://a.example",))
    asked = {"host": "127.0.0.1:80", "origin": "https://a.example"}
    allowed = asked | {"authorization": "Bearer admin"}
    preflight = asked | {"access-control-request-method": "GET", "access-control-request-headers": "authorization"}
    for method, headers in (("GET", asked), ("HEAD", asked), ("OPTIONS", preflight), ("POST", asked)):
        answer = server.get(path, method, headers)
        assert answer.status in (401, 404, 405)
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    answer = server.get(path, "HEAD" if path == "/engine/state" else "GET", allowed)
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert server.get("/info", headers=asked).headers["access-control-allow-origin"] == "https://a.example"


def test_unknown_and_foreign_ids_get_the_same_answer(make: Any):
    server = make(engine_view=True)
    here = {"host": "127.0.0.1:80", "x-request-id": "test"}
    answers = [server.get(f"/engine/requests/{name}", headers=here) for name in ("a", "f2-123", "x" * 128, "%00")]
    assert {(answer.status, answer.body) for answer in answers} == {(404, answers[0].body)}
    assert answers[0].json["error_type"] == "not_found"


def test_a_request_is_recorded_without_its_text(make: Any):
    server = make(engine_view=True)
    here = {"host": "127.0.0.1:80"}
    headers = {"x-request-id": "r1", "content-type": "application/json"}
    assert server.post("/generate", {"inputs": "a secret of mine"}, headers).status == 200
    [listed] = server.get("/engine/requests", headers=here).json["requests"]
    assert listed["id"] == "r1" and listed["generated_tokens"] == 2 and listed["stages"] == []
    [found] = server.get("/engine/requests/r1", headers=here).json["generations"]
    assert [stage["name"] for stage in found["stages"]][:3] == ["validate", "queue", "prefill"]
    assert found["state"] == "length" and found["stages"][0]["start_s"] == 0 <= found["stages"][0]["end_s"]
    assert "secret" not in json.dumps([listed, found])


@pytest.mark.parametrize(("engine", "problem"), [("", ""), ("e1", ""), ("e2", "not connected"), ("gone", "")])
def test_a_viewer_gets_the_state_of_the_engine_that_it_names(make: Any, monkeypatch: Any, engine: str, problem: str):
    monkeypatch.setattr(routes, "STREAM_S", 0.3)
    server = make(engine_view=True)
    path = "/engine/state"
    answer = server.get(path, headers={"host": "127.0.0.1:80"}) if not engine else ask_for(server, engine)
    first = answer.events[0]
    assert (first["problem"], first["state"]) == (problem, None if problem else json.loads(as_json(STATE)))
    assert [(note["name"], note["standing"]) for note in first["engines"]] == [("e1", "ready"), ("e2", "away")]
    assert first["front"] == {"id": "f1", "open": 0} and server.watched.watcher is None
    assert answer.headers["cache-control"] == "no-store"


def ask_for(server: Any, engine: str) -> Any:
    app = server.app

    async def named(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"query_string": f"engine={engine}".encode()}, receive, send)

    server.app = named
    return server.get("/engine/state", headers={"host": "127.0.0.1:80"})


def test_viewers_have_a_bound_and_a_stream_ends_when_the_server_does(make: Any, monkeypatch: Any):
    server = make(engine_view=True)
    monkeypatch.setattr(routes, "MAX_VIEWERS", 0)
    assert server.get("/engine/state", headers={"host": "127.0.0.1:80"}).status == 429
    monkeypatch.setattr(routes, "MAX_VIEWERS", 1)
    server.gate.shut()
    assert server.get("/engine/state", headers={"host": "127.0.0.1:80"}).events == []


def test_fifteen_minutes_are_kept_and_no_more(make: Any):
    server = make(engine_view=True)
    for _ in range(NUM_SAMPLES + 5):
        server.history.sample()
    server.metrics.time_between_tokens.observe(0.02, 40)
    server.history.sample()
    columns = server.get("/engine/history", headers={"host": "127.0.0.1:80"}).json["columns"]
    assert tuple(columns) == COLUMNS and {len(column) for column in columns.values()} == {NUM_SAMPLES}
    assert (columns["tokens_per_s"][-2:], columns["token_gap_ms"][-1]) == ([0, 40], 20)
    assert columns["ready"][0] == 1


def test_old_records_are_forgotten_and_a_failed_request_says_why():
    records = Records()
    summary = GenerationSummary(1.0, 1.5, 4.0, 0.5, 0.25, 1.0, ((0.3, 0.8),), "dropped", None, 3, 2, 1, None)
    for number in range(MAX_RECORDS + 1):
        request_id.set(f"r{number}")
        trace = records.begin(REQUEST)
        trace.end(replace(summary, failure="dropped" if number % 2 else None, finish_reason="stop"))
    assert records.find("r0") is None and records.newest(2)[0]["id"] == f"r{MAX_RECORDS}"
    [found] = records.find("r1") or []
    assert found["state"] == "dropped"
    assert found["stages"][-1] == {"name": "replay", "start_s": 1.3, "end_s": 1.8}
    request_id.set("open")
    records.begin(REQUEST)
    assert records.newest(1)[0]["state"] == "open"
