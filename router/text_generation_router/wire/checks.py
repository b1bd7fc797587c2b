"""Checks of a Submit. Fronts send checked values, so a value that fails here comes from another program."""

from dataclasses import fields
from math import isfinite

from text_generation_common.sampling import Sampling
from text_generation_router.wire.arrays import Array
from text_generation_router.wire.errors import WireError

# The most entries of a list of tokens, as in proto/generate.proto, and the most top tokens.
MAX_LISTED, MAX_ENDS, MAX_TOP = 1024, 2048, 1024
MAX_GRAMMAR_BYTES = 2**20


def check_ids(name: str, ids: Array, vocab_size: int) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise WireError(f"`{name}` has a token outside of the vocabulary of {vocab_size}")


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises WireError for a value that no checked request has."""
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if isinstance(value, float) and not isfinite(value):
            raise WireError(f"`{field.name}` is {value}")
    in_range = (
        sampling.temperature > 0
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and 0 < sampling.typical_p <= 1
        and sampling.repetition_penalty > 0
        and sampling.top_n_tokens <= MAX_TOP
        and len(sampling.grammar) <= MAX_GRAMMAR_BYTES
        and len(sampling.logit_bias) <= MAX_LISTED
        and len(sampling.allowed_token_ids) <= MAX_LISTED
        and sum(map(len, sampling.bad_words_ids)) <= MAX_LISTED
        and all(sampling.bad_words_ids)
        and len(sampling.end_token_ids) <= MAX_ENDS
    )
    if not in_range:
        raise WireError("a sampling parameter is out of its range")
    words = (token for word in sampling.bad_words_ids for token in word)
    biased = [token for token, bias in sampling.logit_bias if isfinite(bias)]
    listed = (*biased, *sampling.allowed_token_ids, *sampling.end_token_ids, *words)
    if len(biased) < len(sampling.logit_bias) or any(token >= vocab_size for token in listed):
        raise WireError("a list of tokens has a token outside of the vocabulary, or a bias is not finite")
