"""The page /docs in a real browser: "Try it out" generates text, and nothing leaves the server's origin."""

import hashlib
import time

import pytest

from text_generation_router.openapi.tests.chromium import PROGRAM, WHY_NOT, served, tab_of

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
KEY = "a-key"
OPERATION = "#operations-Native-generate"


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


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with tab_of(str(PROGRAM), tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with a key"])
def test_a_text_can_be_generated_from_the_page(make_server, tab, has_key):
    keys = {hashlib.sha256(KEY.encode()).digest(): ""} if has_key else {}
    with served(make_server(api_keys=keys).app) as address:
        tab.open(f"{address}/docs")
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
