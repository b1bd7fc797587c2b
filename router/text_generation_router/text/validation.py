"""Validates requests: TGI's checks in TGI's order with TGI's error texts. Returns the request for the scheduler."""

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from text_generation_common.flags.requests import RequestFlags
from text_generation_common.sampling import NAMES, WARPERS, Sampling
from text_generation_router.errors import (
    GrammarError,
    InferenceError,
    TemplateError,
    ToolError,
    TooLongError,
    ValidationError,
)
from text_generation_router.scheduling.request import GenerationRequest, Share
from text_generation_router.text.grammars.asked import AskedGrammar
from text_generation_router.text.grammars.checking import GrammarChecker
from text_generation_router.text.grammars.forms import ChatForm, WantedGrammar
from text_generation_router.text.tokens.output import TextRules
from text_generation_router.text.tokens.pieces import PieceReader
from text_generation_router.text.tokens.token_choice import Check, choice_checks, ids_of_bad_words, list_checks
from text_generation_router.text.tokens.tokenization import COUNTED, Ids, TextTokenizer

PENALTY = "repetition_penalty"


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """Sampling parameters as the client gave them. Floats are rounded to float32."""

    values: Sampling = field(default_factory=Sampling)  # a neutral value for each parameter that was not given
    given: frozenset[str] = frozenset()  # names of the parameters that were given
    greedy: bool = False  # True: always take the most likely token, whatever the other parameters are
    # `given`, and the names of parameters whose given value has no effect.
    stated: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, values: Mapping[str, Any], greedy: bool = False, stated: Mapping[str, Any] | None = None
    ) -> "AskedSampling":
        """Makes it from `values`, which may have other names too. A value of None was not given. `stated`: the values
        of the request, if `values` lacks some that have no effect."""
        given = {name: values[name] for name in NAMES if values.get(name) is not None}
        names = frozenset(name for name, value in (stated or {}).items() if value is not None)
        return cls(Sampling(**given), frozenset(given), greedy, names.union(given))

    @property
    def asks_for_sampling(self) -> bool:
        return self.values.do_sample or not self.given.isdisjoint(WARPERS)

    def filled(self, defaults: Mapping[str, Any]) -> "AskedSampling":
        """The same with the model's `defaults` where the request leaves the field out. A request for the most likely
        tokens, and natively one that asks for no sampling where the model does not either, takes the penalty only.
        A `top_p` of 0 leaves the most likely token alone, as in transformers."""
        greedy = self.greedy or ("top_p" not in self.stated and defaults.get("top_p") == 0)
        draws = self.asks_for_sampling or ("do_sample" not in self.stated and bool(defaults.get("do_sample")))
        usable = {*WARPERS, "do_sample", PENALTY} if draws and not greedy else {PENALTY}
        left_out = {name: defaults[name] for name in usable & defaults.keys() - self.stated}
        return replace(self, greedy=greedy, values=replace(self.values, **left_out))


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
    adapter_id: str | None = None  # the name of a LoRA adapter
    timeout: float | None = None  # seconds
    keeps_last: bool = True  # whether `truncate` keeps the last tokens of the prompt, and not the first
    keeps_stop: bool = True  # see TextRules
    skips_special: bool = True
    markers: frozenset[str] | None = None
    is_length_last: bool = False  # whether any other reason of an end goes before the length, as in OpenAI
    returns_ids: bool = False  # whether the answer has the prompt's token ids
    max_top_n_tokens: int | None = None  # the route's own limit, where it has one
    grammar: AskedGrammar | None = None
    form: ChatForm | None = None  # what surrounds a chat's answer; None: nothing

    @property
    def wanted_grammar(self) -> WantedGrammar:
        return WantedGrammar(self.grammar, self.form)

    def end_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """The tokens that end the text. `eos_token_ids`: the model's."""
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos_token else eos_token_ids)))

    def text_rules(self, eos_token_ids: Sequence[int]) -> TextRules:
        end_ids = self.end_ids(eos_token_ids) if self.is_length_last else None
        return TextRules(self.stop, self.keeps_stop, self.skips_special, self.markers, end_ids)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    asked: RequestFlags  # the flags that limit what a request may ask for
    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    grammar_refusal: str = ""  # why the shards refuse every grammar; "": they serve grammars
    adapters: Mapping[str, str] = field(default_factory=dict)  # digests of LoRA adapters, by their names


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of one or several generations, not yet validated."""

    inputs: str  # "" if `ids` are given
    parameters: AskedParameters
    add_special_tokens: bool = True
    ids: tuple[int, ...] | None = None  # the tokens, if the client sent tokens and no text
    copies: int = 1  # number of generations
    names: Mapping[str, str] = field(default_factory=dict)  # what the route calls a field that TGI calls otherwise
    reader: Callable[[], PieceReader] | None = None  # makes a reader for each text; None: texts are not divided


# As in TGI, of the tokens that a request asks for at most this many must fit behind its prompt.
MUST_FIT = 1024
# Most names that an error tells, and most characters of a name that a client gave.
MAX_NAMED_ADAPTERS, MAX_NAMED_CHARS = 16, 64


class Validator:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        grammars: GrammarChecker,
        limits: Callable[[], RequestLimits],
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`limits` returns the limits of the current shards. `defaults`: see `read_defaults`."""
        self._limits = limits
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._grammars = grammars

    @property
    def limits(self) -> RequestLimits:
        return self._limits()

    def check_best_of(self, best_of: int | None) -> None:
        """Checks best_of. Separate from the other checks: only routes that do not stream call it, before the request is
        counted.
        """
        most = self.limits.asked.max_best_of
        given = best_of or 1
        raise_first(
            [
                (given > 1 and most == 1, "best_of", "!= 1 is not allowed for this endpoint"),
                (given > most, "best_of", f"must be > 0 and <= {most}. Given: {given}"),
            ]
        )

    async def validate(
        self, prompt: Prompt, share: Share, note: Callable[[str], None] = lambda _: None
    ) -> GenerationRequest:
        """The request for the scheduler. `note` is told the name of each part of the request that is left out. Raises
        ValidationError for the first check that fails, and OverloadedError if
        too many texts of the tenant wait to be tokenized.
        """
        with renaming(prompt.names):
            return await self._validate(prompt, share, note)

    async def _validate(self, prompt: Prompt, share: Share, note: Callable[[str], None]) -> GenerationRequest:
        limits, parameters = self.limits, prompt.parameters
        parameters = replace(parameters, sampling=parameters.sampling.filled(self._defaults))
        raise_first(parameter_checks(parameters, limits))
        raise_first(input_checks(prompt, limits))
        ids = await self._ids(prompt, limits, share)
        raise_first(length_checks(ids, parameters.max_new_tokens, limits), TooLongError)
        # More tokens than fit may be asked for, as in TGI: the text then ends where the window ends.
        fitting = limits.max_total_tokens - ids.count
        wanted = fitting if parameters.max_new_tokens is None else parameters.max_new_tokens
        adapter = limits.adapters[parameters.adapter_id] if parameters.adapter_id is not None else ""
        sampling = await self._sampling(parameters, min(wanted, fitting), limits, share)
        return GenerationRequest(
            ids.values,
            min(wanted, fitting),
            replace(sampling, grammar=await self._grammar(prompt, limits, share, note)),
            parameters.ignore_eos_token,
            priority=parameters.priority or 0,
            # Keys and values that an adapter has made belong to it alone.
            namespace=(parameters.cache_salt or "", *((adapter,) if adapter else ())),
            timeout_s=parameters.timeout,
            prompt_logprobs=parameters.prompt_logprobs,
            stop_token_ids=frozenset(parameters.stop_token_ids),
            adapter=adapter,
            adapter_name=parameters.adapter_id or "",
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
            ends = parameters.end_ids(limits.eos_token_ids)
            result = replace(result, end_token_ids=tuple(sorted(i for i in ends if i < limits.vocab_size)))
        raise_first(choice_checks(result, max_new_tokens, limits.vocab_size))
        return result

    async def _grammar(self, prompt: Prompt, limits: RequestLimits, share: Share, note: Callable[[str], None]) -> str:
        parameters = prompt.parameters
        if parameters.grammar is None and parameters.form is None:
            return ""
        field = parameters.grammar.field if parameters.grammar else "tools"
        if limits.asked.disable_grammar_support:
            raise ValidationError("grammar is not supported", field)
        if limits.grammar_refusal:
            raise GrammarError(field, limits.grammar_refusal)
        wanted = parameters.wanted_grammar
        made = await self._grammars.grammar(wanted, share)
        for place, name in made.left_out:
            place = place or wanted.field
            note(f"{prompt.names.get(place, place)}.{name}")
        return made.grammar

    async def _ids(self, prompt: Prompt, limits: RequestLimits, share: Share) -> Ids:
        """The prompt's tokens; of a prompt that is too long perhaps their number only."""
        parameters = prompt.parameters
        if prompt.ids is not None:
            return Ids.of(_truncated(prompt.ids, parameters))
        fewest = self._fewest_tokens(prompt)
        if fewest > COUNTED * limits.max_input_tokens:
            return Ids((), fewest, is_exact=False)
        keeps_first = parameters.truncate is not None and not parameters.keeps_last
        keep_last = None if keeps_first else parameters.truncate
        most = None if keeps_first else limits.max_input_tokens
        ids = await self._tokenizer.encode(
            prompt.inputs, prompt.add_special_tokens, share, keep_last=keep_last, most=most
        )
        return Ids.of(_truncated(ids.values, parameters)) if keeps_first else ids

    def _fewest_tokens(self, prompt: Prompt) -> int:
        """A lower bound of the prompt's tokens, without tokenizing it: (its characters / characters of the longest
        token). A truncated prompt always fits."""
        longest = self._tokenizer.max_chars_per_token
        if longest is None or prompt.parameters.truncate is not None:
            return 0
        return -(-len(prompt.inputs) // longest)


def parameter_checks(asked: AskedParameters, limits: RequestLimits) -> Iterator[Check]:
    best_of, given, values = asked.best_of or 1, asked.sampling.given, asked.sampling.values
    if best_of > 1 and not asked.sampling.asks_for_sampling:
        raise ValidationError("you must use sampling when `best_of` is > 1", "best_of")
    yield not values.temperature > 0, "temperature", "must be strictly positive"
    yield not values.repetition_penalty > 0, "repetition_penalty", "must be strictly positive"
    yield not -2.0 <= values.frequency_penalty <= 2.0, "frequency_penalty", "must be >= -2.0 and <= 2.0"
    yield not -2.0 <= values.presence_penalty <= 2.0, "presence_penalty", "must be >= -2.0 and <= 2.0"
    yield "top_p" in given and not 0.0 < values.top_p < 1.0, "top_p", "must be > 0.0 and < 1.0"
    yield "typical_p" in given and not 0.0 < values.typical_p < 1.0, "typical_p", "must be > 0.0 and < 1.0"
    yield not 0.0 <= values.min_p <= 1.0, "min_p", "must be >= 0.0 and <= 1.0"
    yield "top_k" in given and not values.top_k > 0, "top_k", "must be strictly positive"
    is_none_taken = asked.max_new_tokens == 0 and asked.takes_no_tokens
    yield _not_positive(asked.max_new_tokens) and not is_none_taken, "max_new_tokens", "must be strictly positive"
    most, stops = limits.asked.max_stop_sequences, len(asked.stop)
    yield stops > most, "stop", too_many_stops(most, stops)
    # TGI lacks this check: there, an empty stop string ends every text at once.
    yield "" in asked.stop, "stop", "must not contain an empty string"
    yield best_of > 1 and "seed" in given, "seed", "must not be set when `best_of` > 1"
    most = limits.asked.max_top_n_tokens if asked.max_top_n_tokens is None else asked.max_top_n_tokens
    tops = values.top_n_tokens
    yield tops > most, "top_n_tokens", f"must be >= 0 and <= {most}. Given: {tops}"
    tops = asked.prompt_logprobs or 0  # TGI lists no most likely tokens with those of a prompt
    yield not 0 <= tops <= most, "prompt_logprobs", f"must be >= 0 and <= {most}. Given: {tops}"
    yield _not_positive(asked.timeout), "timeout", "must be strictly positive"  # TGI has none
    yield from list_checks(asked.sampling.values, asked.stop_token_ids, asked.bad_words, limits.vocab_size)
    nothing = "allowed_token_ids" in given and not values.allowed_token_ids
    yield nothing, "allowed_token_ids", "must not be empty"
    adapter = asked.adapter_id
    unknown = adapter is not None and adapter not in limits.adapters
    yield unknown, "adapter_id", unknown_adapter(adapter or "", limits.adapters)


def unknown_adapter(given: str, adapters: Collection[str]) -> str:
    """The names of the first ones are told."""
    names = ", ".join(sorted(adapters)[:MAX_NAMED_ADAPTERS]) or "none"
    return f"must be one of the server's adapters ({names}). Given: {given[:MAX_NAMED_CHARS]}"


def too_many_stops(most: int, given: int) -> str:
    return f"supports up to {most} stop sequences. Given: {given}"


def input_checks(prompt: Prompt, limits: RequestLimits) -> Iterator[Check]:
    yield not (prompt.inputs if prompt.ids is None else prompt.ids), "inputs", "cannot be empty"
    size = limits.vocab_size
    outside = next((i for i in prompt.ids or () if i >= size), None) if size else None
    yield outside is not None, "inputs", f"must have token ids < {size}. Given: {outside}"
    truncate, most = prompt.parameters.truncate, limits.max_input_tokens
    out_of_range = truncate is not None and not 0 < truncate <= most
    yield out_of_range, "truncate", f"must be strictly positive and less than {most}. Given: {truncate}"


def length_checks(ids: Ids, max_new_tokens: int | None, limits: RequestLimits) -> Iterator[Check]:
    total, most = limits.max_total_tokens, limits.max_input_tokens
    given = f"{ids.count}{'' if ids.is_exact else ' or more'}"
    if max_new_tokens is not None:
        wanted = min(max_new_tokens, MUST_FIT)
        yield (
            ids.count + wanted > total,
            "inputs",
            f"tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {given} `inputs` tokens and {wanted} `max_new_tokens`",
        )
    yield ids.count > most, "inputs", f"must have less than {most} tokens. Given: {given}"
    # TGI lacks this check. It fails only with tokenizers that delete text, for the prompt "\n" for example.
    yield ids.count == 0, "inputs", "has no tokens"


def sampling(asked: AskedSampling) -> Sampling:
    """The sampling parameters, with a random seed if none was given. Only this function decides whether tokens are
    drawn: as in TGI, a request for any warper is a request for sampling.
    """
    values = asked.values.without_warpers() if asked.greedy else asked.values
    seed = values.seed if "seed" in asked.given else secrets.randbits(63)
    draws = not asked.greedy and (values.do_sample or values.warps)
    return replace(values, seed=seed, do_sample=draws)


def raise_first(checks: "Iterator[Check] | list[Check]", kind: type[ValidationError] = ValidationError) -> None:
    for fails, name, why in checks:
        if fails:
            raise kind.of(name, why)


def _truncated(ids: tuple[int, ...], asked: AskedParameters) -> tuple[int, ...]:
    if asked.truncate is None:
        return ids
    return ids[-asked.truncate :] if asked.keeps_last else ids[: asked.truncate]


QUOTED = re.compile(r"`(\w+)`")


def renamed(error: InferenceError, names: Mapping[str, str]) -> InferenceError:
    """The error with the names that the caller's route has for the fields."""
    text = QUOTED.sub(lambda name: f"`{names.get(name[1], name[1])}`", error.text)
    return type(error).restored(text, names.get(error.param or "", error.param))


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Raises errors of the content with the names that the caller's route has for the fields."""
    try:
        yield
    except (TemplateError, ToolError, ValidationError) as error:
        raise renamed(error, names) if names else error from None


def copies_of(prompt: Prompt, request: GenerationRequest) -> Iterator[GenerationRequest]:
    """The requests of one prompt, each with a seed of its own: the first has the seed that was given, if one was."""
    yield request
    given = "seed" in prompt.parameters.sampling.given
    for number in range(1, prompt.copies):
        seed = (request.sampling.seed + number) % 2**64 if given else secrets.randbits(63)
        yield replace(request, sampling=replace(request.sampling, seed=seed))


def _not_positive(value: float | None) -> bool:
    return value is not None and not value > 0
