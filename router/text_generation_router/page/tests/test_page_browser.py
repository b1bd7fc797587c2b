"""The page in a real browser, over an engine whose answers are scripted."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from text_generation_common.tests.slowness import is_within, slowness
from text_generation_router.api.tests.conftest import Script
from text_generation_router.engine.protocol import Load
from text_generation_router.openapi.tests.chromium import PROGRAM, WHY_NOT, Tab, served, tab_of

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
KEY = "a-key-of-one-user"
HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", " [a](javascript:alert(3))"]
ANSWER = "document.querySelector('.answer .text')?.innerText"
IS_DONE = "!!document.querySelector('.answer .actions')"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab_of(str(PROGRAM), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def ask(tab: Tab, text: str) -> None:
    tab.click(".composer textarea")
    tab.write(text)
    tab.press("Enter")


def opened(tab: Tab, address: str) -> None:
    tab.show_as(1280, 800)
    tab.open(f"{address}/")
    tab.until("!!document.activeElement?.matches('.composer textarea')")


def script_of(*texts: str, **options: Any) -> Script:
    return Script((*texts, "</s>"), (-0.5,) * (len(texts) + 1), last_is_special=True, **options)


def test_a_hostile_prompt_and_answer_stay_text(make_server: Any, tab: Tab):
    server = make_server(served_model_name="<b>model</b>")
    server.engine.script = script_of(*HOSTILE)
    prompt = "<img src=x onerror=a()>"
    with served(server.app) as address:
        opened(tab, address)
        ask(tab, prompt)
        tab.until(IS_DONE)
        assert tab.value("document.querySelector('.question p').innerText") == prompt
        assert tab.value(ANSWER).strip() == "".join(HOSTILE)
        tab.click(".answer .actions button")
        tab.until("document.querySelectorAll('.token').length === 4")
        found = "document.body.querySelectorAll('img, b, .text a, script').length"
        assert tab.value(found) == 0 and tab.value("document.title") == "<b>model</b>"
        assert tab.complaints == []


def test_markdown_is_shown_and_a_link_shows_its_target(make_server: Any, tab: Tab):
    server = make_server()
    text = "# Head\n\n**bold** and `code`\n\n- one\n- two\n\n3. three\n\n```py\nx = **1**\n```\n[here](https://x.invalid/a)"
    server.engine.script = script_of(*text)
    with served(server.app) as address:
        opened(tab, address)
        ask(tab, "Hi")
        tab.until(IS_DONE)
        made = tab.value("[...document.querySelectorAll('.text > *')].map((one) => one.nodeName + ':' + one.innerText)")
        assert made == ["P:Head", "P:bold and code\n", "UL:one\ntwo", "OL:three", "PRE:x = **1**\n", made[-1]]
        assert made[-1] == "P:here (https://x.invalid/a)"
        link = tab.value("(({href, rel, target}) => [href, rel, target])(document.querySelector('.text a'))")
        assert link == ["https://x.invalid/a", "noreferrer noopener", "_blank"]


def test_the_key_is_asked_once_and_is_in_no_address(make_server: Any, tab: Tab):
    server = make_server(api_keys={hashlib.sha256(KEY.encode()).digest(): ""})
    server.engine.script = script_of("Fine")
    with served(server.app) as address:
        opened(tab, address)
        ask(tab, "Hi")
        tab.until("!!document.querySelector('dialog.key[open] input')")
        tab.click("dialog input")
        tab.write("a-wrong-key")
        tab.press("Enter")
        tab.until("document.querySelector('dialog .error')?.innerText === 'The server does not know this key.'")
        tab.value("document.querySelector('dialog input').select()")
        tab.write(KEY)
        tab.press("Enter")
        assert tab.until(ANSWER).strip() == "Fine"
        tab.click(".answer .actions button:nth-child(4)")
        code = tab.until("document.querySelector('.code pre')?.innerText")
        assert "$API_KEY" in code and KEY not in code
        kept = tab.value("JSON.stringify([localStorage, document.cookie, sessionStorage, location.href])")
        assert json.loads(kept) == [{}, "", {"tgi-key": KEY}, f"{address}/"]
        assert not any(KEY in url for url in tab.requests)


@pytest.mark.parametrize(
    ("state", "words"),
    [("lost", "shards are lost"), ("draining", "takes no new requests"), ("no_engine", "No engine is ready")],
)
def test_the_page_says_what_the_server_cannot_do(make_server: Any, tab: Tab, state: str, words: str, monkeypatch: Any):
    server = make_server()
    with served(server.app) as address:
        opened(tab, address)
        assert tab.value("document.querySelector('.banner')") is None
        if state == "draining":
            server.gate.shut()
        else:
            monkeypatch.setattr(type(server.config), "is_front", state == "no_engine")
            server.engine.load = lambda: Load(1, is_ready=False)
        assert words in tab.until("document.querySelector('.banner')?.innerText")
        server.gate.is_shut, server.engine.load = False, lambda: Load(1)
        tab.until("!document.querySelector('.banner')")
        assert "Ready" in tab.value("document.querySelector('.state').innerText")


def test_a_stopped_server_is_noticed_and_so_is_its_return(make_server: Any, tab: Tab):
    server = make_server()
    with served(server.app) as address:
        opened(tab, address)
    assert "does not answer" in tab.until("document.querySelector('.banner')?.innerText")
    ask(tab, "Hi")
    assert "does not answer" in tab.until("document.querySelector('.answer .error')?.innerText")
    with served(make_server().app, port=int(address.rpartition(":")[2])):
        tab.until("!document.querySelector('.banner')")


def test_reasoning_is_folded_and_a_call_is_a_card_that_takes_the_result(make_server: Any, tab: Tab):
    """The stream is one as the server writes it, in place of one that a model makes."""
    with served(make_server().app) as address:
        opened(tab, address)
        delta = {
            "reasoning_content": "Let me see.",
            "tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "clock", "arguments": '{"zone":"<b>"}'}}],
        }
        chunk = json.dumps({"choices": [{"delta": delta, "token_ids": [1], "finish_reason": "tool_calls"}]})
        answer = json.dumps(f"data: {chunk}\n\n")
        tab.value(
            "window.sent = []; window.fetched = window.fetch;"
            " window.fetch = (path, options) => { if (!path.startsWith('/v1/')) return window.fetched(path, options);"
            f" sent.push(JSON.parse(options.body)); return new Response({answer}); }}; 0"
        )
        ask(tab, "What time is it?")
        tab.until("!!document.querySelector('.call form')")
        assert tab.value("document.querySelector('details.reasoning').open") is False
        assert tab.value("document.querySelector('.call h3').innerText") == "clock"
        assert json.loads(tab.value("document.querySelector('.call pre').innerText")) == {"zone": "<b>"}
        tab.click(".call input")
        tab.write("noon")
        tab.press("Enter")
        tab.until("sent.length === 2")
        *_, call, result = tab.value("sent[1].messages")
        assert call["tool_calls"][0]["function"]["name"] == "clock"
        assert result == {"role": "tool", "content": "noon", "tool_call_id": "call-1"}


def test_no_page_can_frame_this_one(make_server: Any, tab: Tab):
    async def other(scope: Any, receive: Any, send: Any) -> None:
        body = f"<iframe src='{address}/'></iframe>".encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
        await send({"type": "http.response.body", "body": body})

    with served(make_server().app) as address, served(other) as evil:
        tab.open(f"{evil}/")
        tab.until(f"{json.dumps(address)} && document.readyState === 'complete'")
        assert any("frame-ancestors" in complaint for complaint in tab.complaints)


def test_a_parameter_of_each_kind_is_sent_as_its_type(make_server: Any, tab: Tab):
    with served(make_server().app) as address:
        opened(tab, address)
        tab.click("header > button")
        for name, typed in (("max_tokens", "7"), ("temperature", "0.5"), ("stop", "a\nb"), ("logit_bias", '{"5": 1}')):
            tab.until(f"!!document.querySelector('#field-{name}')")
            tab.value("document.querySelectorAll('.settings details').forEach((one) => (one.open = true))")
            tab.click(f"#field-{name}")
            tab.write(typed)
        tab.click("#schema")
        tab.write('{"type": "integer"}')
        tab.click("[aria-label='A random seed']")
        read = "import('/ui/core.js').then(({store}) => store.settings.chat)"
        settings = tab.until(read, lambda found: len(found) == 6)
        assert isinstance(settings.pop("seed"), int)
        assert settings == {
            "max_tokens": 7,
            "temperature": 0.5,
            "stop": ["a", "b"],
            "logit_bias": {"5": 1},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "integer"}},
            },
        }
        help_text = tab.value("document.querySelector('#field-max_tokens-help').innerText")
        assert help_text == "Most new tokens. Default: as many as fit."


# Streams events of a chat: one, and when `next` resolves the rest. Notes the milliseconds until the first is on the
# screen, and those that each frame takes with its layout while `COUNT` tokens come.
STREAMED = """(async () => {
  const {Answer} = await import('/ui/core.js');
  const frames = [], show = Answer.prototype.show, fetched = window.fetch;
  Answer.prototype.show = function () {
    const begun = performance.now();
    show.call(this);
    document.body.offsetHeight;
    frames.push(performance.now() - begun);
  };
  const choice = (content) => ({choices: [{delta: {content}, token_ids: [7], finish_reason: null}]});
  const event = (text) => `data: ${JSON.stringify(choice(text))}\\n\\n`;
  let put;
  const body = new ReadableStream({start: (controller) => (put = controller)});
  const isAsked = (path) => path.startsWith('/v1/');
  window.fetch = async (path, options) => (isAsked(path) ? new Response(body) : fetched(path, options));
  window.measured = (async () => {
    while (!document.querySelector('.answer')) await new Promise(requestAnimationFrame);
    const sent = performance.now(), bytes = new TextEncoder();
    put.enqueue(bytes.encode(event('first ')));
    while (!document.querySelector('.answer .text')?.innerText) await new Promise(requestAnimationFrame);
    const first = performance.now() - sent;
    for (let i = 0; i < COUNT; i += 20) {
      const texts = Array.from({length: 20}, (_, j) => (j === 19 && i % 400 === 0 ? 'end.\\n\\n' : 'word '));
      put.enqueue(bytes.encode(texts.map(event).join('')));
      await new Promise((done) => setTimeout(done, 4));
    }
    put.close();
    window.fetch = fetched;
    Answer.prototype.show = show;
    frames.sort((a, b) => a - b);
    const paint = performance.getEntriesByName('first-contentful-paint')[0].startTime;
    return {paint, first, frames: frames.length, p99: frames[Math.floor(frames.length * 0.99)]};
  })();
})()"""


def test_paint_token_and_frames_are_fast(make_server: Any, tab: Tab):
    before = slowness()
    with served(make_server().app) as address:
        opened(tab, address)
        tab.value(STREAMED.replace("COUNT", "10000"))
        ask(tab, "Tell me much.")
        found = tab.value("window.measured")
        print(found)
        assert tab.until(ANSWER).count("word") > 9000 and found["frames"] > 50
        for name, limit_ms in (("paint", 200), ("first", 30), ("p99", 16)):
            assert is_within(found[name], limit_ms, before), name
