"""Answers that end their connection, given before the request was read to its end."""

import asyncio
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

LINGER_S = 1.0
LINGER_BYTES = 2**18


class ClosingResponse(Response):
    """A socket closed with unread bytes in it is reset, and the answer may be lost on the way: so the client gets a
    moment to read it. Of what it still sends only a little is taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _rest_of(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _rest_of(receive: Receive) -> None:
    """Returns at the end of the request, or never if that is far away."""
    left = LINGER_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
        left -= len(message.get("body", b""))
    await asyncio.Event().wait()
