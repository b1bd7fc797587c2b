"""The page /docs in a real browser: "Try it out" generates text, and nothing leaves the server's origin."""

import hashlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from text_generation_router.openapi.tests.chromium import PROGRAM, tab_of

IS_BOUNDED = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium: after `apt-get install chromium` this test runs"),
    pytest.mark.skipif(IS_BOUNDED, reason="Chromium reserves much address space: `ulimit -v unlimited` runs this test"),
]
KEY = "a-key"
OPERATION = "#operations-Native-generate"


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address at which the application answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


# React sees a value only if it is set as a user would set it.
AUTHORIZE = """(() => {
  const field = document.querySelector('.auth-container input');
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, %r);
  field.dispatchEvent(new Event('input', {bubbles: true}));
  document.querySelector('.auth-container button.authorize').click();
})()"""


# The text of the answer. A click is lost if the page is being drawn again just then, so it is repeated.
ANSWER = f"""(() => {{
  const answer = document.querySelector('{OPERATION} .live-responses-table');
  if (!answer && Date.now() - (window.clicked || 0) > 3000) {{
    window.clicked = Date.now();
    document.querySelector('{OPERATION} button.execute').click();
  }}
  return answer?.innerText;
}})()"""


@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with a key"])
def test_a_text_can_be_generated_from_the_page(make_server, tmp_path, has_key):
    keys = {hashlib.sha256(KEY.encode()).digest(): ""} if has_key else {}
    with served(make_server(api_keys=keys).app) as address, tab_of(str(PROGRAM), tmp_path) as tab:
        tab.call("Page.navigate", url=f"{address}/docs")
        tab.until(f"!!document.querySelector('{OPERATION}')")
        if has_key:
            tab.value("document.querySelector('.auth-wrapper button.authorize').click()")
            tab.until("!!document.querySelector('.auth-container input')")
            tab.value(AUTHORIZE % KEY)
            tab.until("!!document.querySelector('.auth-container button:not(.authorize):not(.btn-done)')")
            tab.value("document.querySelector('.auth-container .btn-done').click()")
        tab.value(f"document.querySelector('{OPERATION} button.opblock-summary-control').click()")
        tab.until(f"!!document.querySelector('{OPERATION} button.execute')")
        answer = tab.until(ANSWER)
        assert "generated_text" in answer and " there!" in answer
        time.sleep(0.2)
        tab.value("0")  # takes the events until now
        sent = [url for url in tab.requests if not url.startswith(("data:", "blob:", "about:"))]
        assert f"{address}/generate" in sent and all(url.startswith(f"{address}/") for url in sent)
        assert tab.complaints == []
