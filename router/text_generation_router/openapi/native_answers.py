"""The answers of the native routes, as the OpenAPI document describes them. The routes write their JSON themselves;
tests hold the two together.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from text_generation_router.text.tokens.events import FinishReason

Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0, description="The token's id in the vocabulary.")]
Logprob = Annotated[float | None, Field(description="Log-probability of the token; null: not known.")]


class AnswerJson(BaseModel):
    """A part of an answer. It has no fields besides those listed."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class TokenJson(AnswerJson):
    """A generated token."""

    id: TokenId
    text: str
    """The text that the token adds."""
    logprob: Logprob
    special: bool
    """Whether the token is special, such as the end of the text."""


class PromptTokenJson(AnswerJson):
    """A token of the prompt."""

    id: TokenId
    text: str
    """The token's text."""
    logprob: Logprob


class FinishJson(AnswerJson):
    """The end of a text."""

    finish_reason: FinishReason
    """Why the text ended: `length`, an end token, a stop string, or the request's deadline."""
    generated_tokens: Count
    """Number of generated tokens."""
    seed: int | None
    """The seed that the tokens were drawn with; null: the most likely tokens were taken."""
    cached_tokens: Count
    """Number of the prompt's tokens that the prefix cache had."""
    adapter_id: str | None = None
    """The LoRA adapter that the request has asked for."""


class SequenceDetailsJson(FinishJson):
    """What happened while one text was generated."""

    prefill: list[PromptTokenJson]
    """The prompt's tokens, if `decoder_input_details` is true and the server has `--enable-prefill-logprobs`."""
    tokens: list[TokenJson]
    """The generated tokens."""
    top_tokens: list[list[TokenJson]] | None = None
    """The most likely tokens at the place of each token, if `top_n_tokens` is given."""


class OtherSequenceJson(SequenceDetailsJson):
    """A text of `best_of` that was not the best."""

    generated_text: str
    """The text."""


class DetailsJson(SequenceDetailsJson):
    """What happened while the text was generated."""

    best_of_sequences: list[OtherSequenceJson] | None = None
    """The other texts, if `best_of` is more than 1."""


class GenerateJson(AnswerJson):
    """A generated text."""

    generated_text: str
    """The text; with `return_full_text` the prompt stands before it."""
    details: DetailsJson | None = None
    """Only if `details` or `decoder_input_details` is true."""


class EndDetailsJson(FinishJson):
    """The end of a stream's text."""

    input_length: Count
    """Number of the prompt's tokens."""


class TokenEventJson(AnswerJson):
    """One event of a stream: a token. The last one has the whole text."""

    index: Annotated[int, Field(ge=1)]
    """Number of the event, from 1."""
    token: TokenJson
    """The token."""
    top_tokens: list[TokenJson] | None = None
    """The most likely tokens at its place, if `top_n_tokens` is given."""
    generated_text: str | None
    """The whole text, in the last event."""
    details: EndDetailsJson | None
    """In the last event, if `details` is true."""


class ErrorJson(AnswerJson):
    """An error of a native route; in a stream, an event."""

    error: str
    """What is wrong, why, and what to do."""
    error_type: str
    """The kind of error."""


class SpanJson(AnswerJson):
    """A token of a text."""

    id: TokenId
    text: str
    """The part of the text that the token covers."""
    start: Count
    """The first byte (UTF-8) that the token covers."""
    stop: Count
    """The byte behind the last one; equal to `start` for a special token."""


class ChatSpansJson(AnswerJson):
    """The prompt of a chat, and its tokens."""

    tokenize_response: list[SpanJson]
    """The prompt's tokens."""
    templated_text: str
    """The prompt that the chat template makes."""


class DetokenizedJson(AnswerJson):
    """The text of token ids."""

    prompt: str
    """The text."""


class PredictionsJson(AnswerJson):
    """The texts of Vertex AI's instances."""

    predictions: list[str]
    """A text for each instance, in order."""


class VersionJson(AnswerJson):
    """The server's version."""

    version: str
    """The version."""


class ReplicaJson(AnswerJson):
    """One replica: an engine and its shards."""

    name: str
    """The name, as in log lines."""
    state: Literal["pending", "starting", "ready", "draining", "failed"]
    """What the replica does; pending: no machine has room for it; failed: it waits for its next start."""
    endpoint: str | None
    """The address to which fronts connect; null while there is none."""
    reason: str
    """Why the replica is not ready; empty: there is nothing to say."""


class ReplicasJson(AnswerJson):
    """The replicas of the server."""

    wanted: Count
    """Number of replicas that there are to be."""
    replicas: list[ReplicaJson]
    """The replicas that there are."""


class InfoJson(AnswerJson):
    """What is served, and its limits."""

    model_id: str
    """The model's directory or hub id."""
    model_sha: str | None
    """The commit of the model's files on the hub; null: not known."""
    model_pipeline_tag: None
    """Always null; older versions of TGI have the field."""
    max_concurrent_requests: Count
    """Most texts that are generated or wait at once."""
    max_best_of: Count
    """Most texts of one request's `best_of`."""
    max_stop_sequences: Count
    """Most stop strings of one request."""
    max_input_tokens: Count
    """Most tokens of a prompt."""
    max_total_tokens: Count
    """Largest number of tokens of a prompt and its text together."""
    validation_workers: Count
    """Number of threads that tokenize."""
    max_client_batch_size: Count
    """Most prompts of one request."""
    router: Literal["text-generation-router"]
    """The program."""
    version: str
    """The server's version."""
    sha: None
    """Always null; older versions of TGI have the field."""
    docker_label: None
    """Always null; older versions of TGI have the field."""
    sampling_defaults: dict[str, float | bool]
    """Sampling parameters of the model's generation_config.json, for requests that leave the field out; empty without
    `--generation-config model`."""
    model_implementation: Literal["native", "transformers"] | None
    """What computes the model's layers: this server's own, or those of transformers; null if its files do not tell."""
    model_dtype: str
    """The number format in which the model is computed."""
    model_device_type: str
    """The kind of device that computes it."""
    max_input_length: Count
    """The older name of `max_input_tokens`."""
    max_batch_total_tokens: Count
    """Most tokens of all texts that are computed at once."""
    waiting_served_ratio: float
    """Has no effect; older versions of TGI have the field."""
    max_waiting_tokens: Count
    """Has no effect; older versions of TGI have the field."""
    max_batch_size: Count | None
    """Most texts that are computed at once; null: as many as fit."""
