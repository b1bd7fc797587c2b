"""One connection, based on uvicorn's protocol class. It is ended when its client is too slow, sends too much or reads
too little.

This file adds no work per streamed event: the write deadline starts when the transport pauses writing, and the other
limits are checked when a request begins or data arrives.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from text_generation_router.errors import (
    HeadersTooLargeError,
    InferenceError,
    InvalidRequestError,
    RequestTimeoutError,
    SmallChunksError,
    TooManyConnectionsError,
)
from text_generation_router.http.closing import LINGER_S
from text_generation_router.http.deadlines import Deadline, WriteDeadline
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.direct import extensions_of
from text_generation_router.http.errors import error_bytes, error_response
from text_generation_router.http.limits import ConnectionLimits, LimitHits
from text_generation_router.http.rules import problem_of
from text_generation_router.metrics import Limit

HEADER_OVERHEAD = 4  # bytes that each header needs besides name and value: ": " and "\r\n"


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        hits: LimitHits,
        at_once: Mapping[bytes, ASGIApp],
        dialects: ErrorDialects,
        num_elsewhere: Callable[[], int],
    ) -> None:
        """`at_once`: applications for GET and HEAD, by URL, that wait for nothing but their client. They answer in the
        callback that reads the request, however much other work is ready. `num_elsewhere` returns the number of
        connections of other processes that share the limit."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._hits = hits
        self._at_once = at_once
        self._dialects = dialects
        self._num_elsewhere = num_elsewhere
        self._may_answer_at_once = True  # once for all data that is received together: it may hold many requests
        self._application: ASGIApp = self.app
        # The newest request, and earlier requests that were unanswered when it began.
        self._cycles: list[RequestResponseCycle] = []
        self._in_headers = False
        self._is_refused = False  # whether the connection's last answer has been written
        self._header_bytes = 0  # bytes received of headers that have not ended
        self._body_bytes = 0
        self._chunks = 0  # number of chunks of the current body
        self._other_bytes = 0  # bytes since the headers or since the last byte of a body: chunk framing, trailers
        self._arrival = Deadline(self.loop)  # for the headers or the body to arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading = WriteDeadline(self.loop, transport, self._limits, self._hits)
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        if len(self.connections) + self._num_elsewhere() > self._limits.max_connections:
            self._end(Limit.CONNECTIONS, TooManyConnectionsError())
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn reports the disconnect to the newest request only.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        self._unset_keepalive_if_required()
        self._arrival.clear()
        self._reading.stop()

    # Methods for bytes that the client sends.

    def data_received(self, data: bytes) -> None:
        was_in_headers = self._in_headers
        self._may_answer_at_once = True
        self._other_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._other_bytes > self._limits.header_bytes and not (self._in_headers or self._is_idle()):
            self._abort(Limit.HEADER_SIZE)
            return
        if self._in_headers and was_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.header_bytes:
                self._end(Limit.HEADER_SIZE, HeadersTooLargeError(self._limits.header_bytes), LINGER_S)
        elif not self._arrival.is_set and self.timeout_keep_alive_task is None and self._is_idle():
            self._expect_headers()  # empty lines do not begin a request, but they stop uvicorn's keep-alive timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        if not self._arrival.is_set:
            self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers after a body are dropped: they are not used, and could be endless
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._body_bytes = self._other_bytes = self._chunks = 0
        self._arrival.clear()
        if not self.flow.write_paused:
            self._reading.stop()
        self.app = self._application
        if error := self._error_in_headers():
            self.app = refusal(error, self._dialects)
        elif self.parser.get_method() in (b"GET", b"HEAD"):
            self.app = self._at_once.get(self.url, self._application)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self.cycle.scope["extensions"] = extensions_of(self.cycle)
        if len(self._cycles) > self._limits.pipelined_requests:
            self._hits.count(Limit.PIPELINE)
            self.transport.abort()
            raise ConnectionAbortedError  # stops the parser, whose data may contain more requests
        self._arrival.set(self._limits.body_s, self._body_timed_out)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if app in self._at_once.values() and self._may_answer_at_once and not self.flow.write_paused:
            self._may_answer_at_once = False
            self._answer_at_once(cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def _answer_at_once(self, cycle: RequestResponseCycle, app: Any) -> None:
        work: Coroutine[Any, Any, None] = app(cycle.scope, cycle.receive, cycle.send)
        try:
            work.send(None)
        except StopIteration:
            return
        # `cycle.send` waits: the client has not read earlier answers, and the kernel takes no more bytes.
        work.close()
        self._abort(Limit.WRITE_TIME)

    def _error_in_headers(self) -> InferenceError | None:
        size = len(self.url) + sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in self.headers)
        if size > self._limits.header_bytes:
            self._hits.count(Limit.HEADER_SIZE)
            return HeadersTooLargeError(self._limits.header_bytes)
        problem = problem_of(self.parser.get_http_version(), self.headers)
        return None if problem is None else InvalidRequestError(problem)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are not HTTP. `msg` is uvicorn's own text, which is not sent."""
        if not (self.transport.is_closing() or self._is_refused):
            self._refuse(InvalidRequestError("the bytes cannot be parsed as HTTP/1.1"))

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._other_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.payload_bytes and self.cycle.response_complete:
            self._abort(Limit.BODY_SIZE)  # the request has been answered, and its body is not used

    def on_chunk_header(self) -> None:
        """Refuses bodies of many tiny chunks: each chunk costs Python calls, however small the chunk is."""
        if self._chunks > self._limits.small_chunks and self._body_bytes < self._chunks * self._limits.chunk_bytes:
            self._end(Limit.CHUNKS, SmallChunksError(self._limits.chunk_bytes), LINGER_S)
            raise ConnectionAbortedError  # stops the parser, whose data may contain more chunks
        self._chunks += 1

    def on_message_complete(self) -> None:
        self._arrival.clear()
        super().on_message_complete()
        # The request was answered before its body ended: uvicorn sets no keep-alive timer then.
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _is_idle(self) -> bool:
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def _expect_headers(self) -> None:
        self._arrival.set(self._limits.headers_s, self._headers_timed_out)

    def _headers_timed_out(self) -> None:
        if self._in_headers:
            self._end(Limit.HEADER_TIME, RequestTimeoutError("headers", self._limits.headers_s))
        else:
            self._hits.count(Limit.HEADER_TIME)
            self.transport.close()

    def _body_timed_out(self) -> None:
        if self.flow.read_paused:  # the server itself has paused reading
            self._arrival.set(self._limits.body_s, self._body_timed_out)
            return
        self._end(Limit.BODY_TIME, RequestTimeoutError("body", self._limits.body_s))

    # Methods for bytes that the client reads.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.flow.write_paused:
            self._reading.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.stop()
        if self._is_idle() or self.transport.is_closing():
            self._reading.start()

    # Methods that end the connection.

    def close_after_answers(self) -> None:
        """Asks the client to close the connection, where an answer has not begun. uvicorn's default headers do so for
        requests that come later."""
        for cycle in self._cycles:
            if not cycle.response_started:
                cycle.default_headers = [*cycle.default_headers, (b"connection", b"close")]

    def _end(self, limit: Limit, error: InferenceError, linger_s: float = 0.0) -> None:
        self._hits.count(limit)
        self._refuse(error, linger_s)

    def _refuse(self, error: InferenceError, linger_s: float = 0.0) -> None:
        """Ends the connection, with an answer unless an answer is already being sent. `linger_s`: seconds in which the
        client can still read the answer, as in `closing.py`.
        """
        self._is_refused = True
        is_between = self.cycle is None or (self._in_headers and self.cycle.response_complete)
        if not is_between and any(cycle.response_started for cycle in self._cycles):
            self.transport.abort()
            return
        self.transport.write(error_bytes(error, self._dialects.of(self._path())))
        self._arrival.clear()
        if linger_s:
            self.flow.pause_reading()
            self._arrival.set(linger_s, self.transport.close)
        else:
            self.transport.close()
        self._reading.start()

    def _path(self) -> str:
        """The path of the request that is being received, as far as it is known."""
        return "" if self._is_idle() and not self._in_headers else self.url.decode("latin-1")

    def _abort(self, limit: Limit) -> None:
        """Ends the connection and drops buffered bytes. `close` would wait until the client has read them."""
        self._hits.count(limit)
        self.transport.abort()


def refusal(error: InferenceError, dialects: ErrorDialects) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error, dialects.of(scope["path"]))(scope, receive, send)

    return refuse
