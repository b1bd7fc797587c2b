"""The routes of the documents: the OpenAPI document, and the page that shows it."""

import asyncio
import json

from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.services import Services
from text_generation_router.openapi.page import FILES, page

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
