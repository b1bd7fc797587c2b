"""Headers that every answer to a request carries, whichever part of the router makes the answer: the request's id, and
what else was added while the request was read.
"""

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from text_generation_common.logs import request_id
from text_generation_router.http.dialects import is_anthropics

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"  # the header in which Anthropic's clients look for the id
# An id is repeated in headers, logs and JSON.
ALLOWED = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
ID_BYTES = 12
KEY = "text_generation_router.headers"


def add_header(scope: Scope, name: str, value: str) -> None:
    """Adds a header to the answer of this request, or a value to a header that was added. No effect once the answer has
    begun."""
    headers: list[tuple[bytes, bytes]] = scope.setdefault(KEY, [])
    key, content = name.encode(), value.encode("latin-1", "replace")
    for number, (known, values) in enumerate(headers):
        if known == key:
            headers[number] = (key, values + b", " + content)
            return
    headers.append((key, content))


def added_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    return list(scope.get(KEY, ()))


def identified(app: ASGIApp) -> ASGIApp:
    """The application, whose requests all have an id: the client's `X-Request-Id` if it is a usable one, or else a
    random one. The id is in the answer's header, in the log lines of the request, and in the `id` of OpenAI's answers.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        identity = given if ALLOWED.fullmatch(given) else secrets.token_hex(ID_BYTES).encode()
        request_id.set(identity.decode())
        scope[KEY] = headers = [(HEADER, identity)]
        if is_anthropics(scope["path"]):
            headers.append((ANTHROPIC_HEADER, identity))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await app(scope, receive, send_named)

    return answer
