"""The routes of the documents: the OpenAPI document, and the page that shows it."""

import json

from fastapi import Request, Response

from text_generation_router.api.services import Services
from text_generation_router.openapi.document import document_of
from text_generation_router.openapi.operation_json import Interface
from text_generation_router.openapi.page import FILES, page

DOCUMENT_PATHS = ("/api-doc/openapi.json", "/openapi.json")


class DocumentRoutes:
    """`endpoints`: the endpoint of each path."""

    def __init__(self, services: Services) -> None:
        config = services.config
        self._interface = Interface(
            version=services.version,
            has_keys=bool(config.api_keys),
            closed_routes=config.http.closed_routes,
            tgi_dialect=config.http.tgi_dialect,
            has_admin=config.admin_key_digest is not None,
        )
        self._content = b""
        self.endpoints = {
            **dict.fromkeys(DOCUMENT_PATHS, self.document),
            **dict.fromkeys(("/docs", "/docs/"), page),
            **{file.path: file.answer for file in FILES},
        }

    async def document(self, _: Request) -> Response:
        if not self._content:  # made at the first request: it takes tens of milliseconds
            # Not orjson: the schemas contain 2**64, which orjson refuses.
            self._content = json.dumps(document_of(self._interface), ensure_ascii=False).encode()
        return Response(self._content, media_type="application/json")
