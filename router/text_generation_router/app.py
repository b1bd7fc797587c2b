"""The web application: routes, documentation, errors, cross-origin headers."""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from text_generation_router.api.adapters import AdapterRoutes
from text_generation_router.api.admin import AdminRoutes
from text_generation_router.api.anthropic.routes import MessagesRoutes
from text_generation_router.api.clouds import CloudRoutes
from text_generation_router.api.common.answer import Answers
from text_generation_router.api.common.services import Services
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.responses.routes import ResponsesRoutes
from text_generation_router.api.service import ServiceRoutes
from text_generation_router.api.texts import TextRoutes
from text_generation_router.api.tgi.routes import GenerateRoutes
from text_generation_router.config import RouterConfig
from text_generation_router.http.answer_headers import identified
from text_generation_router.http.cors import cors, preflights
from text_generation_router.http.errors import add_error_handlers
from text_generation_router.http.gate import gated, paced
from text_generation_router.http.keys import OpenRoute, guarded
from text_generation_router.http.request_log import Logged
from text_generation_router.metrics.key_usage import add_usages, salt_of
from text_generation_router.metrics.tracing import traced
from text_generation_router.openapi.routes import DocumentRoutes
from text_generation_router.page.engine.access import ViewAccess
from text_generation_router.page.engine.routes import PREFIX, EngineRoutes, ShownParts
from text_generation_router.page.routes import PageRoutes

Endpoint = Callable[..., Awaitable[Response]]


def create_app(services: Services, shown: ShownParts | None = None) -> Starlette:
    """`shown`: what the engine view shows; None: there is no such view, whatever the config says."""
    config = services.config
    app = Starlette()
    app.router.redirect_slashes = False
    generate, texts, service = GenerateRoutes(services), TextRoutes(services), ServiceRoutes(services)
    add_post(app, "/", generate.compat_generate)
    add_post(app, "/generate", generate.generate)
    add_post(app, "/generate_stream", generate.generate_stream)
    add_post(app, "/tokenize", texts.tokenize)
    add_post(app, "/chat_tokenize", texts.chat_tokenize)
    add_post(app, "/detokenize", texts.detokenize)
    completions, chats = CompletionRoutes(services), ChatRoutes(services)
    answer = Answers(services).answer
    add_post(app, "/v1/completions", partial(answer, dialect=completions))
    add_post(app, "/v1/chat/completions", partial(answer, dialect=chats))
    add_post(app, "/v1/responses", partial(answer, dialect=ResponsesRoutes(services)))
    messages = MessagesRoutes(services)
    add_post(app, "/v1/messages", partial(answer, dialect=messages))
    add_post(app, "/v1/messages/count_tokens", messages.count_tokens)
    clouds = CloudRoutes(services, generate, completions, chats)
    add_post(app, "/invocations", clouds.invocations)
    add_post(app, "/vertex", clouds.vertex)
    access = ViewAccess(config.admin_key_digest, config.http.engine_view)
    view = EngineRoutes(shown, access) if shown is not None and access.exists else None
    page = None if config.http.no_page else PageRoutes(services, service.health, has_view=view is not None)
    add_get(app, "/", service.health if page is None else page.root, open=True)
    for path in ("/health", "/ping", "/ready"):
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
    for path, document in (DocumentRoutes(services).endpoints | (page.endpoints if page is not None else {})).items():
        add_get(app, path, document, open=not config.http.closed_routes)
    if config.admin_key_digest is not None:
        admin = AdminRoutes(config.admin_key_digest, services.replicas)
        # Open to `guarded`, which knows the clients' keys: these routes compare their own key.
        add_get(app, "/admin/replicas", admin.replicas, open=True)
        app.routes.append(OpenRoute("/admin/replicas", admin.scale, methods=["POST"]))
        if services.adapters.may_change:
            loading = AdapterRoutes(config.admin_key_digest, services.adapters)
            app.routes.append(OpenRoute("/v1/load_lora_adapter", loading.load, methods=["POST"]))
            app.routes.append(OpenRoute("/v1/unload_lora_adapter", loading.unload, methods=["POST"]))
    for path, view_endpoint in (view.endpoints if view is not None else {}).items():
        add_get(app, path, view_endpoint, open=True)  # as above: each asks `access`
    add_error_handlers(app, services.limit_hits, services.dialects)
    app.add_middleware(paced, callers=services.callers)
    app.add_middleware(gated, gate=services.gate, dialects=services.dialects)
    if config.api_keys:
        shared = config.block_hash_key or config.usage_key.encode()
        salt = salt_of(shared, is_alone=config.metrics_file is None)
        usages = add_usages(config.api_keys, salt, services.metrics.registry)
        app.add_middleware(guarded, usages=usages, routes=app.routes, dialects=services.dialects)
    app.add_middleware(preflights, routes=app.routes, dialects=services.dialects, closed=PREFIX)
    app.add_middleware(cors, origins=config.http.cors_allow_origin, closed=PREFIX)
    if services.tracer is not None:
        app.add_middleware(traced, tracer=services.tracer)
    app.add_middleware(Logged, routes=app.routes, trusted_proxies=config.trusted_proxies)
    app.add_middleware(identified)
    return app


def answers_at_once(config: RouterConfig) -> dict[bytes, ASGIApp]:
    """Applications for `Connection`: /live tells whether this process works, and must not wait behind its work."""
    return {b"/live": cors(Response(), config.http.cors_allow_origin)}


def add_post(app: Starlette, path: str, endpoint: Endpoint) -> None:
    app.routes.append(Route(path, endpoint, methods=["POST"]))


def add_get(app: Starlette, path: str, endpoint: Endpoint, open: bool) -> None:
    """Adds GET and HEAD. `open`: the route needs no API key, even if the router has keys."""
    app.routes.append((OpenRoute if open else Route)(path, endpoint, methods=["GET"]))
