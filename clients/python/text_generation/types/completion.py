"""Bodies and answers of `completion`."""

from typing import Any

from pydantic import BaseModel

from text_generation.types.request import ExtraBody, RequestModel


class CompletionRequest(RequestModel):
    model: str
    prompt: str
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    extra_body: ExtraBody = None


class CompletionComplete(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    # In a stream, "" (TGI) or None (OpenAI) in all chunks but the last.
    finish_reason: str | None = None


class Completion(BaseModel):
    """A whole answer, or one chunk of a stream: both have the same fields."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionComplete]
    usage: dict[str, Any] | None = None
