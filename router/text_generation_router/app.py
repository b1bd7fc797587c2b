"""The web application: routes, documentation, errors, cross-origin headers."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from text_generation_router.api.chat import ChatRoutes
from text_generation_router.api.clouds import CloudRoutes
from text_generation_router.api.completions import CompletionRoutes
from text_generation_router.api.fields import Body
from text_generation_router.api.generate import GenerateRoutes
from text_generation_router.api.schemas import (
    ChatRequest,
    CompatGenerateRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    VertexRequest,
)
from text_generation_router.api.service import ServiceRoutes
from text_generation_router.api.services import Services
from text_generation_router.api.texts import TextRoutes
from text_generation_router.config import RouterConfig
from text_generation_router.http.answer_headers import Identified
from text_generation_router.http.cors import Cors
from text_generation_router.http.errors import add_error_handlers
from text_generation_router.http.gate import Gated
from text_generation_router.http.keys import Guard, OpenRoute
from text_generation_router.http.starts import Paced
from text_generation_router.openapi.page import FILES, page
from text_generation_router.tracing import Traced

Endpoint = Callable[..., Awaitable[Response]]
REQUESTS: tuple[type[Body], ...] = (
    GenerateRequest,
    CompatGenerateRequest,
    CompletionRequest,
    ChatRequest,
    DetokenizeRequest,
    VertexRequest,
)
SCHEMA_REF = "#/components/schemas/{model}"
DOCUMENT_PATH = "/api-doc/openapi.json"


def create_app(services: Services) -> FastAPI:
    config = services.config
    app = FastAPI(
        title="Text Generation Inference",
        version=services.version,
        license_info={"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        docs_url=None,  # FastAPI's own documentation routes are replaced by add_documentation, which can require a key
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    generate, texts, service = GenerateRoutes(services), TextRoutes(services), ServiceRoutes(services)
    add_post(app, "/", generate.compat_generate, CompatGenerateRequest)
    add_post(app, "/generate", generate.generate, GenerateRequest)
    add_post(app, "/generate_stream", generate.generate_stream, GenerateRequest)
    add_post(app, "/tokenize", texts.tokenize, GenerateRequest)
    add_post(app, "/chat_tokenize", texts.chat_tokenize, ChatRequest)
    add_post(app, "/detokenize", texts.detokenize, DetokenizeRequest)
    completions, chats = CompletionRoutes(services), ChatRoutes(services)
    add_post(app, "/v1/completions", completions.completions, CompletionRequest)
    add_post(app, "/v1/chat/completions", chats.chat_completions, ChatRequest)
    clouds = CloudRoutes(services, generate, completions, chats)
    add_post(app, "/invocations", clouds.invocations, CompatGenerateRequest)
    add_post(app, "/vertex", clouds.vertex, VertexRequest)
    for path in ("/", "/health", "/ping", "/ready"):
        add_get(app, path, service.health, open=True)
    add_get(app, "/live", service.live, open=True)
    for path, endpoint in (
        ("/info", service.info),
        ("/version", service.version),
        ("/metrics", service.metrics),
        ("/v1/models", service.models),
        ("/v1/models/{name:path}", service.model),
    ):
        add_get(app, path, endpoint, open=not config.http.closed_routes)
    add_documentation(app, open=not config.http.closed_routes)
    add_error_handlers(app, services.limit_hits, services.dialects)
    app.add_middleware(Paced, callers=services.callers)
    app.add_middleware(Gated, gate=services.gate, dialects=services.dialects)
    if config.api_key_digests:
        app.add_middleware(Guard, digests=config.api_key_digests, routes=app.routes, dialects=services.dialects)
    app.add_middleware(Cors, origins=config.http.cors_allow_origin)
    if services.tracer is not None:
        app.add_middleware(Traced, tracer=services.tracer)
    app.add_middleware(Identified)
    return app


def answers_at_once(config: RouterConfig) -> dict[bytes, ASGIApp]:
    """Applications for `Connection`: /live tells whether this process works, and must not wait behind its work."""
    return {b"/live": Cors(Response(), config.http.cors_allow_origin)}


def add_post(app: FastAPI, path: str, endpoint: Endpoint, schema: type[Body]) -> None:
    """Adds a route without FastAPI's body parsing: the endpoint parses the body, because the error texts, the size
    limit and the parsing speed are part of TGI's contract. `schema` only documents the body."""
    content = {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=schema.__name__)}}}
    documentation = {"requestBody": {"required": True, "content": content}}
    app.add_api_route(path, endpoint, methods=["POST"], response_class=Response, openapi_extra=documentation)


def add_get(app: FastAPI, path: str, endpoint: Endpoint, open: bool, in_schema: bool = True) -> None:
    """Adds GET and HEAD. `open`: the route needs no API key, even if the router has keys."""
    kind = OpenRoute if open else APIRoute
    for method, documented in (("GET", in_schema), ("HEAD", False)):
        app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_class=Response,
            include_in_schema=documented,
            route_class_override=kind,
        )


def add_documentation(app: FastAPI, open: bool) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes, license_info=app.license_info)
            _, definitions = models_json_schema([(model, "validation") for model in REQUESTS], ref_template=SCHEMA_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    async def document(_: Request) -> Response:
        return JSONResponse(app.openapi())  # not orjson: the schema contains 2**64, which orjson refuses

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema
    for path in (DOCUMENT_PATH, "/openapi.json"):
        add_get(app, path, document, open, in_schema=False)
    for path in ("/docs", "/docs/"):
        add_get(app, path, page, open, in_schema=False)
    for file in FILES:
        add_get(app, file.path, file.answer, open, in_schema=False)
