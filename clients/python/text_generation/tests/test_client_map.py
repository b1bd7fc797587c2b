"""Many prompts: order, number of calls at a time, errors, and the line that shows how far the calls are."""

import asyncio
import io
import json
import sys
from typing import Any

import httpx
import pytest

from text_generation import AsyncClient, Client
from text_generation.errors import GenerationError, TextGenerationError, ValidationError
from text_generation.progress import Progress

DETAILS = {"finish_reason": "length", "generated_tokens": 1, "prefill": [], "tokens": []}
CHAT = {"id": "", "object": "chat.completion", "created": 1, "model": "m", "usage": {}}


class Echo:
    """A server that answers with the prompt; later prompts sooner. A prompt "bad" is an error."""

    def __init__(self) -> None:
        self.running = self.most = self.seen = self.cancelled = 0
        self.options: dict[str, Any] = {"transport": httpx.MockTransport(self._answer), "retries": 0}

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.seen += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(max(0.02 - 0.002 * self.seen, 0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if "messages" in body:
            message = {"role": "assistant", "content": body["messages"][0]["content"]}
            return httpx.Response(200, json=CHAT | {"choices": [{"index": 0, "message": message}]})
        if body["inputs"] == "bad":
            return httpx.Response(424, json={"error": "failed", "error_type": "generation"})
        return httpx.Response(200, json=[{"generated_text": body["inputs"], "details": DETAILS}])


def many(caller: Any, server: Echo, prompts: Any, *args: Any, **options: Any) -> Any:
    return caller.call("map", prompts, *args, client=server.options, **options)


def test_results_have_the_order_of_the_prompts(caller: Any) -> None:
    server = Echo()
    prompts = [str(i) for i in range(20)]
    answers = many(caller, server, (prompt for prompt in prompts), 4, max_new_tokens=1)
    assert [answer.generated_text for answer in answers] == prompts
    assert server.most == 4 and server.running == 0


def test_lists_of_messages_are_chats(caller: Any) -> None:
    chats = [[{"role": "user", "content": text}] for text in "ab"]
    answers = many(caller, Echo(), chats, max_tokens=3)
    assert [answer.choices[0].message.content for answer in answers] == ["a", "b"]
    assert many(caller, Echo(), []) == []


def test_an_error_can_take_the_place_of_its_answer(caller: Any) -> None:
    first, second, third = many(caller, Echo(), ["a", "bad", ""], errors="return")
    assert first.generated_text == "a" and type(second) is GenerationError and type(third) is ValidationError


def test_the_first_error_ends_the_other_calls(caller: Any) -> None:
    server = Echo()
    with pytest.raises(GenerationError, match=r"^failed\b") as caught:
        many(caller, server, ["bad", *"a" * 50], 2)
    assert str(caught.value) == "failed" and caught.value.__notes__ == ["This was item 0 of 51 (the first is 0)."]
    assert server.seen < 10 and server.running == 0 and server.cancelled == 1


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_wrong_arguments_are_refused_before_anything_is_sent(client: Any) -> None:
    server = Echo()
    for arguments, text in (
        ({"prompts": "abc"}, "`prompts` must be a list of prompts. Given: one str"),
        ({"prompts": ["a"], "concurrency": 0}, "`concurrency` must be strictly positive"),
        ({"prompts": ["a"], "errors": "ignore"}, "`errors` must be 'raise' or 'return'. Given: 'ignore'"),
        ({"prompts": ["a"], "max_new_token": 3}, r"^map\(\) got .* 'max_new_token'; did you mean 'max_new_tokens'\?"),
        ({"prompts": ["a"], "stream": True}, r"^map\(\) got an unexpected keyword argument 'stream'"),
    ):
        with pytest.raises((TextGenerationError, TypeError), match=text):
            run(client("http://server", **server.options).map(**arguments))
    assert server.seen == 0


def run(answer: Any) -> Any:
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "progress", "shown"),
    [(Terminal, None, True), (Terminal, False, False), (io.StringIO, None, False), (io.StringIO, True, True)],
)
def test_progress_is_shown_on_a_terminal_or_if_asked_for(
    caller: Any, monkeypatch: pytest.MonkeyPatch, stderr: Any, progress: bool | None, shown: bool
) -> None:
    out = stderr()
    monkeypatch.setattr(sys, "stderr", out)
    many(caller, Echo(), ["a", "bad", "b"], errors="return", progress=progress)
    assert out.getvalue().rstrip().endswith("1 failed") is shown and bool(out.getvalue()) is shown


def test_the_line_says_how_far_how_fast_and_how_long() -> None:
    now = [0.0]
    out = io.StringIO()
    progress = Progress(4, out, clock=lambda: now[0])
    for i in range(2):
        now[0] += 2
        progress.advance(failed=i == 1)
    assert progress.line(now[0]) == "[##########..........] 2/4, 0.5/s, 4 s left, 1 failed"
    now[0] += 0.05
    progress.advance(failed=False)  # too soon after the last line
    progress.advance(failed=False)
    assert out.getvalue().count("\r") == 2
    progress.close()
    assert out.getvalue().rpartition("\r")[2].split() == "[####################] 4/4, 1.0/s, 4.0 s, 1 failed".split()
