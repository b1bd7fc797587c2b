"""The routes of the documents: the OpenAPI document, and the page that shows it."""

import asyncio
import gzip
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.services import Services
from text_generation_router.errors import OverloadedError
from text_generation_router.offload.errors import JobError
from text_generation_router.offload.process import ChildProcess

logger = logging.getLogger(__name__)

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


# The function by which a child process makes the document, and the most memory that this takes.
MAKER = "text_generation_router.openapi.document:make_handlers"
MAKER_BYTES = 256 * 2**20
DOCUMENT_PATHS = ("/api-doc/openapi.json", "/openapi.json")


class DocumentRoutes:
    """`endpoints`: the endpoint of each path."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._content = b""
        self._making = asyncio.Lock()
        self.endpoints = {
            **dict.fromkeys(DOCUMENT_PATHS, self.document),
            **dict.fromkeys(("/docs", "/docs/"), page),
            **{file.path: file.answer for file in FILES},
        }

    async def document(self, _: Request) -> Response:
        async with self._making:
            self._content = self._content or await self._made()
        return Response(self._content, media_type="application/json")

    async def _made(self) -> bytes:
        """The document, made by a child process: loading the schemas of all answers takes a second, in which a thread
        of this process would hold up every stream."""
        config = self._services.config
        interface = {  # the fields of an Interface, whose module has all operations
            "version": self._services.version,
            "has_keys": bool(config.api_keys),
            "closed_routes": config.http.closed_routes,
            "tgi_dialect": config.http.tgi_dialect,
            "has_admin": config.admin_key_digest is not None,
            "loads_adapters": self._services.adapters.may_change,
            "engine_view": config.http.engine_view,
        }
        try:
            child = await ChildProcess.start(MAKER, memory_bytes=MAKER_BYTES, cpu_s=60, max_answer_bytes=MAKER_BYTES)
            try:
                await child.set_up(b"")
                return await child.ask("document", orjson.dumps(interface))
            finally:
                await child.end()
        except (OSError, JobError, TimeoutError) as error:
            logger.error(
                "the OpenAPI document was not made, its process failed: %s", str(error) or type(error).__name__
            )
            raise OverloadedError from error
