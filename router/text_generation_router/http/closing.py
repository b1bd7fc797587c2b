"""How answers and connections end: answers that end their connection, also those that are sent before the whole request
was read, and clients that have closed their sending side.
"""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from text_generation_router.http.disconnect import HALF_CLOSE
from text_generation_router.http.sse import EXTENSION

CLOSE = (b"connection", b"close")
# The ASGI extension in which `Connection` gives `linger_after`: the rest of the request is dropped for a while after
# the answer. Closing a socket that has unread bytes resets the connection, and the answer may be lost.
LINGER = "text_generation_router.linger"
LINGER_S = 1.0
LINGER_BYTES = 2**18


class ClosingResponse(Response):
    """The client has the whole answer, and the end of the connection's stream, at once. The server drops up to
    LINGER_BYTES more of the request, for up to LINGER_S seconds."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        extensions = scope.get("extensions", {})
        if LINGER in extensions:
            extensions[LINGER](extensions[EXTENSION])
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def closing(app: ASGIApp) -> ASGIApp:
    """The application, whose answers end their connections."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], CLOSE]
            await send(message)

        await app(scope, receive, send_closing)

    return answer


# What uvicorn's cycle of one request lacks: answers that end with their connection, and clients that have closed their
# sending side.
def until_closed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for a client of HTTP/1.0, which does not know chunks: the end of the connection ends a body whose
    length is unknown (RFC 9112, section 6.3)."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            while cycle.flow.write_paused and not cycle.disconnected:
                await cycle.flow.drain()
            # From here to the end of `send` nothing waits, so no other message changes the length that uvicorn expects.
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        cycle.chunked_encoding = False
        await app(scope, receive, send_plain)

    return answer


def until_half_closed(app: ASGIApp, cycle: RequestResponseCycle, is_half_closed: Callable[[], bool]) -> ASGIApp:
    """The application, for which a client has left that has closed its sending side, if the work is marked by
    `end_at_half_close`. Any other work is done and answered: such a client may still read."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_read = False  # whether the application has the whole body

        async def receive_or_leave() -> Message:
            nonlocal is_read
            while not (is_read and is_half_closed() and HALF_CLOSE in scope):
                message = await receive()
                if not is_read or message["type"] == "http.disconnect":
                    is_read = not message.get("more_body", False)
                    return message
            if cycle.response_started:  # nothing can be answered any more
                cycle.disconnected = True
                cycle.transport.close()
            return {"type": "http.disconnect"}

        await app(scope, receive_or_leave, send)

    return answer
