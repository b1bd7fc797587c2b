"""What a request asks of the engine, in token ids, and why it ended."""

from dataclasses import dataclass, field
from enum import StrEnum

from text_generation_common.sampling import Sampling
from text_generation_router.scheduling.share import Share

Namespace = tuple[str, ...]


class FinishReason(StrEnum):
    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    DEADLINE = "deadline"  # the request's time ran out


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that has been validated and tokenized. `len(input_ids) + max_new_tokens` fits the server's limits."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    share: Share = field(default_factory=Share)  # the share of the server that the request is charged to
    priority: int = 0  # lower goes first, as in vLLM
    namespace: Namespace = ()  # prompts of different namespaces share no cached prefix
    timeout_s: float | None = None  # seconds from submission until the engine ends the request
