"""The bodies that the native routes accept. Parsed once per request; also the source of the API's documentation."""

from typing import Annotated, Any

from pydantic import Field

from text_generation_router.api.common.fields import (
    F32,
    I32,
    STOP_LIMIT,
    U32,
    U64,
    Body,
    Ids,
    LogitBias,
    Strings,
    TokenIds,
    listed,
)
from text_generation_router.api.common.form_fields import NativeGrammar, asked_grammar
from text_generation_router.text.tokens.token_choice import MAX_LISTED
from text_generation_router.text.validation import AskedParameters, AskedSampling

Priority = Annotated[
    I32 | None, Field(description="Among one tenant's waiting requests, the lowest priority goes first. Default: 0.")
]
Timeout = Annotated[
    F32 | None,
    Field(
        description="Seconds from the receipt of the request. A text that is not complete by then ends there, with the"
        " finish reason `deadline`. If `X-Request-Timeout` is given as well, the shorter time applies."
    ),
]

CacheSalt = Annotated[
    str | None,
    Field(
        max_length=128,
        description="Requests share cached prefixes only if they have the same API key and the same salt. A client that"
        " does not know the salt cannot tell from an answer's speed which prompts were sent before. Default: no salt."
        " Requests without a salt share prefixes within their API key or, if the server has no keys, with each other.",
    ),
]
MinTokens = Annotated[
    U32 | None,
    Field(
        description="Until the output has this many tokens, no end token is chosen, and no stop string ends the text."
    ),
]


class SamplingFields(Body):
    """The fields that the native routes and OpenAI's have in common for the parameters of `Sampling`."""

    temperature: F32 | None = None
    """The logits are divided by this number before a token is drawn; > 0. On /v1 0 means the most likely tokens.
    Default: 1."""
    repetition_penalty: F32 | None = None
    """Makes tokens of the prompt and of the output less likely if > 1; > 0. Default: 1."""
    frequency_penalty: F32 | None = None
    """Subtracted from a token's logit for each time that the output has the token. -2 to 2; 0: off."""
    top_k: I32 | None = None
    """A token is drawn from this many most likely tokens. Default: all."""
    top_p: F32 | None = None
    """A token is drawn from the most likely tokens that together have this probability; > 0 and < 1. On /v1 0 means the
    most likely token, and 1 all tokens. Default: all."""
    typical_p: F32 | None = None
    """A token is drawn from the most typical tokens that together have this probability; > 0 and < 1. On /v1 1 means
    all tokens. Default: all."""
    seed: U64 | None = None
    """Requests with the same seed draw the same tokens. Default: a random seed."""
    min_p: Annotated[
        F32 | None,
        Field(description="Excludes tokens that are less likely than this share of the most likely token. 0: off."),
    ] = None
    presence_penalty: Annotated[
        F32 | None,
        Field(description="Subtracted from the logit of each token that the output has already. -2 to 2; 0: off."),
    ] = None
    logit_bias: Annotated[
        LogitBias | None,
        Field(
            description="Numbers from -100 to 100 that are added to the logits of tokens, by token id, for at most"
            f" {MAX_LISTED} tokens.",
            examples=[{"262": -100}],
        ),
    ] = None
    allowed_token_ids: Annotated[
        Ids | None,
        listed("allowed_token_ids"),
        Field(description=f"The only tokens that can be chosen: 1 to {MAX_LISTED} token ids. Default: all tokens."),
    ] = None
    bad_words: Annotated[
        Strings | None,
        listed("bad_words"),
        Field(
            description="Words that the output does not contain: no token completes the tokens of a word, with or"
            f" without a space before it. The tokens of all words are at most {MAX_LISTED}."
        ),
    ] = None
    stop_token_ids: Annotated[
        Ids | None,
        listed("stop_token_ids"),
        Field(
            description="Tokens that end the text, besides the model's own end tokens, and also if these are ignored."
            f" At most {MAX_LISTED} token ids."
        ),
    ] = None

    def sampling_values(self) -> dict[str, Any]:
        """All fields but `grammar`; the values of those that `Sampling` has in its types."""
        values = dict(vars(self))
        values.pop("grammar", None)  # a grammar is checked before it is part of a `Sampling`
        if self.logit_bias is not None:
            values["logit_bias"] = tuple((int(token_id), value) for token_id, value in self.logit_bias.items())
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = tuple(self.allowed_token_ids)
        return values


class GenerateParameters(SamplingFields):
    best_of: U64 | None = None
    """Number of texts that are generated; the most likely one is the answer. More than 1 needs sampling."""
    do_sample: bool = False
    """Whether tokens are drawn. If false, and no other field needs drawn tokens, the most likely token is taken."""
    max_new_tokens: U32 | None = None
    """Maximum number of new tokens. Default: as many as fit."""
    return_full_text: bool | None = None
    """Whether the text begins with the prompt. Default: false; on `/` true."""
    stop: Annotated[Strings, STOP_LIMIT] = Field(default_factory=list)
    """The text ends after the first of these strings."""
    truncate: U64 | None = None
    """Keeps only this many tokens of the prompt, the last ones."""
    watermark: bool = False
    """Whether the choice of tokens marks the text with a watermark."""
    details: bool = False
    """Adds `details` to the answer."""
    decoder_input_details: bool = False
    """Adds the prompt's tokens to the details; with their log-probabilities if the server has `--enable-prefill-
    logprobs`."""
    top_n_tokens: U32 | None = None
    """Adds this many most likely tokens at the place of each token."""
    ignore_eos_token: bool = False
    """Whether the text goes on after an end token."""
    min_new_tokens: MinTokens = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    adapter_id: str | None = None
    """The LoRA adapter that changes the model for this request, by its name in the server's list. Default: none."""
    grammar: NativeGrammar = None

    def sampling_parameters(self) -> AskedParameters:
        values = self.sampling_values()
        if "do_sample" not in self.model_fields_set:
            del values["do_sample"]  # the model's own default may differ (--generation-config)
        return AskedParameters(
            AskedSampling.of(values),
            best_of=self.best_of,
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            truncate=self.truncate,
            ignore_eos_token=self.ignore_eos_token,
            priority=self.priority,
            timeout=self.timeout,
            cache_salt=self.cache_salt,
            adapter_id=self.adapter_id,
            grammar=asked_grammar(self),
        )


def sampled_by_default() -> GenerateParameters:
    """As in TGI: without a `parameters` field tokens are sampled, with `"parameters": {}` decoding is greedy."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(Body):
    inputs: str
    """The prompt."""
    parameters: GenerateParameters = Field(default_factory=sampled_by_default)
    """How to generate. Without this field tokens are drawn; with `{}` they are not."""


class CompatGenerateRequest(GenerateRequest):
    stream: bool = False
    """Whether the answer is a stream."""


class DetokenizeRequest(Body):
    tokens: TokenIds
    """The token ids of a text."""
    skip_special_tokens: bool = True
    """Whether the text is without special tokens."""
    model: str | None = None
    """Has no effect."""
