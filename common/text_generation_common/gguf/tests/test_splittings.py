"""Texts cut into tokens as llama.cpp cuts them, for every name of a splitting. splittings.json has small vocabularies,
whose merges reach over spaces, and the ids that llama.cpp (commit 0c1e570) has made of its texts with each name.
"""

import json
from pathlib import Path

import pytest
from gguf_headers import byte_level, sentencepiece, unigram
from tokenizers import Tokenizer

from text_generation_common.gguf.splits import SPLITTINGS
from text_generation_common.gguf.tokenizer import tokenizer_json

TABLE = json.loads(Path(__file__).with_name("splittings.json").read_text())
TEXTS = TABLE["texts"]
FIRST = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256))]


def ids_of(file):
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(file)))
    return [encoding.ids for encoding in tokenizer.encode_batch(TEXTS, add_special_tokens=False)]


def test_the_table_has_every_splitting():
    assert sorted(name for row in TABLE["splittings"] for name in row["names"]) == sorted(SPLITTINGS)


@pytest.mark.parametrize("row", TABLE["splittings"], ids=lambda row: row["names"][0])
def test_a_splitting_gives_the_tokens_of_llama_cpp_but_where_that_differs_from_the_original(row):
    tokens = [*TABLE["alphabet"], *TABLE["tokens"]]
    for splitting in row["names"]:
        found = ids_of(byte_level(tokens, TABLE["merges"], splitting, add_bos_token=False))
        different = [place for place, ids in enumerate(found) if ids != row["ids"][place]]
        assert different == TABLE["known"].get(splitting, [])


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_gives_the_tokens_of_llama_cpp(prefix):
    pieces = [*FIRST, *map(tuple, TABLE["pieces"])]
    file = sentencepiece(pieces, add_space_prefix=prefix, add_bos_token=False)
    assert ids_of(file) == TABLE["sentencepiece"][str(prefix).lower()]


def test_a_unigram_model_gives_the_tokens_of_llama_cpp_but_for_spaces_at_the_end_of_a_text():
    pieces = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
    pieces += [(text, score / 50 - (2 if len(text) > 1 else 8), kind) for text, score, kind in TABLE["pieces"]]
    for settings, expected in TABLE["unigram"].items():
        spaces, _, prefix = settings.partition(", ")
        keys = {"add_space_prefix": bool(prefix), "remove_extra_whitespaces": spaces == "spaces joined"}
        found = ids_of(unigram(pieces, add_eos_token=False, **keys))
        different = [text for text, ids, theirs in zip(TEXTS, found, expected, strict=True) if ids != theirs]
        assert all(settings == "spaces kept, prefix" and text.endswith(" ") for text in different)
        assert len(different) <= 3
