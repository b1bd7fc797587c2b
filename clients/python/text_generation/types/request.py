"""The body of `generate` and `generate_stream`, checked before it is sent."""

from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from text_generation.errors import ValidationError


class RequestModel(BaseModel):
    """Base of request bodies. A misspelt field, or a number that JSON cannot represent, is an error before the request
    is sent.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


# Further fields of an OpenAI body, sent as given.
ExtraBody = dict[str, Any] | None


class GrammarType(StrEnum):
    Json = "json"
    Regex = "regex"


class Grammar(RequestModel):
    type: GrammarType
    # A JSON schema (as text or as a dict), or a regular expression.
    value: str | dict[str, Any]


class Parameters(RequestModel):
    """The parameters of a generation; None: the server's default. Raises `text_generation.errors.ValidationError` for a
    value out of range.
    """

    do_sample: bool = False
    max_new_tokens: int = 20
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    return_full_text: bool = False
    stop: list[str] = []
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: float | None = None
    best_of: int | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    # Fields that TGI does not have; it ignores them.
    min_p: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos_token: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    adapter_id: str | None = None  # TGI has it, and its own client has not

    @field_validator(
        "repetition_penalty", "frequency_penalty", "temperature", "top_k", "truncate", "top_n_tokens", "best_of"
    )
    @classmethod
    def _is_strictly_positive(cls, value: float | None, field: ValidationInfo) -> float | None:
        if value is not None and value <= 0:
            raise ValidationError(f"`{field.field_name}` must be strictly positive")
        return value

    @field_validator("top_p", "typical_p")
    @classmethod
    def _is_inside_0_and_1(cls, value: float | None, field: ValidationInfo) -> float | None:
        if value is not None and not 0 < value < 1:
            raise ValidationError(f"`{field.field_name}` must be > 0.0 and < 1.0")
        return value

    @field_validator("seed")
    @classmethod
    def _is_not_negative(cls, value: int | None) -> int | None:
        if value is not None and value < 0:
            raise ValidationError("`seed` must be positive")
        return value

    @field_validator("grammar")
    @classmethod
    def _has_a_value(cls, value: Grammar | None) -> Grammar | None:
        if value is not None and not value.value:
            raise ValidationError(f"`value` cannot be empty for `{value.type}` grammar")
        return value

    @model_validator(mode="after")
    def _best_of_is_possible(self) -> Self:
        if self.best_of is None or self.best_of == 1:
            return self
        if self.seed is not None:
            raise ValidationError("`seed` must not be set when `best_of` is > 1")
        warpers = (self.temperature, self.top_k, self.top_p, self.typical_p)
        if not self.do_sample and all(warper is None for warper in warpers):
            raise ValidationError("you must use sampling when `best_of` is > 1")
        return self


class Request(RequestModel):
    inputs: str
    parameters: Parameters | None = None
    stream: bool = False

    @field_validator("inputs")
    @classmethod
    def _is_not_empty(cls, value: str) -> str:
        if not value:
            raise ValidationError("`inputs` cannot be empty")
        return value

    @model_validator(mode="after")
    def _streams_one_sequence(self) -> Self:
        if self.stream and self.parameters is not None and (self.parameters.best_of or 1) > 1:
            raise ValidationError("`best_of` != 1 is not supported when `stream` == True")
        return self
