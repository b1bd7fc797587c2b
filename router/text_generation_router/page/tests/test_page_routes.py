"""The answers of `/` and `/ui`, to browsers and to other clients."""

import gzip
import hashlib
import re
from typing import Any

import pytest

from text_generation_router.engine.protocol import Load
from text_generation_router.page.accept import prefers_html
from text_generation_router.page.routes import FILES, STATIC

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
BROWSER = {"accept": CHROMIUM}
VENDORED = ("preact.js", "uplot.js", "uplot.css")
KEY = "a-key"
KEYS = {hashlib.sha256(KEY.encode()).digest(): ""}


@pytest.mark.parametrize(
    ("accept", "prefers"),
    [
        (CHROMIUM, True),
        ("text/html", True),
        ("TEXT/HTML;level=1 , */*;q=0.1", True),
        ("application/json;q=0.5, text/html;q=0.6", True),
        ("", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("application/json, text/html", False),
        ("text/html;q=0.5, application/json", False),
        ("text/html;q=0", False),
        ("text/html;q=2", False),
        ("text/html;q=x", False),
    ],
)
def test_html_is_for_clients_that_prefer_it(accept: str, prefers: bool):
    assert prefers_html(accept) is prefers


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/html;q=0.5,*/*"])
def test_all_but_browsers_get_the_health_check_at_the_root(server, accept: str | None):
    headers = {} if accept is None else {"accept": accept}
    healthy, expected = server.get("/", headers=headers), server.get("/health", headers=headers)
    assert (healthy.status, healthy.body) == (expected.status, expected.body) == (200, b"")
    assert healthy.headers.keys() == expected.headers.keys()
    server.engine.healthy = False
    answer = server.get("/", headers=headers)
    assert (answer.status, answer.json) == (503, server.get("/health", headers=headers).json)


def test_other_methods_keep_the_health_check(server):
    assert server.get("/", "HEAD", BROWSER).headers.get("content-type") is None
    server.engine.healthy = False
    assert server.get("/", "HEAD", BROWSER).status == 503


def _state_of(page: bytes) -> str:
    found = re.search(rb'data-state="(\w+)"', page)
    assert found is not None
    return found[1].decode()


def test_a_browser_gets_the_page_in_every_state(server, monkeypatch: pytest.MonkeyPatch):
    server.engine.healthy = False

    def state() -> str:
        page = server.get("/", headers=BROWSER)
        assert page.status == 200 and page.headers["content-type"].startswith("text/html")
        assert _state_of(page.body) == server.get("/ui/state").json["state"]
        return _state_of(page.body)

    assert state() == "ready"
    monkeypatch.setattr(server.engine, "load", lambda: Load(1, is_ready=False))
    assert state() == "lost"
    monkeypatch.setattr(type(server.config), "is_front", True)
    assert state() == "no_engine"
    server.gate.shut()
    assert state() == "draining"


def test_the_page_loads_at_most_five_files_which_the_server_has_and_compresses(server):
    packed = {"accept-encoding": "gzip"}
    page = server.get("/", headers=BROWSER | packed)
    text = gzip.decompress(page.body).decode()
    loaded = {path for path in re.findall(r'(?:src|href)="([^"]+)"', text) if path.startswith("/ui/")}
    sizes = [len(page.body)]
    for path in loaded:
        answer = server.get(path, headers=packed)
        assert answer.status == 200 and answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.body) == server.get(path).body
        sizes.append(len(answer.body))
    assert len(sizes) <= 5 and sum(sizes) <= 25_000
    own = sum(path.stat().st_size for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))
    assert own - sum((STATIC / name).stat().st_size for name in VENDORED) <= 90_000


def test_the_modules_import_files_that_the_server_has():
    names = {file.name for file in FILES}
    for file in FILES:
        if file.name not in VENDORED:
            imported = re.findall(r'from "\./([^"]+)"', file.content.decode())
            assert set(imported) <= names


def test_the_policy_allows_nothing_but_files_of_this_server(server):
    page = server.get("/", headers=BROWSER)
    assert re.search(rb"<script[^>]*>[^<]|<style|\son\w+=|\sstyle=", page.body) is None
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-store" and page.headers["vary"].startswith("accept, accept-encoding, ")


def test_no_module_reads_text_as_html_or_sends_the_key_elsewhere():
    own = {file.name: file.content.decode() for file in FILES if file.name not in VENDORED}
    for name, text in own.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|localStorage|cookie", text), (
            name
        )
        assert "sessionStorage" not in text or name in ("core.js", "engine.js")


def test_a_file_that_has_not_changed_is_not_sent_again(server):
    first = server.get("/ui/app.js")
    again = server.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert server.get("/ui/app.js", headers={"if-none-match": '"other"'}).status == 200


def test_the_name_of_a_model_stays_text(make_server: Any):
    page = make_server(served_model_name='"><img src=x>').get("/", headers=BROWSER)
    assert b"<img" not in page.body and b"&quot;&gt;&lt;img src=x&gt;" in page.body


def test_without_the_page_the_root_is_the_health_check_for_all(make_server: Any):
    server = make_server(no_page=True)
    assert server.get("/", headers=BROWSER).body == b""
    assert {server.get(file.path).status for file in FILES} == {404} and server.get("/ui/state").status == 404


def test_the_page_is_closed_as_the_documents_are(make_server: Any):
    paths = ("/ui/state", *(file.path for file in FILES))
    opened, closed = make_server(api_keys=KEYS), make_server(api_keys=KEYS, closed_routes=True)
    for path in paths:
        assert (opened.get(path).status, closed.get(path).status) == (200, 401)
    assert opened.get("/", headers=BROWSER).status == 200
    assert closed.get("/", headers=BROWSER).status == 401 and closed.get("/").status == 200
    known = {"authorization": f"Bearer {KEY}"}
    assert closed.get("/", headers=BROWSER | known).status == 200
