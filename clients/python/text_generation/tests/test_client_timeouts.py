"""Each limit ends the wait it is for, and no other wait. Limits are much smaller than the pauses, so a slow machine
does not matter."""

from typing import Any

import httpx
import pytest

from text_generation import Timeout
from text_generation.errors import TimeoutExceededError, ValidationError

NEVER_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"token":{"id":1,"text":"a","special":false}}\n\n'
LAST = (
    b'data: {"token":{"id":1,"text":"a","special":false},"generated_text":"aa",'
    b'"details":{"finish_reason":"length","generated_tokens":2}}\n\n'
)
ALIVE = b":\n\n"


def expect(caller: Any, wait: str, url: str, timeout: Any, name: str = "generate_stream") -> None:
    with pytest.raises(TimeoutExceededError, match=f"raise `timeout.{wait}`") as caught:
        caller.call(name, "hi", client={"base_url": url, "timeout": timeout})
    assert caught.value.wait == wait


def test_connect(caller: Any) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"] == {"connect": 0.25, "read": None, "write": None, "pool": None}
        raise httpx.ConnectTimeout("no SYN-ACK")

    for name in ("generate", "generate_stream"):
        with pytest.raises(TimeoutExceededError, match=r"^no connection within 0.25 s; raise `timeout.connect`"):
            caller.call(name, "hi", client={"transport": httpx.MockTransport(answer), "timeout": Timeout(connect=0.25)})


def test_first_token_before_the_headers(caller: Any, play: Any) -> None:
    expect(caller, "first_token", play(NEVER_S).url, Timeout(first_token=0.2))


def test_first_token_after_the_headers_and_in_spite_of_comments(caller: Any, play: Any) -> None:
    script = [HEAD] + [ALIVE, 0.06] * 500
    expect(caller, "first_token", play(*script).url, Timeout(first_token=0.3, between_tokens=0.1))


def test_between_tokens_in_spite_of_comments(caller: Any, play: Any) -> None:
    script = [HEAD, TOKEN] + [ALIVE, 0.06] * 500
    expect(caller, "between_tokens", play(*script).url, Timeout(first_token=20, between_tokens=0.3))


def test_total_of_a_stream_that_never_pauses(caller: Any, play: Any) -> None:
    script = [HEAD] + [TOKEN, 0.06] * 500
    expect(caller, "total", play(*script).url, Timeout(between_tokens=20, total=0.4))


@pytest.mark.parametrize("name", ["generate", "generate_stream"])
def test_a_number_is_the_total_of_any_call(caller: Any, play: Any, name: str) -> None:
    expect(caller, "total", play(NEVER_S).url, 0.2, name)


def test_a_whole_answer_has_the_total_only(caller: Any, play: Any) -> None:
    body = (
        b'[{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":1,"prefill":[],"tokens":[]}}]'
    )
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    server = play(0.3, head, 0.3, body)
    limits = Timeout(first_token=0.1, between_tokens=0.1, total=None)
    assert caller.call("generate", "hi", client={"base_url": server.url, "timeout": limits}).generated_text == "a"


def test_pauses_within_the_limits_raise_nothing(caller: Any, play: Any) -> None:
    server = play(0.2, HEAD, 0.2, TOKEN, 0.2, LAST)
    limits = Timeout(first_token=20, between_tokens=20, total=None)
    assert len(caller.call("generate_stream", "hi", client={"base_url": server.url, "timeout": limits})) == 2


def test_a_timeout_hangs_up(caller: Any, play: Any) -> None:
    server = play(HEAD, TOKEN, NEVER_S)
    expect(caller, "between_tokens", server.url, Timeout(between_tokens=0.2))
    assert server.closed.wait(10)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_positive(value: float) -> None:
    with pytest.raises(ValidationError, match=r"`timeout.between_tokens` must be strictly positive"):
        Timeout(between_tokens=value)
    with pytest.raises(ValidationError, match=r"`timeout.total` must be strictly positive"):
        Timeout.of(value)
