"""The small routes: health, info, models, tokenize, metrics."""

from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

from fastapi import Request, Response

from text_generation_router.api.asking import TOKENIZE
from text_generation_router.api.services import Services
from text_generation_router.errors import UnhealthyError
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.encoding import json_response, to_json
from text_generation_router.http.json_stream import JsonStream
from text_generation_router.http.shared_page import SharedPage
from text_generation_router.metrics import CONTENT_TYPE, render
from text_generation_router.scheduling.share import Share
from text_generation_router.text.tokenization import PART_CHARS, Span

# Token spans encoded in one piece. Other threads can take the interpreter lock between two pieces.
SPANS_PER_PIECE = 2048


class ServiceRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._metrics_page = SharedPage(lambda: render(services.metrics.registry))

    async def health(self) -> Response:
        """200 with an empty body if the server takes requests, else 503."""
        if self._services.gate.is_shut or not await self._services.engine.is_healthy():
            raise UnhealthyError
        return Response()

    async def live(self) -> Response:
        """200 with an empty body while this process answers at all."""
        return Response()

    async def info(self) -> Response:
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
            "model_dtype": snapshot.model.dtype,
            "model_device_type": snapshot.model.device_type,
            "max_input_length": limits.max_input_tokens,
            "max_batch_total_tokens": limits.max_batch_total_tokens,
            "waiting_served_ratio": config.scheduling.waiting_served_ratio,
            "max_waiting_tokens": config.scheduling.max_waiting_tokens,
            "max_batch_size": config.scheduling.max_batch_size,
        }

    async def models(self) -> Response:
        """OpenAI's list of models: the one that is served."""
        name = self._services.config.served_model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": name}
        return json_response({"object": "list", "data": [model]})

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(await self._metrics_page.read(), media_type=CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of `inputs`, special ones too, with the bytes each covers. `parameters` change nothing."""
        asked = await self._services.bodies.read(request, TOKENIZE)
        pieces = self._tokens(asked.inputs, self._services.callers.caller_of(request).share)
        first = await unless_disconnected(request.receive, anext(pieces))
        if len(asked.inputs) > PART_CHARS:
            return JsonStream(pieces, first)
        await pieces.aclose()
        return Response(b"[" + first + b"]", media_type="application/json")

    async def _tokens(self, text: str, share: Share) -> AsyncGenerator[bytes, None]:
        """The content of the JSON array, with commas, in pieces: one piece per part of the text."""
        is_large = len(text) > PART_CHARS
        tidied = self._services.bodies.tidying.after() if is_large else nullcontext()
        with tidied, self._services.inference.counted_failures(), self._services.inference.permit(share):
            comma = b""
            async for piece in self._services.tokenizer.spans(text, share, _encode_spans):
                yield comma + piece if piece else b""
                comma = comma or (b"," if piece else b"")


def _encode_spans(spans: list[Span]) -> bytes:
    starts = range(0, len(spans), SPANS_PER_PIECE)
    return b",".join(to_json(spans[at : at + SPANS_PER_PIECE])[1:-1] for at in starts)
