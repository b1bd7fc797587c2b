"""The tokenizer, the templates and the sampling parameters of a GGUF file; files that lie end in one line."""

import json
import string
import time
import tracemalloc
from itertools import islice, product

import pytest
from gguf_headers import (
    BYTE,
    CONTROL,
    FIRST,
    FLAG,
    FLOAT,
    LETTERS,
    NORMAL,
    PIECES,
    SPACE,
    UNKNOWN,
    USER,
    WHOLE,
    WORDS,
    array,
    byte_level,
    header,
    sentencepiece,
    unigram,
)  # fmt: skip
from tokenizers import Tokenizer

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.container import TEXT, GgufArray
from text_generation_common.gguf.generation import generation_config, tokenizer_config
from text_generation_common.gguf.tokenizer import tokenizer_file, tokenizer_json
from text_generation_common.gguf.vocabulary import read_vocabulary
from text_generation_common.tests.slowness import Seconds, assert_within

ASCII = ["!", '"', "a", "b", "Ġ", "Ċ", "1", "ab", "Ġab", "11"]
MERGES = ["a b", "Ġ ab", "1 1"]


def ids_of(file, text, around=False):
    return Tokenizer.from_str(json.dumps(tokenizer_json(file))).encode(text, add_special_tokens=around).ids


def id_of(text):
    return [piece for piece, _, _ in PIECES].index(text)


def test_merges_of_scores_join_the_best_pair_first_and_other_characters_become_bytes():
    file = sentencepiece(PIECES)
    assert ids_of(file, "ab b") == [id_of(SPACE + "ab"), id_of(SPACE), id_of("b")]
    assert ids_of(file, "é", around=True) == [1, id_of(SPACE), id_of("<0xC3>"), id_of("<0xA9>")]
    assert ids_of(sentencepiece(PIECES, add_space_prefix=False), "ab") == [id_of("ab")]


def test_a_space_comes_before_the_text_and_after_each_token_that_the_text_names():
    assert ids_of(sentencepiece(PIECES), "ab<s>ab") == [id_of(SPACE + "ab"), 1, id_of(SPACE + "ab")]


def test_tokens_around_a_text_are_the_files_or_the_kinds_own():
    assert ids_of(sentencepiece(PIECES, add_bos_token=False), "", around=True) == []
    assert ids_of(sentencepiece(PIECES, add_eos_token=True, eos_token_id=0), "", around=True) == [1, 0]
    assert ids_of(byte_level(ASCII, MERGES, "llama-bpe", bos_token_id=0), "b", around=True) == [0, 3]
    assert ids_of(byte_level(ASCII, MERGES, "gpt-2", bos_token_id=0), "b", around=True) == [3]


def test_a_file_names_the_splitting_of_its_texts():
    assert ids_of(byte_level(ASCII, MERGES, "gpt-2"), "ab ab11") == [7, 8, 9]
    assert ids_of(byte_level(ASCII, MERGES, "starcoder"), "ab ab11") == [7, 8, 6, 6]
    whole = byte_level([*ASCII, "aab"], MERGES, "llama-bpe", bos_token_id=0)
    assert ids_of(whole, "aab") == [10]
    assert ids_of(byte_level([*ASCII, "aab"], MERGES, "dbrx"), "aab") == [2, 7]


def test_tokens_of_the_user_are_found_first_and_are_not_special():
    kinds = array(WHOLE, [NORMAL] * 7 + [USER, CONTROL, NORMAL])
    content = tokenizer_json(byte_level(ASCII, MERGES, token_type=kinds))
    assert [(token["content"], token["special"]) for token in content["added_tokens"]] == [("ab", False), ("Ġab", True)]


def test_a_unigram_takes_the_best_path_after_the_files_own_replacements():
    pieces = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN), *WORDS, *LETTERS]
    file = unigram(pieces, remove_extra_whitespaces=True, add_space_prefix=True)
    assert ids_of(file, "  ab   a ", around=True) == [3, 5, 1]
    assert ids_of(file, "xyab") == [8, 2, 4]


def test_a_whole_tokenizer_json_is_taken_as_it_is():
    content = b'{"version": "1.0", "model": {}, "\xff": 0}'
    assert tokenizer_file(sentencepiece(PIECES, tokenizer__huggingface__json=array(BYTE, list(content)))) == content
    with pytest.raises(WeightsError, match=r"tokenizer\.huggingface\.json is not a list of bytes"):
        tokenizer_file(sentencepiece(PIECES, tokenizer__huggingface__json=array(TEXT, ["{}"])))


def test_ends_are_those_that_the_file_names_and_those_whose_texts_are_known():
    tokens = [*ASCII, "<|im_end|>", "<|eot_id|>", "<|end|>"]
    file = byte_level(tokens, MERGES, eos_token_id=0, eot_token_id=1, eom_token_id=2)
    assert generation_config(file) == {"eos_token_id": [0, 1, 2, 10, 11, 12], "do_sample": False}
    assert [token["id"] for token in tokenizer_json(file)["added_tokens"]] == [10, 11, 12]


def test_a_message_of_gpt_oss_goes_on_after_its_end():
    tokens = [*ASCII, "<|end|>", "<|return|>", "<|call|>"]
    assert read_vocabulary(byte_level(tokens, MERGES, eos_token_id=11)).end_ids == [11, 12]


def test_templates_have_names_and_tokens_have_texts():
    names = {"tokenizer__chat_template": "A", "tokenizer__chat_template__tool_use": "B"}
    assert tokenizer_config(byte_level(ASCII, MERGES, bos_token_id=2, **names)) == {
        "bos_token": "a",
        "eos_token": None,
        "unk_token": None,
        "chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}],
        "added_tokens_decoder": {},
    }


def test_keys_of_templates_and_sampling_that_have_no_effect_are_named_in_one_line(caplog):
    caplog.set_level("INFO")
    known = {"tokenizer__chat_template": "A", "tokenizer__chat_template__rag": "B", "general__sampling__top_k": 20}
    tokenizer_config(byte_level(ASCII, MERGES, **known))
    assert not caplog.messages
    others = {"tokenizer__chat_template__a\nb": "C", "general__sampling__mirostat": 1}
    tokenizer_config(byte_level(ASCII, MERGES, **known, **others))
    names = r"tokenizer.chat_template.a\nb, general.sampling.mirostat"
    assert caplog.messages == [f"m.gguf has keys that have no effect: {names}"]


def test_recommended_parameters_are_those_of_a_generation_config():
    keys = {"general__sampling__temp": 0.6000000238418579, "general__sampling__top_k": 20}
    found = generation_config(byte_level(ASCII, MERGES, eos_token_id=0, **keys))
    assert found == {"eos_token_id": [0], "do_sample": True, "temperature": 0.6, "top_k": 20}
    penalty = byte_level(ASCII, MERGES, eos_token_id=0, general__sampling__penalty_repeat=1.5)
    assert generation_config(penalty) == {"eos_token_id": [0], "do_sample": False, "repetition_penalty": 1.5}


FLOATS, NUMBERS = [0.0] * len(ASCII), [1] * len(ASCII)
LONG = [("a" * (n + 1), 0.0, NORMAL) for n in range(1024)]
LIES = {
    "another kind": (header(model="bert"), r"of the kind bert \(tokenizer.ggml.model\) is not supported, only llama"),
    "no kind": (header(), "it has no key tokenizer.ggml.model"),
    "a kind that is a number": (header(model=3), "tokenizer.ggml.model is not a text"),
    "unknown splitting": (byte_level(ASCII, MERGES, "x\ny"), r"names the splitting of texts x\\ny, which is not known"),
    "no splitting": (byte_level(ASCII, MERGES, None), "does not say how to split"),
    "no tokens": (byte_level(ASCII, MERGES, tokens=None), "it has no tokenizer.ggml.tokens"),
    "tokens that are numbers": (byte_level(ASCII, MERGES, tokens=array(WHOLE, [1])), "it has no tokenizer.ggml.tokens"),
    "tokens that are a text": (byte_level(ASCII, MERGES, tokens="ab"), "tokenizer.ggml.tokens is not a list"),
    "two equal tokens": (byte_level([*ASCII, "a"], MERGES), "two of its tokens are the same"),
    "long tokens": (
        byte_level(ASCII, MERGES, tokens=GgufArray(TEXT, 10, 2**24, b"", 0)), "tokens has 16777216 bytes, and at most"
    ),
    "many merges": (
        byte_level(ASCII, [], tokenizer__ggml__merges=GgufArray(TEXT, 10**6, 0, b"", 0)), "merges has 1000000 texts"
    ),
    "merges that are numbers": (
        byte_level(ASCII, [], tokenizer__ggml__merges=array(WHOLE, [1])), "it has no tokenizer.ggml.merges"
    ),
    "many control tokens": (unigram([(f"{n}", 0.0, CONTROL) for n in range(2**15 + 1)]), "32769 of its tokens are for"),
    "types that are fractions": (
        byte_level(ASCII, MERGES, token_type=array(FLOAT, FLOATS)), "token_type does not have one whole number for each"
    ),
    "scores that are flags": (
        byte_level(ASCII, MERGES, scores=array(FLAG, NUMBERS)), "scores does not have one number for each"
    ),
    "a long token": (byte_level([*ASCII, "a" * 1025], MERGES), "more than 1024 characters"),
    "too few scores": (byte_level(ASCII, MERGES, scores=array(FLOAT, FLOATS[1:])), "scores does not have one number"),
    "too many types": (byte_level(ASCII, MERGES, token_type=array(WHOLE, [1, *NUMBERS])), "token_type does not have"),
    "types that are texts": (byte_level(ASCII, MERGES, token_type=array(TEXT, ASCII)), "token_type does not have"),
    "an unknown type": (byte_level(ASCII, MERGES, token_type=array(WHOLE, [7, *NUMBERS[1:]])), "not a type of tokens"),
    "infinite scores": (sentencepiece([("a", float("inf"), 1)]), "scores has a number that is not finite"),
    "an end out of range": (byte_level(ASCII, MERGES, eos_token_id=10), "eos_token_id is 10, and it has 10 tokens"),
    "a negative end": (byte_level(ASCII, MERGES, eot_token_id=-1), "eot_token_id is -1"),
    "an end that is a text": (byte_level(ASCII, MERGES, eos_token_id="a"), "eos_token_id is not a whole number"),
    "a beginning without a token": (byte_level(ASCII, MERGES, add_bos_token=True), "bos_token_id does not name"),
    "no merges": (byte_level(ASCII, []), "it has no tokenizer.ggml.merges"),
    "a merge of one": (byte_level(ASCII, ["ab"]), "merges has ab, which does not join two tokens to a third"),
    "a merge to no token": (byte_level(ASCII, ["b a"]), "merges has b a, which does not"),
    "many merges of scores": (sentencepiece([*FIRST, *LONG]), "its merges have more than 8000000 characters"),
    "a million tokens": (byte_level(ASCII, [], tokens=GgufArray(TEXT, 2**20, 0, b"", 0)), "at most 524288 are read"),
    "fractions as bytes": (unigram(PIECES, precompiled_charsmap=array(FLOAT, [1.5])), "is not a list of bytes"),
    "cut replacements": (unigram(PIECES, precompiled_charsmap=array(BYTE, [9, 0, 0, 0, 1])), "charsmap is cut off"),
}  # fmt: skip


@pytest.mark.parametrize("file, told", LIES.values(), ids=LIES)
def test_a_lie_ends_in_one_line(file, told):
    def refuse() -> Seconds:
        started = time.process_time()
        with pytest.raises(WeightsError, match=told) as refused:
            tokenizer_json(file)
        assert "\n" not in str(refused.value) and str(refused.value).startswith("m.gguf")
        return Seconds(0.0, time.process_time() - started)

    assert_within(refuse, cpu=1.0)


def cost_of(tokens, letters):
    """Seconds and bytes at most that a tokenizer takes whose tokens are the first texts of `letters`, and its message
    if it is refused."""
    texts = ("".join(each) for length in range(1, 8) for each in product(string.ascii_letters[:letters], repeat=length))
    file = sentencepiece([*FIRST, *((text, float(-id), NORMAL) for id, text in enumerate(islice(texts, tokens)))])
    tracemalloc.start()
    started, message = time.process_time(), ""
    try:
        tokenizer_json(file)
    except WeightsError as error:
        message = str(error)
    taken_s, taken = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken_s, taken, message


@pytest.mark.slow
def test_the_largest_lie_costs_64_mib_more_than_the_largest_vocabulary_in_use_and_hardly_more_time():
    good_s, good, message = cost_of(210_000, letters=26)  # with 610,000 merges, as many as Gemma has
    assert not message
    lie_s, lie, message = cost_of(2**19 - 8, letters=9)
    assert "its merges have more than" in message
    assert lie - good <= 64 * 2**20 and lie_s <= 2 * good_s
