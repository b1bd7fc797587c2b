"""Sessions of command-line agents, replayed in the shapes that `agents/record_sessions.py` recorded: the prefix cache
has all that a turn's prompt shares with what was computed before."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import DEMO_MODEL, tokenizer
from server_process import ServerProcess

from text_generation_common.flags.model import FormatFlags
from text_generation_router.api.common.body_kinds import job_of
from text_generation_router.api.common.fields import ListLimits
from text_generation_router.api.common.styles import ChatFormats
from text_generation_router.api.reading_child import make_handlers, setup_of
from text_generation_router.text.templates.files import load_chat_template

SESSIONS = json.loads((Path(__file__).parent / "agents/sessions.json").read_text())
CONVERSATIONS = {"/v1/messages": "messages", "/v1/chat/completions": "messages", "/v1/responses": "input"}
QUESTIONS = {"/v1/messages": "messages", "/v1/chat/completions": "chat", "/v1/responses": "responses"}
LENGTHS = {"/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}
NEW_TOKENS = 6
# The demo model has a short context: texts have a 50th of their characters.
SCALE = 50
PLACE = re.compile(r"#(\d+):(\d+)")
RECORDED_TEXT = "Step."
CHANGING = "claude, with a signed billing line and a counter in its system prompt"


def long_text(found: re.Match[str]) -> str:
    number, chars = int(found[1]), int(found[2])
    return (f"Text {number} tells the fox what to do. " * 200)[: max(12, chars // SCALE)]


def expanded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: expanded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [expanded(part) for part in value]
    return PLACE.sub(long_text, value) if isinstance(value, str) else value


def tool_of(path: str, name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    if path == "/v1/messages":
        return {"name": name, "input_schema": schema}
    function = {"name": name, "parameters": schema}
    return {"type": "function"} | ({"function": function} if path == "/v1/chat/completions" else function)


def recorded(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The routes and bodies of a session."""
    heads: dict[str, dict[str, Any]] = {}
    turns: list[Any] = []
    for shape in SESSIONS[name]["requests"]:
        path = shape["path"]
        turns = turns[: shape["keeps"]] + expanded(shape["turns"])
        head = heads.setdefault(path, {})
        head |= {name: expanded(shape[name]) for name in ("system", "instructions", "tools") if name in shape}
        body = {name: value for name, value in head.items() if value}
        if "tools" in body:
            body["tools"] = [tool_of(path, name) for name in body["tools"]]
        yield path, body | {CONVERSATIONS[path]: list(turns)}


def changing(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """As the versions of Claude Code do that sign each request and count what is left in the system prompt."""
    system = [dict(block) for block in body["system"]]
    system[0]["text"] += f" cch={number * 7919:05x};"
    system[-1]["text"] += f"\n<total_tokens>{100_000 - number} tokens left</total_tokens>"
    return body | {"system": system}


def others() -> Iterator[tuple[str, dict[str, Any]]]:
    """What agents ask for between turns, with other system prompts: a title, and whether the account has a quota."""
    for number in range(100):
        title = [{"role": "user", "content": f"Write a title for conversation {number}."}]
        yield "/v1/messages", {"system": "You write titles.", "messages": title}
        yield "/v1/messages", {"messages": [{"role": "user", "content": "quota"}]}


class Prompts:
    """The prompts of requests, made as the server makes them."""

    def __init__(self) -> None:
        self._tokenizer = tokenizer()
        template = load_chat_template(DEMO_MODEL, None)
        chat_formats = ChatFormats.of(template, FormatFlags(), frozenset({"</s>"}))
        self._handlers = make_handlers(setup_of(template, chat_formats.ways, chat_formats.ways))
        self._limits = ListLimits(10_000, 1, 4)

    def text(self, path: str, body: Mapping[str, Any]) -> str:
        job = job_of(json.dumps(body).encode(), self._limits)
        return str(json.loads(self._handlers[QUESTIONS[path]](job))["asked"]["prompt"])

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(path: str, answer: Mapping[str, Any]) -> str:
    if path == "/v1/messages":
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    if path == "/v1/responses":
        items = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in items for part in item["content"])
    return answer["choices"][0]["message"].get("content") or ""


def with_answers(turns: list[Any], texts: Sequence[str]) -> list[Any]:
    """The turns of a recording, with the texts that this server has answered."""
    recorded, own = json.dumps(RECORDED_TEXT), iter(texts)
    written = [json.dumps(turn) for turn in turns]
    return [
        json.loads(turn.replace(recorded, json.dumps(next(own)))) if recorded in turn else json.loads(turn)
        for turn in written
    ]


def usage_of(path: str, answer: Mapping[str, Any]) -> tuple[int, int, int]:
    """Cached tokens of the prompt, all its tokens, and those of the answer."""
    usage = answer["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return cached, usage["input_tokens"] + cached, usage["output_tokens"]
    if path == "/v1/responses":
        return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], usage["completion_tokens"]


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts()


class Session:
    """Sends a session's requests one after the other, each with what this server has answered to those before."""

    def __init__(self, client: httpx.Client, prompts: Prompts, salt: str) -> None:
        self._client = client
        self._prompts = prompts
        self._salt = salt
        self._computed: list[list[int]] = []  # tokens whose keys the server has computed, of each request
        self._texts: dict[str, list[str]] = {}  # the answers to the requests with tools, by route

    def send(self, path: str, body: dict[str, Any]) -> int:
        """Number of cached tokens, which is checked."""
        turns = with_answers(body[CONVERSATIONS[path]], self._texts.get(path, ()))
        settings: dict[str, Any] = {
            "model": "demo",
            "cache_salt": self._salt,
            "temperature": 0,
            LENGTHS[path]: NEW_TOKENS,
        }
        if path == "/v1/chat/completions":  # the beginning of a call has tokens, and no text
            settings["return_token_ids"] = True
        body = body | settings | {CONVERSATIONS[path]: turns}
        answer = self._client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        text, said = self._prompts.text(path, body), text_of(path, answer.json())
        made = answer.json().get("choices", [{}])[0].get("token_ids")
        ids, (cached, total, generated) = self._prompts.ids(text), usage_of(path, answer.json())
        assert total == len(ids)
        # The last token of a prompt is computed in any case.
        assert cached == min(max((common(ids, known) for known in self._computed), default=0), total - 1)
        # The keys of the last token of an answer are not computed.
        all_ids = ids + made if made is not None else self._prompts.ids(text + said)
        self._computed.append(all_ids[: total + generated - 1])
        if body.get("tools"):
            self._texts.setdefault(path, []).append(said)
        return cached


@pytest.mark.parametrize("name", [*SESSIONS, CHANGING])
def test_every_token_of_a_turn_that_was_computed_before_is_cached(server: ServerProcess, prompts: Prompts, name: str):
    """Requests for titles and quotas stand in between."""
    requests = (
        [*recorded(name)] if name in SESSIONS else [(p, changing(n, b)) for n, (p, b) in enumerate(recorded("claude"))]
    )
    between, cached = others(), []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        session = Session(client, prompts, name)
        for number, (path, body) in enumerate(requests):
            found = session.send(path, body)
            if body.get("tools"):
                cached.append(found)
            if number % 3 == 1:
                session.send(*next(between))
    # Each of the 12 turns goes on where the one before has ended.
    assert len(cached) == 12 and sorted(cached) == cached and len({*cached}) == 12
