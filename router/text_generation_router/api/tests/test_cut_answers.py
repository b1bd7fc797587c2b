"""An answer that is cut off anywhere in a call shows nothing of the call's markers, on each route, streamed or not."""

from typing import Any

import pytest

from text_generation_router.api.tests.conftest import Script, Server
from text_generation_router.api.tests.test_tool_routes import HERMES, TOOLS, joined
from text_generation_router.scheduling.request import EndReason
from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, CallText

CALLS = [case for case in CALL_TEXTS if case.calls and not case.content and not case.reasoning]
CASES = [next(case for case in CALLS if case.format == name) for name in CALL_FORMATS]
GRAMMAR = '{"function": {"_name": "weather", "city": "Rome"}}'  # a call that a grammar has made
FUNCTIONS = [tool["function"] for tool in TOOLS]
OWN_TOOLS = {
    "/v1/chat/completions": TOOLS,
    "/v1/responses": [{"type": "function"} | function for function in FUNCTIONS],
    "/v1/messages": [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
}
HI = [{"role": "user", "content": "Hi"}]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"input": "Hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 999}
    return asked | {"tools": OWN_TOOLS[path]} | fields


def told(path: str, answer: dict[str, Any]) -> tuple[str, list[str], int]:
    """The text of a whole answer, the names of its calls, and the number of its tokens."""
    if path == "/v1/chat/completions":
        message = answer["choices"][0]["message"]
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        return message["content"] or "", names, answer["usage"]["completion_tokens"]
    items = answer["output"] if path == "/v1/responses" else answer["content"]
    texts = [item.get("text") or "".join(part["text"] for part in item.get("content", ())) for item in items]
    return "".join(texts), [item["name"] for item in items if "name" in item], answer["usage"]["output_tokens"]


def told_streamed(path: str, events: list[Any]) -> tuple[str, list[str]]:
    if path == "/v1/chat/completions":
        message = joined([event["choices"][0] for event in events[:-1]])
        return message["content"] or "", [call["function"]["name"] for call in message.get("tool_calls", ())]
    if path == "/v1/responses":
        return told(path, events[-1]["response"])[:2]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    texts = [delta["text"] for delta in deltas if "text" in delta]
    return "".join(texts), [block["name"] for block in blocks if "name" in block]


def check_cut(server: Server, path: str, script: Script, **fields: Any) -> None:
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script, script]
    answer = server.post(path, body_of(path, **fields))
    text, names, tokens = told(path, answer.json)
    assert len(text.strip()) < 3 and tokens == len(script.texts), (path, script.texts, text)
    streamed = server.post(path, body_of(path, stream=True, **fields))
    assert told_streamed(path, streamed.events) == (text, names), (path, script.texts)


def cuts(text: str) -> list[Script]:
    """The text cut off after each of its characters, by a length and by a deadline."""
    return [
        Script(tuple(text[:end]), (-0.5,) * end, EndReason.LENGTH, expires=bool(end % 2)) for end in range(1, len(text))
    ]


@pytest.mark.parametrize("path", OWN_TOOLS)
@pytest.mark.parametrize(
    "name", ["hermes", pytest.param("llama3", marks=pytest.mark.slow), pytest.param("none", marks=pytest.mark.slow)]
)
def test_a_call_that_is_cut_shows_nothing_of_itself_as_text(make_server, path, name):
    text = next((case.text for case in CASES if case.format == name), GRAMMAR)
    choice: dict[str, Any] = {} if name != "none" else {"tool_choice": "required"}
    if path == "/v1/messages" and choice:
        choice = {"tool_choice": {"type": "any"}}
    server = make_server(template=HERMES, tool_call_format=name)
    for script in cuts(text):
        check_cut(server, path, script, **choice)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.format)
def test_so_it_is_in_every_format(make_server, case: CallText):
    """Texts are cut at every fifth place here; `test_cut_texts.py` cuts each text at each place."""
    server = make_server(template=HERMES, tool_call_format=case.format, reasoning_format=case.reasoning_format)
    paths = list(OWN_TOOLS)
    for number, script in enumerate(cuts(case.text)[::5]):
        check_cut(server, paths[number % len(paths)], script)


def test_a_stop_string_within_a_marker_shows_nothing_of_the_marker(make_server):
    hermes = next(case.text for case in CASES if case.format == "hermes")
    server = make_server(template=HERMES)
    for stop in ("ol_call>", '"name"', "weather"):
        end = hermes.index(stop) + len(stop)
        script = Script(tuple(hermes[:end]), (-0.5,) * end)
        check_cut(server, "/v1/chat/completions", script, stop=[stop])
        check_cut(server, "/v1/messages", script, stop_sequences=[stop])
