"""One connection, based on uvicorn's protocol class. It is ended when its client is too slow, sends too much or reads
too little.

This file adds no work per streamed event: the write deadline starts when the transport pauses writing, and the other
limits are checked when a request begins or data arrives.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from text_generation_router.errors import (
    HeadersTooLargeError,
    InferenceError,
    InvalidRequestError,
    PipelineError,
    RequestTimeoutError,
    SmallChunksError,
    TooManyConnectionsError,
)
from text_generation_router.http.closing import CLOSE, LINGER, LINGER_BYTES, LINGER_S, closing
from text_generation_router.http.cycles import until_closed, until_half_closed
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.errors import error_bytes, error_response
from text_generation_router.http.limits import ConnectionLimits, Deadline, LimitHits, WriteDeadline
from text_generation_router.http.peer import group_of
from text_generation_router.http.request_log import IS_LOGGED, RefusalLog
from text_generation_router.http.room import ConnectionRoom
from text_generation_router.http.rules import problem_of, without_upgrade
from text_generation_router.http.sse import EXTENSION
from text_generation_router.metrics.metrics import Limit

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
        refusals: RefusalLog,
        room: ConnectionRoom,
    ) -> None:
        """`at_once`: applications for GET and HEAD, by URL, that wait for nothing but their client. They answer in the
        callback that reads the request, however much other work is ready, also beyond the limit of connections."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._hits = hits
        self._at_once = at_once
        self._dialects = dialects
        self._refusals = refusals
        self._room = room
        self._address = ""
        self._is_beyond = False  # whether the connection is beyond the limit of connections
        self._may_answer_at_once = True  # once for all data that is received together: it may hold many requests
        self._application: ASGIApp = self.app
        # The newest request, and earlier requests that were unanswered when it began.
        self._cycles: list[RequestResponseCycle] = []
        self._in_headers = False
        self._problem: InferenceError | None = None  # why the newest request is refused by its headers
        self._is_refused = False  # whether bytes are dropped: the connection ends after the present answers
        self._last: Callable[[], None] | None = None  # writes the refusal that ends the connection, after these answers
        self._lingers = False  # whether the connection lingers after the answer that is being written
        self._is_half_closed = False  # whether the client has closed its sending side
        self._header_bytes = 0  # bytes received of headers that have not ended
        self._body_bytes = 0
        self._chunks = 0  # number of chunks of the current body
        self._other_bytes = 0  # bytes since the headers or since the last byte of a body: chunk framing, trailers
        self._arrival = Deadline(self.loop)  # for the headers or the body to arrive

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading = WriteDeadline(self.loop, transport, self._limits, self._hits)
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._address = group_of(self.client[0]) if self.client else ""
        self._is_beyond = not self._room.admits(self, self._address)
        if self._is_beyond:
            self._hits.count(Limit.CONNECTIONS)
            self._arrival.set(self._limits.beyond_s, self.make_room)
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._room.leave(self)
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
        if self._is_refused:
            self._other_bytes += len(data)
            if self._other_bytes > LINGER_BYTES:
                self.flow.pause_reading()
            return
        was_in_headers = self._in_headers
        self._may_answer_at_once = True
        self._other_bytes += len(data)
        super().data_received(data if self._unread is not None else without_upgrade(data))
        if self.transport.is_closing():
            return
        if self._other_bytes > self._limits.header_bytes and not (self._in_headers or self._is_idle()):
            self._abort(Limit.HEADER_SIZE)
            return
        if self._in_headers and was_in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.header_bytes:
                self._end(Limit.HEADER_SIZE, HeadersTooLargeError(self._limits.header_bytes), lingers=True)
        elif not self._arrival.is_set and self.timeout_keep_alive_task is None and self._is_idle():
            self._expect_headers()  # empty lines do not begin a request, but they stop uvicorn's keep-alive timer

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the value
        """Answers what the client has sent. Returns whether the connection stays open for that."""
        self._is_half_closed = True
        if not self._is_refused and (self._in_headers or self._unread is not None):
            self._refuse(InvalidRequestError("the connection was closed before the request was complete"))
        for cycle in self._cycles:
            cycle.message_event.set()  # wakes `until_half_closed`
        return self._has_whole() and not self.transport.is_closing()

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
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if len(self._cycles) == self._limits.pipelined_requests:
            self._end(Limit.PIPELINE, PipelineError(self._limits.pipelined_requests), lingers=True)
            raise ConnectionAbortedError  # stops the parser, whose data may contain more requests
        self.app = self._app_of_request()
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        extensions: dict[str, Any] = {EXTENSION: self.cycle, LINGER: self._linger_after}
        self.cycle.scope["extensions"] = extensions
        self._arrival.set(self._limits.body_s, self._body_timed_out)

    def _app_of_request(self) -> ASGIApp:
        is_read_only = self.parser.get_method() in (b"GET", b"HEAD")
        at_once = self._at_once.get(self.url) if is_read_only else None
        error = self._error_in_headers()
        if error is None and self._is_beyond and at_once is None:
            error = TooManyConnectionsError()
        self._problem = error
        if error is not None:
            self._log(error)
            return refusal(error, self._dialects)
        if at_once is not None:
            return closing(at_once) if self._is_beyond else at_once
        return self._application

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = until_closed(app, cycle)
        if app in self._at_once.values() and self._may_answer_at_once and not self.flow.write_paused:
            self._may_answer_at_once = False
            self._answer_at_once(cycle, app)
        else:
            work: Any = until_half_closed(app, cycle, lambda: self._is_half_closed)
            super()._start_asgi_task(cycle, work)

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
        return problem_of(self.parser.get_http_version(), self.headers)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are not HTTP. `msg` is uvicorn's own text, which is not sent. What is wrong
        with the headers of a request says more than that its body cannot be read."""
        if not (self.transport.is_closing() or self._is_refused):
            problem = None if self._unread is None else self._problem
            self._refuse(problem or InvalidRequestError("the bytes cannot be parsed as HTTP/1.1"), lingers=True)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._other_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.payload_bytes and self.cycle.response_complete:
            self._abort(Limit.BODY_SIZE)  # the request has been answered, and its body is not used

    def on_chunk_header(self) -> None:
        """Refuses bodies of many tiny chunks: each chunk costs Python calls, however small the chunk is."""
        if self._chunks > self._limits.small_chunks and self._body_bytes < self._chunks * self._limits.chunk_bytes:
            self._end(Limit.CHUNKS, SmallChunksError(self._limits.chunk_bytes), lingers=True)
            raise ConnectionAbortedError  # stops the parser, whose data may contain more chunks
        self._chunks += 1

    def on_message_complete(self) -> None:
        self._arrival.clear()
        self._room.work(self)
        super().on_message_complete()
        # The request was answered before its body ended: uvicorn sets no keep-alive timer then.
        if self.cycle.response_complete:
            self.cycle.more_body = False
            self._wait()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _unread(self) -> RequestResponseCycle | None:
        """The unanswered request whose body is being received."""
        cycle = self.cycle
        return cycle if cycle is not None and cycle.more_body and not cycle.response_complete else None

    def _has_whole(self) -> bool:
        """Whether a whole request is unanswered."""
        return any(not (cycle.response_complete or cycle.more_body) for cycle in self._cycles)

    def _wait(self) -> None:
        if not self._has_whole():
            self._room.wait(self)

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
        self._wait()
        if not self.flow.write_paused:
            self._reading.start()
        if self.transport.is_closing():
            return
        if self._lingers:
            self._linger()
        elif not self._has_whole():
            if self._last is not None:
                self._last()
            elif self._is_half_closed:
                self.transport.close()

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
                cycle.default_headers = [*cycle.default_headers, CLOSE]

    def make_room(self) -> None:
        """Ends the connection, which has no whole request, because there are too many."""
        if not self._is_beyond:
            self._hits.count(Limit.CONNECTIONS)
        if self._is_refused or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._is_beyond or self._in_headers or not self._is_idle():
            self._refuse(TooManyConnectionsError())
        else:
            self.transport.close()

    def _end(self, limit: Limit, error: InferenceError, lingers: bool = False) -> None:
        self._hits.count(limit)
        self._refuse(error, lingers)

    def _refuse(self, error: InferenceError, lingers: bool = False) -> None:
        """Ends the connection: first come the answers to all whole requests, then this one, unless another answer to
        the same request has begun. `lingers`: see `ClosingResponse`."""
        self._is_refused = True
        self._other_bytes = 0
        self._arrival.clear()
        content = error_bytes(error, self._dialects.of(self._path()))
        if error is not self._problem:
            self._log(error)
        if self._unread is not None:
            scope: Any = self._unread.scope
            scope[IS_LOGGED] = True
        self._last = partial(self._write_last, content, lingers, self._unread)
        if not self._has_whole():
            self._last()

    def _write_last(self, content: bytes, lingers: bool, unread: RequestResponseCycle | None) -> None:
        self._last = None
        if unread is not None:
            has_begun, unread.disconnected = unread.response_started, True
            unread.waiting_for_100_continue = False  # nothing can be written behind this answer
            unread.message_event.set()
            if has_begun:
                self.transport.abort()
                return
        self.transport.write(content)
        self._reading.start()
        if lingers:
            self._linger()
        else:
            self.transport.close()

    def _linger_after(self, cycle: RequestResponseCycle) -> None:
        """Lingers after the answer to `cycle`, if its request has not arrived completely."""
        if cycle.more_body:
            self._lingers = cycle.keep_alive = True  # otherwise uvicorn closes the connection after the answer

    def _linger(self) -> None:
        self._is_refused = True
        self._other_bytes = 0
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._arrival.set(LINGER_S, self.transport.close)

    def _log(self, error: InferenceError) -> None:
        status = self._dialects.of(self._path()).status(error)
        self._refusals.add(self._address, error.error_type, {"status": status, "error_type": error.error_type})

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
