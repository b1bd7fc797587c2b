"""The engine view in a real browser: what it shows, and which pages get nothing."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from text_generation_common.json_values import as_json
from text_generation_router.engine.protocol import StateNews
from text_generation_router.openapi.tests.chromium import PROGRAM, WHY_NOT, Tab, served, tab_of
from text_generation_router.page.engine.tests.watched import STATE, viewed
from text_generation_router.view.values import ShardNote

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ADMIN = hashlib.sha256(b"the-admin-key").digest()
TEXT = "document.querySelector('[aria-label=\"{}\"]')?.innerText"
ENGINE_TAB = "header nav button:last-child"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab_of(str(PROGRAM), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def opened(tab: Tab, address: str) -> None:
    tab.show_as(1280, 800)
    tab.open(f"{address}/")
    tab.until("!!document.activeElement?.matches('.composer textarea')")
    assert tab.value(f"document.querySelector({json.dumps(ENGINE_TAB)}).innerText") == "Engine"
    tab.click(ENGINE_TAB)


def test_the_view_shows_what_the_engine_tells(make_server: Any, tab: Tab):
    server = viewed(make_server, engine_view=True)
    with served(server.app) as address:
        for _ in range(3):
            server.history.sample()
        opened(tab, address.replace("127.0.0.1", "localhost"))
        rows = tab.until(TEXT.format("Rows"))
        assert "1 running" in rows and "40, 16 cached" in rows and "12 of 60, about 30" in rows
        queue = tab.value(TEXT.format("Queue"))
        assert "the token slots would not last" in queue and "its turn has not come" in queue
        slots = "document.querySelector('canvas.slots')"
        assert tab.value(f"{slots}.dataset.counts") == "40 8 16 36"
        used = tab.value(f"[...{slots}.getContext('2d').getImageData(0, 0, 100, 1).data].filter((_, i) => i % 4 === 0)")
        assert len(set(used[:40])) == 1 and used[39] != used[40] and used[47] != used[48] and used[63] != used[64]
        assert "16 tokens after 0" in tab.value(TEXT.format("Prefix tree"))
        assert "left 3.0 s ago" in tab.value(TEXT.format("Fronts")) and "killed" in tab.value(TEXT.format("Engines"))
        tab.until("document.querySelectorAll('.uplot canvas').length >= 4")
        loss = replace(STATE, shards=ShardNote(False, 0.1, 1, 1, "", 1, "shard 0 was killed", 0.1))
        tab.value("0")
        server.watched.state = loss
        watcher = server.watched.watcher
        assert watcher is not None
        watcher(StateNews(as_json(loss)))
        assert "shard 0 was killed" in tab.until(TEXT.format("Shards"), lambda text: "killed" in text, limit_s=30)
        assert all(url.startswith((address.replace("127.0.0.1", "localhost"), "data:")) for url in tab.requests)
        assert tab.complaints == []


def test_the_administrators_key_is_asked_and_is_in_no_address(make_server: Any, tab: Tab):
    with served(viewed(make_server, admin_key_digest=ADMIN).app) as address:
        opened(tab, address)
        for key in ("a-wrong-key", "the-admin-key"):
            tab.until("!!document.querySelector('form.admin input')")
            tab.value("(({focus}) => 0)(document.querySelector('form.admin input'))")
            tab.click("form.admin input")
            tab.value("document.querySelector('form.admin input').select()")
            tab.write(key)
            tab.press("Enter")
            if key == "a-wrong-key":
                tab.until("document.querySelector('.admin .error')?.innerText === 'The server does not know this key.'")
        assert "1 running" in tab.until(TEXT.format("Rows"))
        kept = tab.value("JSON.stringify([localStorage, document.cookie, sessionStorage, location.href])")
        assert json.loads(kept) == [{}, "", {"tgi-admin-key": "the-admin-key"}, f"{address}/"]
        assert not any("the-admin-key" in url for url in tab.requests)


def test_a_page_of_another_origin_reads_nothing(make_server: Any, tab: Tab):
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": b"<title>other</title>"})

    server = viewed(make_server, engine_view=True, admin_key_digest=ADMIN)
    with served(server.app) as address, served(other) as evil:
        here = address.replace("127.0.0.1", "localhost")
        for origin in (evil, evil.replace("127.0.0.1", "localhost")):
            tab.open(f"{origin}/")
            tab.until("document.title === 'other'")
            for url in (f"{address}/engine/history", f"{here}/engine/state", f"{here}/engine/requests"):
                for options in ("{}", "{mode: 'no-cors'}", "{headers: {authorization: 'Bearer the-admin-key'}}"):
                    read = f"fetch({json.dumps(url)}, {options}).then((one) => one.text(), () => '')"
                    assert tab.value(read) == ""
            assert tab.value(f"fetch({json.dumps(address + '/info')}).then((one) => one.status)") == 200
        assert server.watched.num_watches == 0
