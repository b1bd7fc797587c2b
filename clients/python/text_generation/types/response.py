"""Answers of `generate` and `generate_stream`."""

from enum import StrEnum

from pydantic import BaseModel


class FinishReason(StrEnum):
    Length = "length"
    EndOfSequenceToken = "eos_token"
    StopSequence = "stop_sequence"
    # The time limit of the request was reached, and the text ends there. TGI does not have this reason.
    Deadline = "deadline"


class InputToken(BaseModel):
    id: int
    text: str
    # None for the first token: nothing precedes it.
    logprob: float | None = None


class Token(BaseModel):
    id: int
    text: str
    logprob: float | None = None
    # Leave special tokens out when you concatenate texts.
    special: bool


class BestOfSequence(BaseModel):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    prefill: list[InputToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None


class Details(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    # None if the request was greedy.
    seed: int | None = None
    # Number of tokens of the prompt that the server had computed before; TGI lacks this field.
    cached_tokens: int | None = None
    # The LoRA adapter that was asked for; TGI lacks this field.
    adapter_id: str | None = None
    # An empty list unless the request has set `decoder_input_details`.
    prefill: list[InputToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = None
    # The sequences that were not chosen; only with `best_of` > 1.
    best_of_sequences: list[BestOfSequence] | None = None


class Response(BaseModel):
    generated_text: str
    details: Details


class StreamDetails(BaseModel):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None = None
    # Number of tokens of the prompt; servers before TGI 2 lack this field.
    input_length: int | None = None
    # Number of tokens of the prompt that the server had computed before; TGI lacks this field.
    cached_tokens: int | None = None
    # The LoRA adapter that was asked for; TGI lacks this field.
    adapter_id: str | None = None


class StreamResponse(BaseModel):
    # The token's number, from 1; servers before TGI 2 lack this field.
    index: int | None = None
    token: Token
    top_tokens: list[Token] | None = None
    # The whole text and the details come with the last token only.
    generated_text: str | None = None
    details: StreamDetails | None = None


class DeployedModel(BaseModel):
    model_id: str
    sha: str
