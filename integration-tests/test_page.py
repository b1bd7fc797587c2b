"""The page for browsers in Chromium, on whole servers. `WRITE_PICTURES=1` writes the pictures of docs/page.md."""

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from calls import metric
from processes import engine, routers, shards
from scale import SLOW_STEPS
from server_process import ServerProcess, wait_until

from text_generation_common.tests.slowness import IDLE, is_within, slowness
from text_generation_router.openapi.tests.chromium import PROGRAM, WHY_NOT, Tab, tab_of

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
MAX_PICTURE_BYTES = 150_000
SHOWN_S = 2.0
LONG = 640  # tokens of a text that goes on for seconds
STORY = "Tell me a story about a fox."
IS_DONE = "document.querySelectorAll('.answer[aria-busy=true]').length === 0 && !!document.querySelector('.answer')"
TEXT = "document.querySelector('.answer .text').innerText"
STORE = "import('/ui/core.js').then(({{store, update}}) => {{ {script}; update(); return 1; }})"
# Texts whose contrast to what is behind them is below 4.5, as the Web Content Accessibility Guidelines compute it.
FAINT = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parts(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll('body *')) {
    const words = [...element.childNodes].filter((one) => one.nodeType === 3 && one.data.trim()).length;
    const placeholder = element.placeholder && !element.value;
    if (!(words || element.value || placeholder) || !element.getClientRects().length) continue;
    const style = getComputedStyle(element, placeholder ? '::placeholder' : null);
    const [a, b] = [light(parts(style.color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push([element.className || element.nodeName, style.color]);
  }
  return faint;
})()"""
TOO_WIDE = """[...document.querySelectorAll('body, body *')]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('pre, .table, .tree'))
  .map((one) => one.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab_of(str(PROGRAM), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def opened(tab: Tab, server: ServerProcess) -> None:
    tab.show_as(1280, 800)
    tab.open(f"{server.url}/")
    tab.until("!!document.activeElement?.matches('.composer textarea')")


def change(tab: Tab, script: str) -> None:
    """Changes what the page shows, as its panels do."""
    tab.value(STORE.format(script=script))


def ask(tab: Tab, text: str) -> None:
    tab.click(".composer textarea")
    tab.write(text)
    tab.press("Enter")


def keep_picture(tab: Tab, name: str) -> None:
    picture = tab.picture()
    assert picture.startswith(b"\x89PNG") and len(picture) <= MAX_PICTURE_BYTES
    if os.environ.get("WRITE_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / f"{name}.png").write_bytes(picture)


def test_the_keyboard_alone_leads_from_the_start_to_an_answer_and_its_tokens(server: ServerProcess, tab: Tab) -> None:
    opened(tab, server)
    change(tab, "store.settings.chat.temperature = 0")
    tab.write("What is 17 + 25?")
    tab.press("Enter")
    tab.until(IS_DONE)
    assert tab.value(TEXT).strip() == "17 + 25 = 42"
    for _ in range(20):
        if tab.value("document.activeElement.innerText") == "Tokens":
            break
        tab.press("Tab")
    tab.press("Enter")
    tab.until("document.querySelectorAll('.token').length > 5")
    tab.value("document.querySelector('.token').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    tab.press("Enter")
    tab.until("document.querySelectorAll('.alternatives li').length > 3")
    assert tab.value("document.querySelector('.token-facts').innerText").strip().startswith("+")
    assert all(url.startswith((f"{server.url}/", "data:")) for url in tab.requests) and tab.complaints == []


def test_an_answer_goes_on_from_an_alternative_by_token_ids(server: ServerProcess, tab: Tab) -> None:
    opened(tab, server)
    change(tab, "Object.assign(store.settings.chat, {temperature: 0, max_tokens: 12})")
    ask(tab, STORY)
    tab.until(IS_DONE)
    tab.click(".answer .actions button")
    tab.click(".token:nth-child(5)")
    tab.until("document.querySelectorAll('.alternatives li').length > 3")
    tab.click(".alternatives li:nth-child(2) button")
    tab.until(f"document.querySelector('.token.chosen') && {IS_DONE}")
    answer = "import('/ui/core.js').then(({store}) => store.turns.chat.at(-1).answer)"
    ids = tab.value(f"{answer}.then(({{promptIds, tokens}}) => [promptIds, tokens.map(({{id}}) => id)])")
    text = tab.value(f"{answer}.then(({{text}}) => text)")
    body = {"prompt": ids[0] + ids[1][:5], "max_tokens": 7, "temperature": 0, "return_token_ids": True}
    [expected] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert expected["token_ids"] == ids[1][5:] and text.endswith(expected["text"]) and len(ids[1]) == 12


@pytest.mark.parametrize("mode", ["chat", "prompt"])
def test_stop_frees_the_row(server: ServerProcess, tab: Tab, mode: str) -> None:
    opened(tab, server)
    settings = "{ignore_eos: true}" if mode == "chat" else "{ignore_eos_token: true}"
    change(tab, f"store.mode = '{mode}'; store.settings.{mode} = {settings}")
    ask(tab, STORY)
    tab.until("document.querySelector('.answer .text')?.innerText.length > 10")
    tab.press("Escape")
    wait_until(lambda: metric(server.url, "tgi_batch_current_size") == 0, 60, "the row is free")
    tab.until(IS_DONE)
    assert "stopped" in tab.value("document.querySelector('.numbers').innerText")


def test_equal_settings_with_equal_seeds_are_equal_and_others_are_marked(server: ServerProcess, tab: Tab) -> None:
    opened(tab, server)
    equal = "{seed: 7, temperature: 1, max_tokens: 40}"
    change(tab, f"store.mode = 'compare'; store.settings.compare = {equal}; store.settingsB = {equal}")
    ask(tab, STORY)
    tab.until("document.querySelector('.difference')?.innerText === 'The answers are equal.'")
    assert tab.value("document.querySelectorAll('.differs').length") == 0
    change(tab, "store.settingsB.seed = 8")
    ask(tab, STORY)
    tab.until(f"document.querySelector('.difference')?.innerText.startsWith('The answers differ') && {IS_DONE}")
    marked = tab.value("[...document.querySelectorAll('.differs')].map(({dataset}) => dataset.index)")
    assert len(marked) == 2 and marked[0] == marked[1]


def test_every_view_fits_and_can_be_read(server: ServerProcess, tab: Tab) -> None:
    opened(tab, server)

    def look(*, picture: str = "", scheme: str = "light") -> None:
        for width, height in ((1280, 800), (768, 900), (360, 740)):
            for colours in ("light", "dark"):
                tab.show_as(width, height, colours)
                tab.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                assert tab.value(TOO_WIDE) == [], (width, picture)
                assert tab.value(FAINT) == [], (colours, picture)
        tab.show_as(1280, 800, scheme)
        if picture:
            keep_picture(tab, picture)

    look()
    change(tab, "store.settings.chat = {seed: 3, max_tokens: 60}")
    ask(tab, STORY)
    tab.until(IS_DONE)
    look(picture="page-chat")
    tab.click(".answer .actions button")
    tab.click(".token:nth-child(5)")
    tab.until("document.querySelectorAll('.alternatives li').length > 3")
    look(picture="page-tokens")
    tab.click(".answer .actions button:nth-child(4)")
    tab.until("!!document.querySelector('.code pre')")
    tab.click("header > button")
    tab.until("!!document.querySelector('.field')")
    tab.value("document.querySelectorAll('.settings details').forEach((one) => (one.open = true))")
    look()
    change(tab, "store.panel = null; store.mode = 'compare'; store.settings.compare = {seed: 3, max_tokens: 50}")
    change(tab, "store.settingsB = {seed: 4, max_tokens: 50, temperature: 1.3}")
    ask(tab, STORY)
    tab.until(IS_DONE)
    look(picture="page-compare", scheme="dark")
    change(tab, "store.dialog = 'key'; store.isKeyWrong = true; store.state = 'lost'")
    look()
    assert tab.complaints == []


def shown(tab: Tab, panel: str, words: str, killed: psutil.Process | None = None) -> None:
    """Waits until a panel of the engine view has the words; within 2 s of an idle machine after a kill."""
    before = slowness() if killed is not None else IDLE
    if killed is not None:
        killed.kill()
    started_s = time.monotonic()
    text = f"document.querySelector('[aria-label=\"{panel}\"]')?.innerText ?? ''"
    tab.until(text, lambda found: re.search(words, found), limit_s=60)
    if killed is not None:
        assert is_within(time.monotonic() - started_s, SHOWN_S, before), (panel, words)


CHAT_TEXT = "import('/ui/core.js').then(({store}) => store.turns.chat.at(-1).answer.text)"


class PlainStream:
    """A text as it comes over one connection, whose front is known."""

    def __init__(self, server: ServerProcess, tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": tokens, "ignore_eos_token": True}}
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/generate_stream", json.dumps(body), headers)
        self._port = self._connection.sock.getsockname()[1]
        self._answer = self._connection.getresponse()
        self._answer.readline()

    def is_on(self, front: psutil.Process) -> bool:
        return any(each.raddr and each.raddr.port == self._port for each in front.net_connections("tcp"))

    def text(self) -> str:
        *_, last = filter(None, self._answer.read().decode().split("\n\n"))
        self._connection.close()
        return json.loads(last.removeprefix("data:"))["generated_text"]


@pytest.mark.alone
def test_a_killed_shard_engine_and_front_are_shown_and_the_texts_go_on(server: ServerProcess, tab: Tab) -> None:
    """Texts are stopped once they have gone on: the steps of this server are slow, so that texts do not end before."""
    wanted = {"temperature": 0, "max_tokens": LONG, "ignore_eos": True}
    body = {"messages": [{"role": "user", "content": STORY}], **wanted}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    text, plain = whole["choices"][0]["message"]["content"], PlainStream(server, LONG // 4).text()
    flags = ("--dtype", "float32", "--api-workers", "2", "--engine-view", "--testing")
    with ServerProcess(*flags, environ={"FAILPOINTS": SLOW_STEPS}) as server:
        opened(tab, server)
        for killed, panel, words in (
            (lambda: shards(server.pid)[0], "Shards", "Last loss"),
            (lambda: engine(server.pid), "Engines", "not connected|ago:"),
        ):
            process = killed()
            change(tab, f"store.mode = 'chat'; store.turns.chat = []; store.settings.chat = {json.dumps(wanted)}")
            ask(tab, STORY)
            change(tab, "store.mode = 'engine'")
            shown(tab, "Rows", "1 running")
            shown(tab, panel, words, process)
            reached = len(tab.value(CHAT_TEXT))
            tab.until(CHAT_TEXT, lambda found, reached=reached: len(found) > reached, limit_s=300)
            change(tab, "store.mode = 'chat'")
            tab.press("Escape")
            tab.until(IS_DONE)
            assert tab.value("document.querySelector('.answer .error')") is None
            assert reached < len(tab.value(CHAT_TEXT)) < len(text) and text.startswith(tab.value(CHAT_TEXT))
        change(tab, "store.mode = 'engine'")
        shown(tab, "Fronts", "connected")
        stream = PlainStream(server, LONG // 4)
        [other] = [front for front in routers(server.pid) if not stream.is_on(front)]
        shown(tab, "Fronts", "left", other)
        assert stream.text() == plain


@contextmanager
def asked_again_and_again(server: ServerProcess, texts: list[str]) -> Iterator[None]:
    """Inside this context each text is asked all the time."""
    is_over = threading.Event()

    def ask_on(text: str) -> None:
        body = {"inputs": text, "parameters": {"max_new_tokens": LONG, "ignore_eos_token": True}}
        while not is_over.is_set():
            httpx.post(f"{server.url}/generate", json=body, timeout=120)

    threads = [threading.Thread(target=ask_on, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_the_engine_view_fits_and_can_be_read(tab: Tab) -> None:
    texts = [STORY, "Once upon a time", "Tell me a story about a bear.", "The fox said", "A", "B", "C"]
    with ServerProcess("--engine-view", "--max-batch-size", "4") as server, asked_again_and_again(server, texts):
        opened(tab, server)
        tab.click("header nav button:last-child")
        shown(tab, "Rows", "[34] running")
        shown(tab, "Queue", "all rows are taken|its turn|running requests go on first")
        tab.until("document.querySelectorAll('.uplot canvas').length >= 6")
        tab.click('[aria-label="Requests"] button')
        tab.until("!!document.querySelector('.timeline')")
        for width, height in ((1280, 800), (768, 900), (360, 740)):
            for colours in ("light", "dark"):
                tab.show_as(width, height, colours)
                tab.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                assert tab.value(TOO_WIDE) == [], width
                assert tab.value(FAINT) == [], colours
        tab.show_as(1280, 1100)
        time.sleep(1)
        keep_picture(tab, "page-engine")
        reached = set()
        for _ in range(40):
            tab.press("Tab")
            reached.add(tab.value("document.activeElement.closest('section.panel')?.ariaLabel"))
        assert {"Engines and fronts", "Rows", "Queue", "Prefix tree", "Requests"} <= reached, "by the keyboard alone"
        assert tab.complaints == []
