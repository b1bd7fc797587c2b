"""What the routes need of `engine.Engine`, so that they can be tested without one."""

from collections.abc import AsyncIterator
from typing import Protocol

from text_generation_router.errors import InferenceError
from text_generation_router.scheduling.request import GenerationRequest, TokenEvent


class GenerationStream(Protocol):
    """Tokens of one request; the last event has `finish`. Raises InferenceError."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...

    async def __anext__(self) -> TokenEvent: ...

    @property
    def has_begun(self) -> bool: ...

    def cancel(self) -> None:
        """Idempotent."""

    def refuse(self, error: InferenceError) -> None:
        """Ends it; its reader gets `error`."""


class ModelInfo(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def device_type(self) -> str: ...


class TokenLimits(Protocol):
    @property
    def max_input_tokens(self) -> int: ...

    @property
    def max_total_tokens(self) -> int: ...

    @property
    def max_batch_total_tokens(self) -> int: ...


class Engine(Protocol):
    """What the routes need of engine.Engine."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def limits(self) -> TokenLimits: ...

    def submit(self, request: GenerationRequest) -> GenerationStream: ...

    def retry_after_s(self) -> int:
        """When a request that is refused now is worth sending again."""

    async def is_healthy(self) -> bool: ...
