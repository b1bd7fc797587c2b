"""The parts of the router that its HTTP routes use."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from text_generation_router.api.admin import ReplicaControl
from text_generation_router.api.common.adapters import ServedAdapters
from text_generation_router.api.common.body import Bodies
from text_generation_router.api.common.ignored import IgnoredParameters
from text_generation_router.api.common.inference import Inference
from text_generation_router.api.common.styles import ChatFormats, Style, style_of
from text_generation_router.config import RouterConfig
from text_generation_router.engine.protocol import Engine
from text_generation_router.http.caller import Caller, Callers
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import LimitHits
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.tracing import Tracer
from text_generation_router.text.templates.rendering import Renderer
from text_generation_router.text.tokens.tokenization import TextTokenizer


@dataclass(frozen=True, slots=True)
class Services:
    config: RouterConfig
    engine: Engine
    inference: Inference
    callers: Callers
    bodies: Bodies
    metrics: Metrics
    tokenizer: TextTokenizer
    renderer: Renderer | None  # None: the model has no chat template
    chat_formats: ChatFormats
    model_sha: str | None
    sampling_defaults: Mapping[str, Any]  # values of generation_config.json for fields that a request leaves out
    version: str
    gate: Gate
    limit_hits: LimitHits
    dialects: ErrorDialects
    ignored: IgnoredParameters
    adapters: ServedAdapters
    tracer: Tracer | None = None  # None: there are no traces
    replicas: ReplicaControl | None = None  # None: there is no launcher with replicas
    implementation: str | None = None  # library that computes the model, `native` or `transformers`; None: unknown

    @property
    def style(self) -> Style:
        """The style of answers of /v1: OpenAI's or TGI's."""
        return style_of(self.config.http.tgi_dialect)

    def caller_of(self, request: Request) -> Caller:
        """The caller of a request. Its `note` adds a part of the request that has no effect to a header of the answer.
        Raises ValidationError."""
        return replace(self.callers.caller_of(request), note=partial(self.ignored.note_part, request))

    def without_tgi_dialect(self) -> "Services":
        """These services for routes of /v1 that TGI does not have: they ignore --tgi-dialect."""
        http = replace(self.config.http, tgi_dialect=False)
        return replace(self, config=replace(self.config, http=http))

    @property
    def served_name(self) -> str:
        """The name of the model that answers contain."""
        return self.config.served_model_name

    @property
    def system_fingerprint(self) -> str:
        return f"{self.version}-native"
