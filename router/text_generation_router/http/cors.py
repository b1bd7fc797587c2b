"""Cross-origin requests of browsers: any page may ask, or those of `--cors-allow-origin`, with any header of its client
library; it may read all headers of the answer.
"""

import re
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from text_generation_router.errors import NoSuchRouteError
from text_generation_router.http.answer_headers import added_headers
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.errors import error_response

VARY = "origin, access-control-request-method, access-control-request-headers"
# What a preflight is answered that does not say which headers are to be sent.
ALLOWED = "content-type,authorization,x-tenant,x-request-timeout,x-api-key,anthropic-version,anthropic-beta"
NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z, -]+")
# Headers that pages may read anyway (Fetch Standard, "CORS-safelisted response-header name"), and those of browsers.
READABLE = {b"cache-control", b"content-language", b"content-length", b"content-type", b"expires", b"last-modified"}
NOT_EXPOSED = READABLE | {b"pragma", b"vary", b"connection"}


def cors(app: ASGIApp, origins: tuple[str, ...], closed: str = "\n") -> ASGIApp:
    """The application, whose answers tell browsers which pages may read them, and their headers. `origins`: origins
    that may read answers; empty for any origin. `closed`: answers of paths that begin so are for this server's own page
    only, and have no such header."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(closed):
            return await app(scope, receive, send)
        origin = Headers(scope=scope).get("origin")
        headers = {}
        if not origins or origin in origins:
            headers["access-control-allow-origin"] = str(origin) if origins else "*"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if origin is not None and (exposed := b",".join(_exposed(scope, message))):
                    headers["access-control-expose-headers"] = exposed.decode("latin-1")
                answered = MutableHeaders(scope=message)
                answered.update(headers)
                answered.add_vary_header(VARY)
            await send(message)

        await app(scope, receive, send_with_headers)

    return answer


def _exposed(scope: Scope, message: Message) -> Iterator[bytes]:
    """Names of the answer's headers, with those that are added to it later."""
    names = dict.fromkeys(name.lower() for name, _ in (*message["headers"], *added_headers(scope)))
    return (name for name in names if name not in NOT_EXPOSED and not name.startswith(b"access-control-"))


def preflights(app: ASGIApp, routes: Sequence[BaseRoute], dialects: ErrorDialects, closed: str = "\n") -> ASGIApp:
    """The application, in front of which OPTIONS is answered for the paths of all routes: a preflight may send the
    headers that it names. `*` would not allow `Authorization`, and the names in a list of ours would be those of some
    client libraries only. `routes`: the application's own list, to which routes are added later. `closed`: see
    `cors`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "OPTIONS" or scope["path"].startswith(closed):
            return await app(scope, receive, send)
        if all(route.matches(scope)[0] is Match.NONE for route in routes):
            return await error_response(NoSuchRouteError(), dialects.of(scope["path"]))(scope, receive, send)
        asked = Headers(scope=scope).get("access-control-request-headers", "")
        allowed = asked if NAMES.fullmatch(asked) else ALLOWED
        headers = {"access-control-allow-methods": "GET,POST", "access-control-allow-headers": allowed}
        await Response(headers=headers)(scope, receive, send)

    return answer
