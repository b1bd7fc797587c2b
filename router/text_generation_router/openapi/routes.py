"""The routes of the documents: the OpenAPI document, and the page that shows it."""

import asyncio
import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.services import Services

# The page /docs: Swagger UI with the server's own OpenAPI document. Everything that the page loads is in this
# package, so it works without a connection to the internet.

STATIC = Path(__file__).parent / "static"
# Nothing but the files of this server, and no script or style in the page's text. Swagger UI's style sheet has images
# as `data:` addresses.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# `private`: a shared cache could give a client a coding that the client does not take.
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "private, max-age=3600"}
PAGE_HEADERS = HEADERS | {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    path: str  # path of the route
    name: str  # name in the folder `static`; a name that ends with .gz is that of a compressed file
    media_type: str

    async def answer(self, request: Request) -> Response:
        content, headers = _content(self.name), dict(HEADERS)
        if self.name.endswith(".gz"):
            if takes_gzip(request.headers.get("accept-encoding", "")):
                headers["content-encoding"] = "gzip"
            else:
                content = await asyncio.to_thread(gzip.decompress, content)  # milliseconds for the largest file
        return Response(content, headers=headers, media_type=self.media_type)


FILES = (
    StaticFile("/docs/swagger-ui-bundle.js", "swagger-ui-bundle.js.gz", "text/javascript"),
    StaticFile("/docs/swagger-ui.css", "swagger-ui.css.gz", "text/css"),
    StaticFile("/docs/start.js", "start.js", "text/javascript"),
)


async def page(_: Request) -> Response:
    return Response(_content("page.html"), headers=PAGE_HEADERS, media_type="text/html")


@cache
def _content(name: str) -> bytes:
    return (STATIC / name).read_bytes()


def takes_gzip(accept_encoding: str) -> bool:
    """Whether the header names gzip, or any coding, with a weight that is not 0."""
    weights = {}
    for item in accept_encoding.lower().split(","):
        coding, _, weight = item.partition(";")
        weights[coding.strip()] = weight.replace(" ", "").removeprefix("q=")
    weight = weights.get("gzip", weights.get("*", "0"))
    return weight == "" or weight.strip("0.") != ""


DOCUMENT_PATHS = ("/api-doc/openapi.json", "/openapi.json")


class DocumentRoutes:
    """`endpoints`: the endpoint of each path."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._content = b""
        self.endpoints = {
            **dict.fromkeys(DOCUMENT_PATHS, self.document),
            **dict.fromkeys(("/docs", "/docs/"), page),
            **{file.path: file.answer for file in FILES},
        }

    async def document(self, _: Request) -> Response:
        if not self._content:  # made at the first request, in a thread: it takes tens of milliseconds
            self._content = await asyncio.to_thread(self._make)
        return Response(self._content, media_type="application/json")

    def _make(self) -> bytes:
        # Imported here, because the schemas of all answers take longer to load than the document to make.
        from text_generation_router.openapi.document import document_of
        from text_generation_router.openapi.operation_json import Interface

        config = self._services.config
        interface = Interface(
            version=self._services.version,
            has_keys=bool(config.api_keys),
            closed_routes=config.http.closed_routes,
            tgi_dialect=config.http.tgi_dialect,
            has_admin=config.admin_key_digest is not None,
        )
        # Not orjson: the schemas contain 2**64, which orjson refuses.
        return json.dumps(document_of(interface), ensure_ascii=False).encode()
