"""Validates requests: TGI's checks in TGI's order with TGI's error texts. Returns the request for the scheduler."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from text_generation_common.flags.requests import RequestFlags
from text_generation_common.sampling import NAMES, WARPERS, Sampling
from text_generation_router.errors import ValidationError
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.share import Share
from text_generation_router.text.token_choice import Check, id_checks, ids_of_bad_words, leaves_a_token, word_checks
from text_generation_router.text.tokenization import TextTokenizer


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """Sampling parameters as the client gave them. Floats are rounded to float32."""

    values: Sampling = field(default_factory=Sampling)  # a neutral value for each parameter that was not given
    given: frozenset[str] = frozenset()  # names of the parameters that were given
    greedy: bool = False  # True: always take the most likely token, whatever the other parameters are

    @classmethod
    def of(cls, values: Mapping[str, Any], greedy: bool = False) -> "AskedSampling":
        """Makes it from `values`, which may have other names too. A value of None was not given."""
        given = {name: values[name] for name in NAMES if values.get(name) is not None}
        return cls(Sampling(**given), frozenset(given), greedy)

    @property
    def asks_for_sampling(self) -> bool:
        return self.values.do_sample or not self.given.isdisjoint(WARPERS)


@dataclass(frozen=True, slots=True)
class AskedParameters:
    """Parameters as the client gave them; None: not given."""

    sampling: AskedSampling = field(default_factory=AskedSampling)
    best_of: int | None = None
    max_new_tokens: int | None = None
    takes_no_tokens: bool = False  # whether `max_new_tokens` may be 0, for an answer that has the prompt itself
    prompt_logprobs: int | None = None  # most likely tokens with each log-probability of the prompt; None: none wanted
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    truncate: int | None = None
    ignore_eos_token: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class RequestLimits:
    asked: RequestFlags  # the flags that limit what a request may ask for
    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of one generation, not yet validated."""

    inputs: str
    parameters: AskedParameters
    add_special_tokens: bool = True


class Validator:
    def __init__(self, tokenizer: TextTokenizer, limits: Callable[[], RequestLimits]) -> None:
        """`limits` returns the limits of the current shards."""
        self._limits = limits
        self._tokenizer = tokenizer

    @property
    def limits(self) -> RequestLimits:
        return self._limits()

    def check_best_of(self, best_of: int | None) -> None:
        """Checks best_of. Separate from the other checks: only routes that do not stream call it, before the request is
        counted.
        """
        most = self.limits.asked.max_best_of
        given = best_of or 1
        _raise_first(
            [
                (given > 1 and most == 1, "`best_of` != 1 is not allowed for this endpoint"),
                (given > most, f"`best_of` must be > 0 and <= {most}. Given: {given}"),
            ]
        )

    async def validate(self, prompt: Prompt, share: Share) -> GenerationRequest:
        """The request for the scheduler. Raises ValidationError for the first check that fails, and OverloadedError if
        too many texts of the tenant wait to be tokenized.
        """
        limits, parameters = self.limits, prompt.parameters
        _raise_first(parameter_checks(parameters, limits))
        _raise_first(input_checks(prompt, limits))
        self._refuse_certainly_too_long(prompt)
        ids = await self._tokenizer.encode(
            prompt.inputs, prompt.add_special_tokens, share, keep_last=parameters.truncate, most=limits.max_input_tokens
        )
        length = ids.count
        if not ids.is_exact:
            raise _too_long(limits.max_input_tokens, f"at least {length}")
        wanted = parameters.max_new_tokens
        if wanted is None:
            wanted = max(limits.max_total_tokens - length, 0)
        _raise_first(length_checks(length, wanted, limits))
        return GenerationRequest(
            ids.values,
            wanted,
            await self._sampling(parameters, wanted, limits, share),
            parameters.ignore_eos_token,
            priority=parameters.priority or 0,
            namespace=(parameters.cache_salt or "",),
            timeout_s=parameters.timeout,
            prompt_logprobs=parameters.prompt_logprobs,
            stop_token_ids=frozenset(parameters.stop_token_ids),
        )

    async def _sampling(
        self, parameters: AskedParameters, max_new_tokens: int, limits: RequestLimits, share: Share
    ) -> Sampling:
        """The sampling parameters, with the token ids that words and ends of text stand for."""
        result = sampling(parameters.sampling)
        if parameters.bad_words:
            ids = await ids_of_bad_words(self._tokenizer, parameters.bad_words, limits.vocab_size, share)
            result = replace(result, bad_words_ids=ids)
        if result.min_new_tokens:
            ends = {*parameters.stop_token_ids, *(() if parameters.ignore_eos_token else limits.eos_token_ids)}
            result = replace(result, end_token_ids=tuple(sorted(i for i in ends if i < limits.vocab_size)))
        _raise_first(choice_checks(result, max_new_tokens, limits.vocab_size))
        return result

    def _refuse_certainly_too_long(self, prompt: Prompt) -> None:
        """Refuses a prompt that is certainly too long without tokenizing it: a prompt has at least
        (its characters / characters of the longest token) tokens. A truncated prompt always fits."""
        longest = self._tokenizer.max_chars_per_token
        if longest is None or prompt.parameters.truncate is not None:
            return
        fewest = -(-len(prompt.inputs) // longest)
        if fewest > self.limits.max_input_tokens:
            raise _too_long(self.limits.max_input_tokens, f"at least {fewest}")


def parameter_checks(asked: AskedParameters, limits: RequestLimits) -> Iterator[Check]:
    best_of, given, values = asked.best_of or 1, asked.sampling.given, asked.sampling.values
    yield best_of > 1 and not asked.sampling.asks_for_sampling, "you must use sampling when `best_of` is > 1"
    yield not values.temperature > 0, "`temperature` must be strictly positive"
    yield not values.repetition_penalty > 0, "`repetition_penalty` must be strictly positive"
    yield not -2.0 <= values.frequency_penalty <= 2.0, "`frequency_penalty` must be >= -2.0 and <= 2.0"
    yield not -2.0 <= values.presence_penalty <= 2.0, "`presence_penalty` must be >= -2.0 and <= 2.0"
    yield "top_p" in given and not 0.0 < values.top_p < 1.0, "`top_p` must be > 0.0 and < 1.0"
    yield "typical_p" in given and not 0.0 < values.typical_p < 1.0, "`typical_p` must be > 0.0 and < 1.0"
    yield not 0.0 <= values.min_p <= 1.0, "`min_p` must be >= 0.0 and <= 1.0"
    yield "top_k" in given and not values.top_k > 0, "`top_k` must be strictly positive"
    is_none_taken = asked.max_new_tokens == 0 and asked.takes_no_tokens
    yield _not_positive(asked.max_new_tokens) and not is_none_taken, "`max_new_tokens` must be strictly positive"
    most, stops = limits.asked.max_stop_sequences, len(asked.stop)
    yield stops > most, too_many_stops(most, stops)
    # TGI lacks this check: there, an empty stop string ends every text at once.
    yield "" in asked.stop, "`stop` must not contain an empty string"
    yield best_of > 1 and "seed" in given, "`seed` must not be set when `best_of` > 1"
    most = limits.asked.max_top_n_tokens
    yield values.top_n_tokens > most, f"`top_n_tokens` must be >= 0 and <= {most}. Given: {values.top_n_tokens}"
    given_tops = asked.prompt_logprobs or 0  # TGI lists no most likely tokens with those of a prompt
    yield not 0 <= given_tops <= most, f"`prompt_logprobs` must be >= 0 and <= {most}. Given: {given_tops}"
    yield _not_positive(asked.timeout), "`timeout` must be strictly positive"  # TGI has no timeout
    yield from list_checks(asked, limits.vocab_size)


def list_checks(asked: AskedParameters, vocab_size: int) -> Iterator[Check]:
    values = asked.sampling.values
    if values.logit_bias:
        yield from id_checks("logit_bias", (token_id for token_id, _ in values.logit_bias), vocab_size)
        outside = any(not -100.0 <= value <= 100.0 for _, value in values.logit_bias)
        yield outside, "`logit_bias` must have values >= -100.0 and <= 100.0"
    yield from id_checks("stop_token_ids", asked.stop_token_ids, vocab_size)
    nothing = "allowed_token_ids" in asked.sampling.given and not values.allowed_token_ids
    yield nothing, "`allowed_token_ids` must not be empty"
    yield from id_checks("allowed_token_ids", values.allowed_token_ids, vocab_size)
    if asked.bad_words:
        yield from word_checks(asked.bad_words)


def choice_checks(chosen: Sampling, max_new_tokens: int, vocab_size: int) -> Iterator[Check]:
    least = chosen.min_new_tokens
    yield (
        least > max_new_tokens,
        f"`min_new_tokens` must be <= `max_new_tokens`. Given: {least} and {max_new_tokens}",
    )
    if chosen.allowed_token_ids or chosen.bad_words_ids or chosen.end_token_ids:
        yield (
            not leaves_a_token(chosen, vocab_size),
            "`allowed_token_ids`, `bad_words` and `min_new_tokens` leave no token that can be chosen",
        )


def too_many_stops(most: int, given: int) -> str:
    return f"`stop` supports up to {most} stop sequences. Given: {given}"


def input_checks(prompt: Prompt, limits: RequestLimits) -> Iterator[Check]:
    yield not prompt.inputs, "`inputs` cannot be empty"
    truncate, most = prompt.parameters.truncate, limits.max_input_tokens
    out_of_range = truncate is not None and not 0 < truncate <= most
    yield out_of_range, f"`truncate` must be strictly positive and less than {most}. Given: {truncate}"


def length_checks(length: int, wanted: int, limits: RequestLimits) -> Iterator[Check]:
    total, most = limits.max_total_tokens, limits.max_input_tokens
    yield (
        length + wanted > total,
        f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
        f"Given: {length} `inputs` tokens and {wanted} `max_new_tokens`",
    )
    yield length > most, f"`inputs` must have less than {most} tokens. Given: {length}"
    # TGI lacks this check. It fails only with tokenizers that delete text, for the prompt "\n" for example.
    yield length == 0, "`inputs` has no tokens"


def _too_long(most: int, given: str) -> ValidationError:
    return ValidationError(f"`inputs` must have less than {most} tokens. Given: {given}")


def sampling(asked: AskedSampling) -> Sampling:
    """The sampling parameters, with a random seed if none was given. Only this function decides whether tokens are
    drawn: as in TGI, a request for any warper is a request for sampling.
    """
    values = asked.values.without_warpers() if asked.greedy else asked.values
    seed = values.seed if "seed" in asked.given else secrets.randbits(63)
    draws = not asked.greedy and (values.do_sample or values.warps)
    return replace(values, seed=seed, do_sample=draws)


def _raise_first(checks: "Iterator[Check] | list[Check]") -> None:
    for fails, text in checks:
        if fails:
            raise ValidationError(text)


def _not_positive(value: float | None) -> bool:
    return value is not None and not value > 0
