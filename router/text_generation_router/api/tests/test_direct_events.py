"""Events that go from the engine's call to the connection without waking a task."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from text_generation_router.api.tgi.routes import EventEncoder, event_json
from text_generation_router.api.tgi.schemas import GenerateRequest
from text_generation_router.engine.protocol import Ended
from text_generation_router.http import sse
from text_generation_router.http.encoding import to_event
from text_generation_router.http.sse import DirectWriter
from text_generation_router.scheduling.request import EndReason
from text_generation_router.text.tokens.events import Token, TokenEvent

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

TEXTS = (" a", ' "quoted"\n', "é€", "\u2028", "z")
LOGPROBS = (-0.1, float("nan"), -1e-9, -12.345678, 0.0)
ENDS: dict[str, dict[str, Any]] = {
    "length": {},
    "special": {"reason": EndReason.EOS_TOKEN, "last_is_special": True, "cuts_character": True},
    "deadline": {"expires": True},
    "failure": {"ends_after": (3, Ended(EndReason.FAILED, cause="boom"))},
    "closed": {"ends_after": (3, Ended(EndReason.CLOSED))},
}
ASKED: dict[str, tuple[str, dict[str, Any]]] = TABLES["asked"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("asked", ASKED)
def test_a_stream_has_the_same_bytes_whether_or_not_it_is_written_directly(server, monkeypatch, asked, end):
    written: list[bytes] = []
    write = DirectWriter.write
    monkeypatch.setattr(DirectWriter, "write", lambda self, events: (written.extend(events), write(self, events)))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    path, body = ASKED[asked]
    chunks = []
    for server.writes_directly in (False, True):
        server.engine.script = type(server.engine.script)(TEXTS, LOGPROBS, turns=20, **ENDS[end])
        chunks.append(server.post(path, body).chunks)
        assert bool(written) == (server.writes_directly and asked != "prompts")
    assert chunks[0] == chunks[1] and len(chunks[0]) >= 3
    assert not set(written) & {chunks[1][0], chunks[1][-1]}, "the first and the last event come from the reader"


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("begins", [True, False], ids=["in its prompt", "in the queue"])
def test_a_stream_without_a_token_yet_has_signs_of_life_and_ends_with_its_client(server, monkeypatch, asked, begins):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.02)
    server.engine.script.hang_after, server.engine.script.begins = 0, begins
    path, body = ASKED[asked]
    sign = b'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else b":\n\n"
    heads = path == "/v1/responses"  # these events need no token
    answer = asyncio.run(server.call("POST", path, json.dumps(body).encode(), leave_after=3 + heads))
    assert answer.status == 200 and answer.chunks[heads:] == [sign] * 3
    assert all(request.cancelled for request in server.engine.asked)


@pytest.mark.parametrize("text", ["", " a", '"\\\n\t\x00', "é\U0001f600\u2028", "</s>"])
@pytest.mark.parametrize("logprob", [0.0, -0.0, -0.1, -1e-9, -1.5e-39, -123.456789, float("nan"), float("-inf"), -1.0])
@pytest.mark.parametrize("special", [False, True])
def test_the_event_of_a_plain_token_is_its_json(text, logprob, special):
    asked = GenerateRequest(inputs="Hi")
    encode = EventEncoder(asked, 5, full_text=False)
    event = TokenEvent(Token(17, text, logprob, special), text)
    for index in (1, 2):
        assert encode(event) == to_event(event_json(index, event, asked, 5, False))
