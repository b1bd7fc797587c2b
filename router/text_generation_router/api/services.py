"""The parts of the router that its HTTP routes use."""

from dataclasses import dataclass

from text_generation_router.api.body import Bodies
from text_generation_router.api.inference import Inference
from text_generation_router.config import RouterConfig
from text_generation_router.engine.protocol import Engine
from text_generation_router.http.caller import Callers
from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import LimitHits
from text_generation_router.metrics import Metrics
from text_generation_router.text.rendering import Renderer
from text_generation_router.text.tokenization import TextTokenizer


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
    model_sha: str | None
    version: str
    gate: Gate
    limit_hits: LimitHits

    @property
    def system_fingerprint(self) -> str:
        return f"{self.version}-native"
