import asyncio
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from text_generation_common.flags.requests import RequestFlags
from text_generation_common.sampling import NAMES, Sampling
from text_generation_router.errors import GrammarError, TooLongError, ValidationError
from text_generation_router.offload.tests.in_process import InProcess
from text_generation_router.scheduling.request import Share
from text_generation_router.text.grammars import checking_child
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking import GrammarChecker
from text_generation_router.text.grammars.checking_child import handlers_of
from text_generation_router.text.tokens.length_bound import byte_symbols
from text_generation_router.text.tokens.token_choice import leaves_a_token
from text_generation_router.text.tokens.tokenization import Ids, TextTokenizer
from text_generation_router.text.validation import AskedParameters, AskedSampling, Prompt, RequestLimits, Validator

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

LIMITS = RequestLimits(RequestFlags(), max_input_tokens=10, max_total_tokens=15, vocab_size=200, eos_token_ids=(2, 5))


def byte_tokenizer(is_framed):
    """A tokenizer with a token for each byte, whose texts can be cut at spaces. If `is_framed`, each text has a special
    token before it and one after it."""
    vocab = {symbol: number for number, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if is_framed:
        tokenizer.add_special_tokens(["</s>"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single="</s> $A </s>", special_tokens=[("</s>", len(vocab))]
        )
    return tokenizer


class Letters:
    """A tokenizer with one token per character."""

    max_chars_per_token: int | None = None

    def __init__(self) -> None:
        self.encoded = 0

    async def encode(self, text, add_special_tokens, share, keep_last=None, most=None):
        self.encoded += 1
        ids = tuple(map(ord, text if keep_last is None else text[-keep_last:]))
        return Ids((), len(ids)) if most is not None and len(ids) > most else Ids.of(ids)

    async def encode_words(self, words, share):
        return [tuple(map(ord, word)) for word in words]


def checker():
    return GrammarChecker(InProcess(handlers_of(checking_child.byte_tokenizer())), max_waiting=4)


def validate(inputs, tokenizer=None, greedy=False, **parameters):
    validator = Validator(tokenizer or Letters(), checker(), lambda: LIMITS)
    others = {name: value for name, value in parameters.items() if name not in NAMES}
    asked = AskedParameters(AskedSampling.of(parameters, greedy), **others)
    return asyncio.run(validator.validate(Prompt(inputs, asked), Share()))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        *TABLES["refused"],
        ({"bad_words": ("a" * 16_385,)}, "`bad_words` must have at most 16384 characters in all. Given: 16385"),
        (
            {"bad_words": ("a" * 512,)},
            "`bad_words` must have at most 1024 tokens in all, counted with and without a space before each word."
            " Given: 1025",
        ),
        ({"stop": ("x",) * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ],
)
def test_each_check_has_tgis_text(parameters, text):
    with pytest.raises(ValidationError) as caught:
        validate("Hi", **parameters)
    assert caught.value.text == f"Input validation error: {text}"


def test_no_token_may_be_asked_for_only_where_the_answer_has_the_prompt():
    assert validate("x" * 10, max_new_tokens=0, takes_no_tokens=True).max_new_tokens == 0
    for asked in ({}, {"prompt_logprobs": 0}):
        with pytest.raises(ValidationError, match="`max_new_tokens` must be strictly positive"):
            validate("x", max_new_tokens=0, **asked)
    with pytest.raises(ValidationError, match="`max_new_tokens` must be strictly positive"):
        validate("x", max_new_tokens=-1, takes_no_tokens=True)


def test_log_probabilities_of_the_prompt_are_asked_for_by_the_number_of_top_tokens():
    assert [validate("x", prompt_logprobs=n).prompt_logprobs for n in (None, 0, 5)] == [None, 0, 5]
    for n in (-1, 6):
        with pytest.raises(ValidationError, match=f"`prompt_logprobs` must be >= 0 and <= 5. Given: {n}"):
            validate("x", prompt_logprobs=n)


def test_the_first_failing_check_wins():
    wrong = {"temperature": -1.0, "top_k": -1, "max_new_tokens": 0}
    for name, value in wrong.items():
        with pytest.raises(ValidationError, match=f"`{name}`"):
            validate("", **{key: wrong[key] for key in list(wrong)[list(wrong).index(name) :]}, truncate=0)
        assert value is not None
    with pytest.raises(ValidationError, match="`inputs` cannot be empty"):
        validate("", truncate=0)


def test_limits_are_inclusive():
    assert validate("x" * 10, max_new_tokens=5).max_new_tokens == 5
    assert validate("x" * 99, truncate=10, max_new_tokens=5).input_ids == (ord("x"),) * 10


def test_inputs_too_long_alone_and_inputs_too_long_with_max_new_tokens_have_different_texts():
    with pytest.raises(ValidationError, match=r"`inputs` must have less than 10 tokens. Given: 12"):
        validate("x" * 12, max_new_tokens=1)
    with pytest.raises(ValidationError, match=r"Given: 20 `inputs` tokens and 1 `max_new_tokens`"):
        validate("x" * 20, max_new_tokens=1)


@pytest.mark.parametrize("part_chars", [4, 10_000])
@pytest.mark.parametrize("added", [0, 2])  # special tokens around each text
def test_the_number_of_tokens_is_told_from_just_below_the_limit_to_three_times_the_limit(part_chars, added):
    tokenizer = TextTokenizer.of(byte_tokenizer(added > 0), workers=1, max_waiting=4, part_chars=part_chars)
    tokenizer.max_chars_per_token = None
    most, total = LIMITS.max_input_tokens, LIMITS.max_total_tokens
    for length in range(most - 3, 3 * most + 1):
        text = ("ab " * length)[: length - added]
        for side in (True, False):
            for tokens in (None, 1, 9):
                asked = {"max_new_tokens": tokens, "keeps_last": side}
                wrong = None
                if tokens is not None and length + tokens > total:
                    wrong = (
                        f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
                        f"Given: {length} `inputs` tokens and {tokens} `max_new_tokens`"
                    )
                elif length > most:
                    wrong = f"`inputs` must have less than {most} tokens. Given: {length}"
                if wrong is None:
                    assert len(validate(text, tokenizer, **asked).input_ids) == length
                    continue
                with pytest.raises(TooLongError) as caught:
                    validate(text, tokenizer, **asked)
                assert caught.value.text == f"Input validation error: {wrong}"
            assert len(validate(text, tokenizer, truncate=most, keeps_last=side).input_ids) == min(length, most)
    tokenizer.close()


def test_without_max_new_tokens_a_request_may_use_all_tokens_that_are_left():
    assert validate("xxxx").max_new_tokens == 11


def test_an_absent_seed_is_random_and_fits_63_bits():
    seeds = {validate("x").sampling.seed for _ in range(8)}
    assert len(seeds) == 8 and max(seeds) < 2**63


def test_parameters_that_are_not_given_are_neutral():
    assert replace(validate("x").sampling, seed=0) == Sampling()
    assert replace(validate("x", **dict.fromkeys(NAMES)).sampling, seed=0) == Sampling()


def test_a_request_for_any_warper_is_a_request_for_sampling():
    for warper in ({"temperature": 0.5}, {"top_k": 1}, {"top_p": 0.9}, {"typical_p": 0.9}, {"do_sample": True}):
        assert validate("x", **warper).sampling.do_sample
        assert validate("x", best_of=2, **warper).sampling.do_sample
    for other in ({}, {"temperature": 1.0}, {"seed": 3, "repetition_penalty": 1.1, "watermark": True}):
        assert not validate("x", **other).sampling.do_sample


def test_greedy_requests_draw_nothing_and_keep_their_other_parameters():
    asked = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "typical_p": 0.9, "do_sample": True}
    kept = {"seed": 3, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "watermark": True, "top_n_tokens": 2}
    assert validate("x", greedy=True, **asked, **kept).sampling == Sampling(**kept)
    with pytest.raises(ValidationError, match="`top_p`"):
        validate("x", greedy=True, top_p=2.0)


def test_the_tokens_that_end_a_text_are_those_that_cannot_be_chosen_before_min_new_tokens():
    asked = {"min_new_tokens": 3, "stop_token_ids": (9, 5)}
    assert validate("x", **asked).sampling.end_token_ids == (2, 5, 9)
    assert validate("x", **asked, ignore_eos_token=True).sampling.end_token_ids == (5, 9)
    request = validate("x", stop_token_ids=(9, 5))
    assert request.sampling.end_token_ids == () and request.stop_token_ids == {5, 9}


def test_bad_words_are_forbidden_with_and_without_a_space_before_them():
    words = validate("x", bad_words=("ab", " c", "c", " ")).sampling.bad_words_ids
    assert words == ((97, 98), (99,), (32,), (32, 97, 98), (32, 99), (32, 32))


@pytest.mark.parametrize(
    ("leaves", "parameters"),
    [
        (True, {}),
        (True, {"allowed_token_ids": (3,)}),
        (False, {"allowed_token_ids": (3, 4), "bad_words_ids": ((3,), (4,))}),
        (True, {"allowed_token_ids": (3, 4), "bad_words_ids": ((3,), (3,))}),
        # After 3 only 4 is left, and after 4 only 3.
        (True, {"allowed_token_ids": (3, 4), "bad_words_ids": ((3, 3), (4, 4))}),
        (False, {"allowed_token_ids": (3, 4), "bad_words_ids": ((3, 3), (4,))}),
        (False, {"allowed_token_ids": (3, 4), "bad_words_ids": ((4, 3, 3), (3, 4))}),
        (True, {"allowed_token_ids": (3, 4), "bad_words_ids": ((4, 3, 3), (9, 3, 4))}),
        (True, {"allowed_token_ids": (3, 4), "end_token_ids": (3, 4)}),
        (False, {"allowed_token_ids": (3, 4), "end_token_ids": (3, 4), "min_new_tokens": 1}),
        (False, {"bad_words_ids": tuple((i,) for i in range(1, 10)), "end_token_ids": (0,), "min_new_tokens": 1}),
        (True, {"bad_words_ids": tuple((i,) for i in range(1, 10)), "end_token_ids": (1,), "min_new_tokens": 1}),
        (False, {"bad_words_ids": tuple((7, i) for i in range(10))}),
    ],
)
def test_a_request_must_leave_a_token_after_every_history(leaves, parameters):
    assert leaves_a_token(Sampling(**parameters), 10) is leaves


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    st.lists(st.integers(0, 2), max_size=3).map(tuple),
)
def test_a_request_is_refused_if_and_only_if_some_history_leaves_no_token(words, allowed):
    histories = [history for length in range(4) for history in product(range(3), repeat=length)]

    def banned(history):
        return {word[-1] for word in words if history[len(history) - len(word) + 1 :] == word[:-1]}

    everywhere = all((set(allowed) or {0, 1, 2}) - banned((9, 9, 9, *history)) for history in histories)
    assert leaves_a_token(Sampling(bad_words_ids=words, allowed_token_ids=allowed), 3) is everywhere


def test_prompts_that_are_certainly_too_long_are_refused_before_tokenizing():
    tokenizer = Letters()
    tokenizer.max_chars_per_token = 3
    with pytest.raises(ValidationError, match="Given: 41 or more"):
        validate("x" * 121, tokenizer)
    assert tokenizer.encoded == 0
    with pytest.raises(ValidationError):
        validate("x" * 120, tokenizer)
    assert tokenizer.encoded == 1
    assert validate("x" * 999, tokenizer, truncate=3).input_ids == (ord("x"),) * 3


def test_a_text_that_is_too_long_is_refused_before_all_of_it_is_tokenized():
    class Impatient(Letters):
        async def encode(self, text, add_special_tokens, share, keep_last=None, most=None):
            assert most == LIMITS.max_input_tokens
            return Ids((), most + 1, is_exact=False)

    with pytest.raises(ValidationError, match=r"`inputs` must have less than 10 tokens. Given: 11 or more"):
        validate("x" * 99, Impatient())


def test_a_grammar_that_the_shards_cannot_follow_is_refused_before_the_queue():
    limits = replace(LIMITS, grammar_refusal="grammars are not supported for this model's tokenizer.json: no bytes")
    asked = AskedParameters(grammar=AskedGrammar("guided_regex", GrammarKind.REGEX, "a+"))

    def grammar(parameters, limits):
        validator = Validator(Letters(), checker(), lambda: limits)
        return asyncio.run(validator.validate(Prompt("a", parameters), Share())).sampling.grammar

    assert grammar(asked, LIMITS) and not grammar(AskedParameters(), limits)
    with pytest.raises(GrammarError) as refused:
        grammar(asked, limits)
    assert refused.value.text == f"Input validation error: `guided_regex`: {limits.grammar_refusal}"
