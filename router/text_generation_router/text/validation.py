"""Validates requests: TGI's checks in TGI's order with TGI's error texts. Returns the request for the scheduler."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace

from text_generation_router.errors import ValidationError
from text_generation_router.scheduling.request import GenerationRequest, Sampling
from text_generation_router.scheduling.share import Share
from text_generation_router.text.tokenization import TextTokenizer


@dataclass(frozen=True, slots=True)
class AskedParameters:
    """Parameters as the client gave them; None: not given. Floats are rounded to float32."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    greedy: bool = False  # take the most likely token, whatever the sampling parameters are
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    truncate: int | None = None
    watermark: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    ignore_eos_token: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds

    @property
    def asks_for_sampling(self) -> bool:
        return self.do_sample or any(
            value is not None for value in (self.temperature, self.top_k, self.top_p, self.typical_p)
        )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of one generation, not yet validated."""

    inputs: str
    parameters: AskedParameters
    add_special_tokens: bool = True


Check = tuple[bool, str]  # (whether the check fails, its error text)


class Validator:
    def __init__(self, tokenizer: TextTokenizer, limits: RequestLimits) -> None:
        self.limits = limits
        self._tokenizer = tokenizer

    def check_best_of(self, best_of: int | None) -> None:
        """Separate from the other checks: only routes that do not stream call it, before the request is counted."""
        most = self.limits.max_best_of
        given = best_of or 1
        _raise_first(
            [
                (given > 1 and most == 1, "`best_of` != 1 is not allowed for this endpoint"),
                (given > most, f"`best_of` must be > 0 and <= {most}. Given: {given}"),
            ]
        )

    async def validate(self, prompt: Prompt, share: Share) -> GenerationRequest:
        """Raises ValidationError for the first check that fails, and OverloadedError if too many texts of the tenant
        wait to be tokenized."""
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
            sampling(parameters),
            parameters.stop,
            parameters.ignore_eos_token,
            priority=parameters.priority or 0,
            namespace=(parameters.cache_salt or "",),
            timeout_s=parameters.timeout,
        )

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
    best_of = asked.best_of or 1
    yield best_of > 1 and not asked.asks_for_sampling, "you must use sampling when `best_of` is > 1"
    yield _not_positive(asked.temperature), "`temperature` must be strictly positive"
    yield _not_positive(asked.repetition_penalty), "`repetition_penalty` must be strictly positive"
    penalty = asked.frequency_penalty or 0.0
    yield not -2.0 <= penalty <= 2.0, "`frequency_penalty` must be >= -2.0 and <= 2.0"
    yield not _is_fraction(asked.top_p), "`top_p` must be > 0.0 and < 1.0"
    yield not _is_fraction(asked.typical_p), "`typical_p` must be > 0.0 and < 1.0"
    yield _not_positive(asked.top_k), "`top_k` must be strictly positive"
    yield _not_positive(asked.max_new_tokens), "`max_new_tokens` must be strictly positive"
    most, given = limits.max_stop_sequences, len(asked.stop)
    yield given > most, too_many_stops(most, given)
    # TGI lacks this check: there, an empty stop string ends every text at once.
    yield "" in asked.stop, "`stop` must not contain an empty string"
    yield best_of > 1 and asked.seed is not None, "`seed` must not be set when `best_of` > 1"
    most, given = limits.max_top_n_tokens, asked.top_n_tokens or 0
    yield given > most, f"`top_n_tokens` must be >= 0 and <= {most}. Given: {given}"
    yield _not_positive(asked.timeout), "`timeout` must be strictly positive"  # TGI has no timeout


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


def sampling(asked: AskedParameters) -> Sampling:
    """The parameters, with neutral values and a random seed where none was given."""
    if asked.greedy:
        asked = replace(asked, temperature=None, top_k=None, top_p=None, typical_p=None, do_sample=False)
    return Sampling(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=asked.top_k or 0,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        typical_p=1.0 if asked.typical_p is None else asked.typical_p,
        do_sample=asked.do_sample,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty or 0.0,
        watermark=asked.watermark,
        top_n_tokens=asked.top_n_tokens or 0,
    )


def _raise_first(checks: "Iterator[Check] | list[Check]") -> None:
    for fails, text in checks:
        if fails:
            raise ValidationError(text)


def _not_positive(value: float | None) -> bool:
    return value is not None and not value > 0


def _is_fraction(value: float | None) -> bool:
    return value is None or 0.0 < value < 1.0
