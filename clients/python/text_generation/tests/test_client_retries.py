"""When a call is made again: only while nothing of its answer has been received."""

import socket
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from text_generation import Retries, Timeout, errors
from text_generation.retries import BUSY, retry_after_s

ANSWER = b'[{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":1,"prefill":[],"tokens":[]}}]'
TOKEN = b'data: {"token":{"id":1,"text":"a","special":false}}\n\n'
LAST = (
    b'data: {"token":{"id":1,"text":"a","special":false},"generated_text":"aa",'
    b'"details":{"finish_reason":"length","generated_tokens":2}}\n\n'
)
OVERLOADED = b'{"error":"Model is overloaded","error_type":"overloaded"}'
QUICK = Retries(times=2, first_pause=0.001)
GOOD = {"generate": ANSWER, "generate_stream": TOKEN + LAST}


class Replies:
    """A server that sends one reply after the other; an exception is raised instead."""

    def __init__(self, *replies: tuple[int, bytes] | Exception, headers: dict[str, str] | None = None) -> None:
        self.left = list(replies)
        self.options: dict[str, Any] = {"transport": httpx.MockTransport(self._answer), "retries": QUICK}
        self._headers = headers or {}

    def _answer(self, request: httpx.Request) -> httpx.Response:
        reply = self.left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply[0], content=reply[1], headers=self._headers)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    "failure", [*((status, b"") for status in BUSY), (429, OVERLOADED), httpx.ConnectError("refused")], ids=repr
)
def test_a_busy_or_absent_server_is_asked_again(caller: Any, name: str, failure: Any) -> None:
    server = Replies(failure, failure, (200, GOOD[name]))
    assert caller.call(name, "hi", client=server.options) and server.left == []


def test_a_stream_that_is_refused_by_its_first_event_is_asked_again(caller: Any) -> None:
    server = Replies((200, b"data: " + OVERLOADED + b"\n\n"), (200, TOKEN + LAST))
    assert len(caller.call("generate_stream", "hi", client=server.options)) == 2


@pytest.mark.parametrize("name", GOOD)
def test_the_last_error_is_raised_when_no_attempt_is_left(caller: Any, name: str) -> None:
    server = Replies((503, b""), (503, b""), (429, OVERLOADED), (200, GOOD[name]))
    with pytest.raises(errors.OverloadedError):
        caller.call(name, "hi", client=server.options)
    assert len(server.left) == 1


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize(
    "failure",
    [*((status, b"") for status in (400, 401, 404, 422, 424, 500, 502, 504)), httpx.ReadError("reset by peer")],
    ids=repr,
)
def test_other_errors_are_raised_at_once(caller: Any, name: str, failure: Any) -> None:
    server = Replies(failure, (200, GOOD[name]))
    with pytest.raises(errors.TextGenerationError):
        caller.call(name, "hi", client=server.options)
    assert len(server.left) == 1


def test_nothing_is_sent_again_after_the_first_token(caller: Any) -> None:
    server = Replies((200, TOKEN + b"data: " + OVERLOADED + b"\n\n"), (200, TOKEN + LAST))
    with pytest.raises(errors.OverloadedError):
        caller.call("generate_stream", "hi", client=server.options)
    assert len(server.left) == 1


def test_a_number_is_how_often_a_call_is_made_again(caller: Any) -> None:
    server = Replies((503, b""), (200, ANSWER))
    with pytest.raises(errors.UnknownError):
        caller.call("generate", "hi", client=server.options | {"retries": 0})
    server = Replies((503, b""), (200, ANSWER), headers={"retry-after": "0"})
    assert caller.call("generate", "hi", client=server.options | {"retries": 1})


@pytest.mark.parametrize("name", GOOD)
def test_a_pause_that_outlasts_the_call_is_not_begun(caller: Any, name: str) -> None:
    server = Replies((429, OVERLOADED), (200, GOOD[name]), headers={"retry-after": "20"})
    for timeout in (10, Timeout(total=10), Timeout(first_token=10)):
        if name == "generate" and timeout == Timeout(first_token=10):
            continue  # a whole answer has no first token
        server.left = [(429, OVERLOADED), (200, GOOD[name])]
        with pytest.raises(errors.OverloadedError) as caught:
            caller.call(name, "hi", client=server.options | {"timeout": timeout})
        assert caught.value.retry_after_s == 20 and len(server.left) == 1


def test_a_refused_connection_is_made_again_until_the_server_is_there(caller: Any) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    listening: list[socket.socket] = []

    def start() -> None:
        listening.append(socket.create_server(("127.0.0.1", port)))
        listening[0].settimeout(10)
        connection, _ = listening[0].accept()
        connection.recv(65536)
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
        connection.sendall(head + ANSWER)
        connection.close()

    late = threading.Timer(0.15, start)
    late.start()
    patient = {"base_url": f"http://127.0.0.1:{port}", "retries": Retries(times=30, first_pause=0.1, longest_pause=0.2)}
    try:
        assert caller.call("generate", "hi", client=patient).generated_text == "a"
    finally:
        late.join()
        listening[0].close()


def busy(retry_after: float | None) -> errors.TextGenerationError:
    error = errors.OverloadedError("busy")
    error.retry_after_s = retry_after
    return error


def test_pauses_grow_are_never_shorter_than_asked_for_and_are_spread() -> None:
    retries = Retries(times=9, first_pause=0.5, longest_pause=3)
    assert [retries.pause_s(failed, busy(None), 0.0) for failed in (1, 2, 3, 4, 9)] == [0.5, 1, 2, 3, 3]
    assert [retries.pause_s(1, busy(2), chance) for chance in (0.0, 0.5, 1.0)] == [2, 2.25, 2.5]
    assert retries.pause_s(1, busy(0), 1.0) == 0
    assert retries.pause_s(1, busy(3.5), 0.0) is None and retries.pause_s(10, busy(1), 0.0) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("7", 7), (" 0.5 ", 0.5), ("soon", None), ("-1", None), ("²", None), ("1" * 50, None)],
)
def test_a_retry_after_is_a_number_of_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


def test_a_retry_after_may_be_a_date() -> None:
    now = datetime.now(UTC)
    assert 3500 < (retry_after_s(format_datetime(now + timedelta(hours=1), usegmt=True)) or 0) <= 3600
    assert retry_after_s(format_datetime(now - timedelta(hours=1), usegmt=True)) == 0


@pytest.mark.parametrize("wrong", [{"times": -1}, {"first_pause": 0}, {"longest_pause": float("nan")}])
def test_wrong_numbers_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ValidationError, match=f"`retries.{next(iter(wrong))}` must"):
        Retries(**wrong)
