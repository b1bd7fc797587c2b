"""Both clients behind one interface, and a server on loopback that sends a script of bytes and pauses."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from text_generation import AsyncClient, Client

DEFAULTS: dict[str, Any] = {"base_url": "http://server", "retries": 0}


class SyncCaller:
    """Makes one call and returns its answer, or the list of a stream's events; `then` is a method of the stream whose
    result is wanted instead."""

    def call(self, name: str, *args: Any, client: dict[str, Any], then: str | None = None, **options: Any) -> Any:
        with Client(**DEFAULTS | client) as opened:
            answer = getattr(opened, name)(*args, **options)
            answer = getattr(answer, then)() if then else answer
            return list(answer) if hasattr(answer, "__next__") else answer


class AsyncCaller:
    def call(self, name: str, *args: Any, client: dict[str, Any], then: str | None = None, **options: Any) -> Any:
        async def call() -> Any:
            async with AsyncClient(**DEFAULTS | client) as opened:
                answer = getattr(opened, name)(*args, **options)
                answer = await answer if asyncio.iscoroutine(answer) else answer
                answer = getattr(answer, then)() if then else answer
                answer = await answer if asyncio.iscoroutine(answer) else answer
                return [event async for event in answer] if hasattr(answer, "__anext__") else answer

        return asyncio.run(call())


@pytest.fixture(params=[SyncCaller, AsyncCaller], ids=["sync", "async"])
def caller(request: pytest.FixtureRequest) -> Any:
    return request.param()


class FakeServer:
    """A fake server that answers with the result of `reply`, and records the requests. Use `.options` as a client's
    arguments."""

    def __init__(
        self,
        status: int = 200,
        body: bytes | list[bytes] = b"",
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.seen: list[httpx.Request] = []
        self._status, self._body = status, body
        self._headers = {"content-type": content_type, **(headers or {})}
        self.options: dict[str, Any] = {"transport": httpx.MockTransport(self._answer)}

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.seen.append(request)
        content = _pieces(self._body) if isinstance(self._body, list) else self._body
        return httpx.Response(self._status, content=content, headers=self._headers)


async def _pieces(body: list[bytes]) -> Any:
    for piece in body:
        yield piece


@pytest.fixture
def fake() -> type[FakeServer]:
    return FakeServer


class ScriptedServer:
    """A server that sends `script` on every connection: bytes are sent, a number is a pause in seconds.

    `closed` is set when a client disconnects before the end of the script. `heads`: what was received of each request,
    up to the end of its headers at least."""

    def __init__(self, script: list[bytes | float]) -> None:
        self.closed = threading.Event()
        self.connections = 0
        self.heads: list[bytes] = []
        self._script = script
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def close(self) -> None:
        self._stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in [self._acceptor, *self._threads]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._play, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _play(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            request = b""
            while b"\r\n\r\n" not in request:
                request += (piece := connection.recv(65536))
                if not piece:
                    self.closed.set()
                    return
            self.heads.append(request)
            try:
                for step in self._script:
                    if isinstance(step, bytes):
                        connection.sendall(step)
                    elif self._hangs_up_within(connection, step):
                        return
            except OSError:
                self.closed.set()

    def _hangs_up_within(self, connection: socket.socket, pause_s: float) -> bool:
        connection.settimeout(0.02)
        for _ in range(round(pause_s / 0.02)):
            if self._stopping.is_set():
                return True
            try:
                if not connection.recv(65536):
                    self.closed.set()
                    return True
            except TimeoutError:
                continue
        connection.settimeout(10)
        return False


@pytest.fixture
def play() -> Iterator[Any]:
    servers: list[ScriptedServer] = []

    def start(*script: bytes | float) -> ScriptedServer:
        servers.append(ScriptedServer(list(script)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
