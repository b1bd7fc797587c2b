"""What uvicorn's cycle of one request lacks: answers that end with their connection, and clients that have closed their
sending side.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from text_generation_router.http.disconnect import HALF_CLOSE


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
            # A client that has left before its body is read costs no more: the body is neither read nor answered.
            while not (is_half_closed() and HALF_CLOSE in scope):
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
