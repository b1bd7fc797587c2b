"""Cross-origin requests, answered as TGI's outermost layer answers them, except that browsers may also send
`authorization` and the headers of Anthropic's clients.
"""

from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

VARY = "origin, access-control-request-method, access-control-request-headers"
PREFLIGHT = {
    "access-control-allow-methods": "GET,POST",
    "access-control-allow-headers": "content-type,authorization,x-tenant,x-request-timeout,"
    "x-api-key,anthropic-version,anthropic-beta",
}


class Cors:
    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        """`origins`: origins that may read answers; empty for any origin."""
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = self._headers(Headers(scope=scope).get("origin"))
        if scope["method"] == "OPTIONS":
            return await Response(headers=headers | PREFLIGHT)(scope, receive, send)

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _headers(self, origin: str | None) -> dict[str, str]:
        if not self._origins:
            return {"vary": VARY, "access-control-allow-origin": "*"}
        if origin in self._origins:
            return {"vary": VARY, "access-control-allow-origin": str(origin)}
        return {"vary": VARY}
