"""Which tokens a request allows, forbids or ends with: the checks of its lists, and words as sequences of token ids."""

from collections.abc import Iterable, Iterator, Sequence

from text_generation_common.sampling import Sampling
from text_generation_router.errors import ValidationError
from text_generation_router.scheduling.request import Share
from text_generation_router.text.tokens.tokenization import TextTokenizer

Check = tuple[bool, str, str]  # (whether the check fails, the field that is wrong, what is wrong with it)
MAX_LISTED = 1024  # most items of a list, and most token ids of all bad words together, as in the shards
MAX_WORD_CHARS = 16_384  # most characters of all bad words together: as much as one thread tokenizes in a turn


def too_many_listed(given: int) -> str:
    return f"must have at most {MAX_LISTED} items. Given: {given}"


def list_checks(
    asked: Sampling, stop_token_ids: Sequence[int], bad_words: Sequence[str], vocab_size: int
) -> Iterator[Check]:
    if asked.logit_bias:
        yield from _id_checks("logit_bias", (token_id for token_id, _ in asked.logit_bias), vocab_size)
        outside = any(not -100.0 <= value <= 100.0 for _, value in asked.logit_bias)
        yield outside, "logit_bias", "must have values >= -100.0 and <= 100.0"
    yield from _id_checks("stop_token_ids", stop_token_ids, vocab_size)
    yield from _id_checks("allowed_token_ids", asked.allowed_token_ids, vocab_size)
    yield "" in bad_words, "bad_words", "must not contain an empty word"
    chars = sum(map(len, bad_words))
    yield chars > MAX_WORD_CHARS, "bad_words", f"must have at most {MAX_WORD_CHARS} characters in all. Given: {chars}"


def _id_checks(name: str, ids: Iterable[int], vocab_size: int) -> Iterator[Check]:
    strange = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    wrong = f"must have token ids of the model's vocabulary, 0 to {vocab_size - 1}. Given: {strange}"
    yield strange is not None, name, wrong


def choice_checks(chosen: Sampling, max_new_tokens: int, vocab_size: int) -> Iterator[Check]:
    """Checks of parameters whose words and ends of text are token ids. Raises ValidationError if they leave no
    token."""
    least = chosen.min_new_tokens
    wrong = f"must be <= `max_new_tokens`. Given: {least} and {max_new_tokens}"
    yield least > max_new_tokens, "min_new_tokens", wrong
    is_limited = chosen.allowed_token_ids or chosen.bad_words_ids or chosen.end_token_ids
    if is_limited and not leaves_a_token(chosen, vocab_size):
        raise no_token(chosen)


def no_token(chosen: Sampling) -> ValidationError:
    """The error that no token can be chosen. It names the fields that the request has, and blames one of these."""
    given = {
        "allowed_token_ids": chosen.allowed_token_ids,
        "bad_words": chosen.bad_words_ids,
        "min_new_tokens": chosen.min_new_tokens and chosen.end_token_ids,
    }
    names = [name for name, value in given.items() if value]
    causes = [*(["the grammar"] if chosen.grammar else []), *(f"`{name}`" for name in names)]
    return ValidationError(f"no token that could come next is left by {' and '.join(causes)}", next(iter(names), None))


async def ids_of_bad_words(
    tokenizer: TextTokenizer, words: Sequence[str], vocab_size: int, share: Share
) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, with and without a space before it: most tokenizers have other tokens for a word
    within a text than for a word at its beginning. Tokens that the model does not have are never generated, so words
    with such tokens are left out. ValidationError if a word has no tokens, or if all words together have too many.
    """
    plain = [word.lstrip(" ") or word for word in words]
    sequences = await tokenizer.encode_words([*plain, *(f" {word}" for word in plain)], share)
    for word, ids in zip(plain, sequences, strict=False):
        if not ids:
            raise ValidationError.of("bad_words", f"has a word without tokens: {word[:32]!r}")
    found = tuple(ids for ids in dict.fromkeys(sequences) if max(ids, default=vocab_size) < vocab_size)
    if (count := sum(map(len, found))) > MAX_LISTED:
        raise ValidationError.of(
            "bad_words",
            f"must have at most {MAX_LISTED} tokens in all, counted with and without a space before each word. Given:"
            f" {count}",
        )
    return found


def leaves_a_token(sampling: Sampling, vocab_size: int) -> bool:
    """Whether, after every history, there is a token that the request's lists do not exclude."""
    allowed = set(sampling.allowed_token_ids)
    always = set(sampling.end_token_ids) if sampling.min_new_tokens else set()
    if len(always) + len(sampling.bad_words_ids) < (len(allowed) or vocab_size):
        return True
    banned: dict[tuple[int, ...], set[int]] = {}  # by the tokens before, of which there is at least one
    for *before, token in sampling.bad_words_ids:
        (banned.setdefault(tuple(before), set()) if before else always).add(token)
    left = len(allowed - always) if allowed else vocab_size - len(always)
    lengths = {len(before) for before in banned}

    def is_left_after(history: tuple[int, ...]) -> bool:
        ends = (history[-length:] for length in lengths if length <= len(history))
        found: set[int] = set().union(*(banned.get(end, set()) for end in ends))
        return len((found & allowed if allowed else found) - always) < left

    return left > 0 and all(map(is_left_after, banned))
