"""A prompt's tokens as rows: their texts, log-probabilities and most likely tokens."""

import math

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.text.tokens.detokenization import Vocabulary
from text_generation_router.text.tokens.events import PromptRows

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = len(ALPHABET)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Vocabulary.of(tokenizer)


def make_rows(vocabulary: Vocabulary, ids: list[int], top_n: int = 0) -> PromptRows:
    count = len(ids) - 1
    logprobs = np.arange(-1, -1 - count, -1, dtype=np.float32)
    shape = (count, top_n)
    return PromptRows(
        vocabulary, ids, PromptLogprobs(logprobs, np.full(shape, 5, np.int32), np.full(shape, -0.5, np.float32))
    )


def ids_of(text: str) -> list[int]:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [ALPHABET.index(char) for word, _ in words for char in word]


def test_the_first_token_has_no_logprob_and_the_others_have_theirs_in_order(vocabulary: Vocabulary) -> None:
    rows = make_rows(vocabulary, ids_of("abc"), top_n=2)
    tokens, tops = zip(*rows, strict=True)
    assert math.isnan(tokens[0].logprob) and [token.logprob for token in tokens[1:]] == [-1.0, -2.0]
    assert [len(of_token) for of_token in tops] == [0, 2, 2]
    assert (tops[2][1].id, tops[2][1].text, tops[2][1].logprob) == (5, vocabulary.text_of(5), -0.5)


@pytest.mark.parametrize("text", ["fox", " a  b\n", "é and 狐 and 🦊!", "🦊"])
def test_the_texts_joined_are_the_prompt(vocabulary: Vocabulary, text: str) -> None:
    ids = [EOS, *ids_of(text), EOS]
    rows = make_rows(vocabulary, ids)
    assert "".join(token.text for token, _ in rows) == f"</s>{text}</s>"
    assert [token.special for token, _ in rows] == [i in (0, len(ids) - 1) for i in range(len(ids))]
    alone = [rows.text_alone(row) for row in rows]
    assert alone == [vocabulary.text_of(i) for i in ids]


def test_rows_are_the_same_in_any_order_and_in_any_slices(vocabulary: Vocabulary) -> None:
    ids = ids_of("é and 狐 and 🦊!")
    whole = list(make_rows(vocabulary, ids, top_n=1))[1:]  # NaN is not equal to itself
    backwards, cut = make_rows(vocabulary, ids, top_n=1), make_rows(vocabulary, ids, top_n=1)
    assert [backwards[i] for i in range(len(ids) - 1, 0, -1)] == whole[::-1]
    assert [*cut[1:4], *cut[4:], *cut[100:]] == whole and len(cut) == len(ids)


def test_values_that_are_not_of_the_whole_prompt_are_a_bug(vocabulary: Vocabulary) -> None:
    values = make_rows(vocabulary, ids_of("abc"))._logprobs
    with pytest.raises(AssertionError, match="not complete"):
        PromptRows(vocabulary, ids_of("abcd"), values)
