"""The small routes: health, info, models, version, metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.services import Services
from text_generation_router.errors import UnhealthyError, UnknownModelError
from text_generation_router.http.dialects import ANTHROPIC
from text_generation_router.http.encoding import json_response
from text_generation_router.http.errors import error_response
from text_generation_router.metrics.page import CONTENT_TYPE, render_in_turns

# A page that takes long to make, and is made once for all requests that wait for it.

# Shortest time between two pages, in seconds: a page of metrics takes up to 10 ms of a processor.
GAP_S = 0.05


class SharedPage:
    """Makes the page by calling `make`. A request never gets a page that is older than the
    request.
    """

    def __init__(self, make: Callable[[], Awaitable[str]], gap_s: float = GAP_S) -> None:
        self._make = make
        self._gap_s = gap_s
        self._made_s = -gap_s  # event loop time when the newest page was made
        self._next: asyncio.Task[str] | None = None

    async def read(self) -> str:
        if self._next is None:
            self._next = asyncio.create_task(self._make_next())
        # Shielded, because other requests wait for the same page when this one is cancelled.
        return await asyncio.shield(self._next)

    async def _make_next(self) -> str:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._made_s + self._gap_s - clock())
        self._next = None  # a request that comes from now on gets a later page
        self._made_s = clock()
        return await self._make()


# Token spans encoded in one piece. Other threads can take the interpreter lock between two pieces.
SPANS_PER_PIECE = 2048
NO_DATE = "1970-01-01T00:00:00Z"  # date of a model whose release date is unknown, as in Anthropic's API


def is_from_anthropics_client(request: Request) -> bool:
    """Whether the client uses Anthropic's API. OpenAI's API has routes with the same paths."""
    return "anthropic-version" in request.headers


class ServiceRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._metrics_page = SharedPage(lambda: render_in_turns(services.metrics.of_server))

    async def health(self, _: Request) -> Response:
        """200 with an empty body if the server takes requests, else 503."""
        if self._services.gate.is_shut or not await self._services.engine.is_healthy():
            raise UnhealthyError
        return Response()

    async def live(self, _: Request) -> Response:
        """200 with an empty body as long as this process answers requests."""
        return Response()

    async def info(self, _: Request) -> Response:
        """What is served, and its limits. Fields of older TGIs are kept."""
        return json_response(self._info())

    def _info(self) -> dict[str, Any]:
        config, snapshot = self._services.config, self._services.engine.snapshot()
        limits = snapshot.limits
        return {
            "model_id": config.tokenizer_name,
            "model_sha": self._services.model_sha,
            "model_pipeline_tag": None,
            "max_concurrent_requests": config.requests.max_concurrent_requests,
            "max_best_of": config.requests.max_best_of,
            "max_stop_sequences": config.requests.max_stop_sequences,
            "max_input_tokens": limits.max_input_tokens,
            "max_total_tokens": limits.max_total_tokens,
            "validation_workers": config.requests.validation_workers,
            "max_client_batch_size": config.requests.max_client_batch_size,
            "router": "text-generation-router",
            "version": self._services.version,
            "sha": None,
            "docker_label": None,
            "sampling_defaults": self._services.sampling_defaults,
            "model_implementation": self._services.implementation,
            "model_dtype": snapshot.model.dtype,
            "model_device_type": snapshot.model.device_type,
            "max_input_length": limits.max_input_tokens,
            "max_batch_total_tokens": limits.max_batch_total_tokens,
            "waiting_served_ratio": snapshot.joining.waiting_served_ratio,
            "max_waiting_tokens": snapshot.joining.max_waiting_tokens,
            "max_batch_size": snapshot.joining.max_batch_size,
        }

    async def version(self, _: Request) -> Response:
        """The version of this server."""
        return json_response({"version": self._services.version})

    async def models(self, request: Request) -> Response:
        """The list of models, in the form of the client's API: the served model, and its adapters."""
        names = [self._services.served_name, *self._services.adapters.digests]
        entries = [self._model(request, name) for name in names]
        if is_from_anthropics_client(request):
            return json_response({"data": entries, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return json_response({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """The entry of a model, in the form of the client's API, if the path has the name or id of the served model, or
        the name of an adapter."""
        services, name = self._services, request.path_params["name"]
        if name in (services.served_name, services.config.tokenizer_name):
            return json_response(self._model(request, services.served_name))
        if name in services.adapters.digests:
            return json_response(self._model(request, name))
        unknown = UnknownModelError(name, services.served_name)
        if is_from_anthropics_client(request):
            return error_response(unknown, ANTHROPIC)
        raise unknown

    def _model(self, request: Request, name: str) -> dict[str, Any]:
        if is_from_anthropics_client(request):
            return {"type": "model", "id": name, "display_name": name, "created_at": NO_DATE}
        entry = {"id": name, "object": "model", "created": 0, "owned_by": name}
        # Fields of vLLM and SGLang. Clients cut their prompts by `max_model_len`.
        parent = {} if name == self._services.served_name else {"parent": self._services.served_name}
        return (
            entry | parent | {"root": name, "max_model_len": self._services.engine.snapshot().limits.max_total_tokens}
        )

    async def metrics(self, _: Request) -> Response:
        """Prometheus metrics."""
        return Response(await self._metrics_page.read(), media_type=CONTENT_TYPE)
