"""Answers that end their connection: also those that are sent before the whole request was read."""

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
