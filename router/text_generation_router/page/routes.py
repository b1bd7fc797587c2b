"""The routes of the page for browsers: the page at `/`, its files, and the state that it shows."""

import gzip
import hashlib
import html
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.services import Services
from text_generation_router.errors import UnauthorizedError
from text_generation_router.http.encoding import json_response
from text_generation_router.http.keys import allowed_digest, authorization_of
from text_generation_router.openapi.routes import takes_gzip
from text_generation_router.page.accept import prefers_html

STATIC = Path(__file__).parent / "static"
# Nothing but the files of this server; no script or style in the page's text. The icon is a `data:` address.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A browser asks each time whether a file has changed, so that files of two versions never meet. `private`: a shared
# cache could give a client a coding that the client does not take.
FILE_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "private, no-cache"}
PAGE_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept, accept-encoding",
}
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class PageFile:
    """A file of the page, compressed when it is first asked for."""

    name: str

    @property
    def path(self) -> str:
        return f"/ui/{self.name}"

    @cached_property
    def content(self) -> bytes:
        return (STATIC / self.name).read_bytes()

    @cached_property
    def packed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'

    async def answer(self, request: Request) -> Response:
        headers = FILE_HEADERS | {"etag": self.tag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        media_type = MEDIA_TYPES[Path(self.name).suffix]
        return _packed_response(request, self.content, self.packed, headers, media_type)


FILES = tuple(PageFile(path.name) for path in sorted(STATIC.iterdir()) if path.suffix in MEDIA_TYPES)


class PageRoutes:
    """`endpoints`: the endpoint of each path, besides `/`."""

    def __init__(self, services: Services, health: Endpoint, has_view: bool) -> None:
        """`health`: what `/` answers to all that is not a browser. `has_view`: whether there is the engine view."""
        self._services = services
        self._has_view = has_view
        self._health = health
        self._template = (STATIC / "page.html").read_text(encoding="utf-8")
        self.endpoints: dict[str, Endpoint] = {
            "/ui/state": self.state,
            **{file.path: file.answer for file in FILES},
        }

    async def root(self, request: Request) -> Response:
        """The page, if a browser asks; otherwise the answer of the health check."""
        if request.method != "GET" or not prefers_html(request.headers.get("accept", "")):
            return await self._health(request)
        config = self._services.config
        if config.http.closed_routes and allowed_digest(authorization_of(request.scope), config.api_keys) is None:
            raise UnauthorizedError
        content = self._page().encode()
        return _packed_response(request, content, gzip.compress(content, 6, mtime=0), PAGE_HEADERS, "text/html")

    def _page(self) -> str:
        """The page's text, with the facts that it shows at once, so that no request is needed for them."""
        services, snapshot = self._services, self._services.engine.snapshot()
        facts = {
            "MODEL": services.served_name,
            "VERSION": services.version,
            "DTYPE": snapshot.model.dtype.removeprefix("torch."),
            "DEVICE": snapshot.model.device_type,
            "KERNELS": snapshot.model.kernels,
            "MAX_TOTAL_TOKENS": str(snapshot.limits.max_total_tokens),
            "MAX_TOP_TOKENS": str(services.config.requests.max_top_n_tokens),
            "HAS_KEYS": "yes" if services.config.api_keys else "",
            "VIEW": ("open" if services.config.http.engine_view else "key") if self._has_view else "",
            "HAS_CHAT": "yes" if services.renderer is not None else "",
            "STATE": self._state(),
        }
        page = self._template
        for name, value in facts.items():
            page = page.replace(f"{{{name}}}", html.escape(value))
        return page

    async def state(self, _: Request) -> Response:
        """One word for what the server can do now, which the page asks for each second."""
        load = self._services.engine.load()
        counts = {"running": load.running, "waiting": load.waiting}
        return json_response({"state": self._state(), **({} if self._services.config.is_front else counts)})

    def _state(self) -> str:
        services = self._services
        if services.gate.is_shut:
            return "draining"
        if services.engine.load().is_ready:
            return "ready"
        return "no_engine" if services.config.is_front else "lost"


def _packed_response(
    request: Request, content: bytes, packed: bytes, headers: dict[str, str], media_type: str
) -> Response:
    if not takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(content, headers=headers, media_type=media_type)
    return Response(packed, headers=headers | {"content-encoding": "gzip"}, media_type=media_type)
