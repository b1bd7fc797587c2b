"""A tokenizer.json that is made of tokenizer.model cuts texts as sentencepiece does, by a second and slow program of
the same rules; and gives the texts back.
"""

import json
import struct
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sentencepiece_files import BYTES, SPECIAL, message, model_file, scored
from tokenizers import Tokenizer

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.vocabulary import TokenKind
from text_generation_common.tests.examples import examples
from text_generation_server.weights.added_tokens import Additions, read_additions
from text_generation_server.weights.sentencepiece import SentencePieces, read_sentencepieces
from text_generation_server.weights.sentencepiece_tokenizer import make_tokenizer
from text_generation_server.weights.tokenizer import ensure_fast_tokenizer

LETTERS = "▁abcdehilnorst0x<>4é"
WORDS = "▁a ▁t he in on ▁the an and ▁and er ▁th en re ▁b ▁▁ at ▁in is it or ▁x 0x lo hel hello ▁hello".split()


def llama_2() -> bytes:
    """BPE, bytes of unknown characters, a space before every text."""
    pieces = [*SPECIAL, *BYTES, *scored([*WORDS, *LETTERS])]
    return model_file(pieces, "bpe", byte_fallback=True, normalizer=[(4, 0)])


def gemma() -> bytes:
    """No space before a text, and symbols of the user's, which are found before all others."""
    symbols = [
        ("▁▁▁", 0.0, TokenKind.USER_DEFINED),
        ("<b>", 0.0, TokenKind.USER_DEFINED),
        ("<bos>", 0.0, TokenKind.USER_DEFINED),
    ]
    pieces = [*SPECIAL, *symbols, *BYTES, *scored([*WORDS, *LETTERS])]
    return model_file(pieces, "bpe", byte_fallback=True, normalizer=[(3, 0), (4, 0)])


def unigram(byte_fallback: bool) -> bytes:
    words = [word for word in WORDS if word != "▁▁"]
    pieces = [*SPECIAL, *(BYTES if byte_fallback else []), *scored([*words, *LETTERS])]
    return model_file(pieces, "unigram", byte_fallback)


MODELS: dict[str, Callable[[], bytes]] = {
    "llama-2": llama_2, "gemma": gemma, "unigram": lambda: unigram(False), "unigram, bytes": lambda: unigram(True),
}  # fmt: skip


@cache
def made(name: str) -> tuple[SentencePieces, Tokenizer]:
    model = read_sentencepieces(MODELS[name](), "m")
    return model, make_tokenizer(model, Additions(), "m")


def normalized(model: SentencePieces, text: str) -> str:
    if model.remove_extra_whitespaces:
        text = " ".join(word for word in text.split(" ") if word)
    text = (" " + text if model.add_dummy_prefix and text else text).replace(" ", "▁")
    return text.rstrip("▁") if model.remove_extra_whitespaces else text


def joined_pairs(model: SentencePieces, text: str) -> list[str]:
    """The pair whose join has the highest score is joined, the leftmost of equals, until no join is a piece."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is TokenKind.NORMAL}
    symbols = sorted((p.text for p in model.pieces if p.kind is TokenKind.USER_DEFINED), key=len, reverse=True)
    parts, place = [], 0
    while place < len(text):
        symbol = next((symbol for symbol in symbols if text.startswith(symbol, place)), None)
        parts.append((symbol or text[place], symbol is not None))
        place += len(parts[-1][0])
    while True:
        joins = [
            (-scores[first + second], i)
            for i, ((first, frozen), (second, frozen_too)) in enumerate(pairwise(parts))
            if not frozen and not frozen_too and first + second in scores
        ]
        if not joins:
            return [part for part, _ in parts]
        _, i = min(joins)
        parts[i : i + 2] = [(parts[i][0] + parts[i + 1][0], False)]


def best_total(model: SentencePieces, text: str) -> list[str]:
    """The pieces of the highest total score. A character without a piece costs 10 more than the worst piece."""
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is TokenKind.NORMAL}
    unknown = min(scores.values()) - 10
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        found = [
            (best[start][0] + scores.get(text[start:end], unknown), [*best[start][1], text[start:end]])
            for start in range(end)
            if text[start:end] in scores or (end - start == 1)
        ]
        best.append(max(found, key=lambda total: total[0]))
    return best[-1][1]


def expected_ids(model: SentencePieces, text: str) -> list[int]:
    ids = {piece.text: id for id, piece in enumerate(model.pieces)}
    found = []
    cut = joined_pairs if model.algorithm.name == "BPE" else best_total
    for part in cut(model, normalized(model, text)):
        if part in ids:
            found.append(ids[part])
        elif model.byte_fallback:
            found += [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        elif not found or found[-1] != 0:
            found.append(0)  # unknown characters that follow each other are one
    return found


TEXTS = st.text(st.sampled_from("▁   abcdehilnorst0x<>4é\n🦊Z")) | st.lists(
    st.sampled_from([*(word.replace("▁", " ") for word in WORDS), "<0x41>", "<b>", "<bos>", "   ", "Zé🦊", " "])
).map("".join)


@pytest.mark.parametrize("name", MODELS)
@examples(300)
@given(text=TEXTS)
def test_ids_are_those_of_sentencepiece_and_give_the_text_back(name: str, text: str) -> None:
    assume("<s>" not in text)
    model, tokenizer = made(name)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == expected_ids(model, text)
    whole = normalized(model, text).replace("▁", " ")
    dropped = len(whole) if model.remove_extra_whitespaces else int(model.add_dummy_prefix)
    whole = whole[:dropped].lstrip(" ") + whole[dropped:]
    if model.byte_fallback:
        assert tokenizer.decode(ids, skip_special_tokens=False) == whole


def test_a_known_text_in_the_layout_of_llama_2() -> None:
    _, tokenizer = made("llama-2")
    assert tokenizer.encode("the hello  Z<0x41>").tokens == [
        "▁the", "▁hello", "▁▁", "<0x5A>", "<", "0x", "4", "<0x31>", ">",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [("llama-2", "  the  the"), ("gemma", "   the  the"), ("unigram", "the  the")]
)
def test_spaces_at_the_start_are_dropped_as_by_sentencepiece(name: str, text: str) -> None:
    """What sentencepiece 0.2.3 makes of the same pieces of the same models."""
    model, tokenizer = made(name)
    ids = {piece.text: id for id, piece in enumerate(model.pieces)}
    assert tokenizer.decode([ids[piece] for piece in ("▁", "▁", "▁the", "▁", "▁the")]) == text


def test_spaces_at_the_end_and_in_the_middle_are_dropped_as_by_sentencepiece() -> None:
    _, tokenizer = made("unigram")
    for text in ("the hello", "  the   hello  ", "the hello ▁", "the hello▁▁ "):
        assert tokenizer.encode(text).tokens == ["▁the", "▁hello"]
    for text in ("", "  ", "▁", " ▁ "):
        assert tokenizer.encode(text).tokens == []


@pytest.mark.parametrize("name", MODELS)
def test_one_more_text_with_all_of_it(name: str) -> None:
    model, tokenizer = made(name)
    text = " the   hello and<0x41> <b>er\n🦊🦊Z  "
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected_ids(model, text)


def map_of_one_character(character: str, text: str) -> bytes:
    """The normalizer's table with one row, as a double array: the character's entry, and the place of its text."""
    entries, code = [0] * 256, ord(character)
    entries[0] = 1 << 10  # the offset of all entries is 1
    entries[1 ^ code] = 1 << 10 | 1 << 8 | code
    entries[code] = 1 << 31
    return struct.pack("<257I", 4 * 256, *entries) + text.encode() + b"\0"


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_characters_are_replaced_by_the_map_in_the_file(algorithm: str) -> None:
    table = map_of_one_character("Q", "hel")
    content = model_file([*SPECIAL, *scored([*WORDS, *LETTERS])], algorithm, normalizer=[(2, table)])
    tokenizer = make_tokenizer(read_sentencepieces(content, "m"), Additions(), "m")
    assert tokenizer.encode("Qlo the  Q").ids == tokenizer.encode("hello the hel").ids
    assert tokenizer.encode("hello the hel").tokens == ["▁hello", "▁the", "▁", "hel"]


def write(path: Path, name: str, **files: Any) -> Path:
    (path / "tokenizer.model").write_bytes(MODELS[name]())
    for file, content in files.items():
        (path / f"{file}.json").write_text(json.dumps(content))
    return path


def test_a_folder_with_tokenizer_model_alone_gets_its_tokenizer_json(tmp_path: Path) -> None:
    ensure_fast_tokenizer(write(tmp_path, "llama-2"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("the").tokens == ["<s>", "▁the"]
    assert tokenizer.encode("<s>the</s>", add_special_tokens=False).tokens == ["<s>", "▁the", "</s>"]
    assert tokenizer.decode(tokenizer.encode("the hello🦊").ids) == "the hello🦊"


def test_tokens_of_the_other_files_are_added(tmp_path: Path) -> None:
    size = len(made("llama-2")[0].pieces)
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "<s>"}, "eos_token": "</s>",
        "add_bos_token": False, "add_eos_token": True,
        "added_tokens_decoder": {"2": {"content": "</s>", "special": True}, str(size + 1): {"content": "<tool>"}},
    }  # fmt: skip
    special = {"pad_token": "[PAD]", "additional_special_tokens": ["<|x|>"]}
    ensure_fast_tokenizer(
        write(tmp_path, "llama-2", tokenizer_config=config, special_tokens_map=special, added_tokens={"[PAD]": size})
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("the[PAD]<tool>").ids
    assert ids == [tokenizer.token_to_id("▁the"), size, size + 1, 2]
    assert tokenizer.decode(ids) == "the<tool>"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"added_tokens": {"<new>": 9000}}, "the token '<new>' cannot have the id 9000"),
        ({"added_tokens": {"<new>": "x"}}, "added_tokens.json has a token without a number"),
        ({"tokenizer_config": {"added_tokens_decoder": {"300": {}}}}, "tokenizer_config.json has a token without a"),
        ({"tokenizer_config": {"bos_token": "<none>"}}, "has no token '<none>', which the other files name"),
        ({"tokenizer_config": {"tokenizer_class": "T5Tokenizer"}}, "install sentencepiece, with which one can be made"),
    ],
)
def test_what_cannot_be_made_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json") as refused:
        ensure_fast_tokenizer(write(tmp_path, "llama-2", **files))
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            model_file([*SPECIAL, ("a", 0.0, TokenKind.NORMAL)], "word"),
            "its algorithm is WORD, neither BPE nor Unigram",
        ),
        (model_file(SPECIAL, "bpe", trainer=[(24, 1)]), "it puts spaces behind words"),
        (model_file(SPECIAL, "bpe", normalizer=[(5, 0)]), "it keeps spaces as they are"),
        (model_file([*SPECIAL, ("a", 0.0, TokenKind.UNUSED)], "bpe"), "some of its pieces are unused"),
        (
            model_file([*SPECIAL, ("a", 0.0, TokenKind.USER_DEFINED)], "bpe"),
            "symbols of its user's, and a space before",
        ),
    ],
)
def test_a_model_that_cannot_be_imitated_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(WeightsError, match=told):
        make_tokenizer(read_sentencepieces(content, "m"), Additions(), "m")


@pytest.mark.parametrize(
    "content",
    [
        b"broken", b"", b"\x0a\xff", model_file(SPECIAL[1:], "bpe"), model_file([*SPECIAL, SPECIAL[0]], "bpe"),
        model_file([("a", float("nan"), TokenKind.NORMAL), *SPECIAL], "bpe"), message((1, 5)), message((2, "\n")),
        message((1, message((1, b"\xff")))), message((1, message((2, 1.0)))), message((1, message((1, "a"), (3, 9)))),
        message((1, message((1, "a"), (3, 0)))),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_sentencepiece_model_is_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(WeightsError, match=r"^m is not a sentencepiece model") as refused:
        read_sentencepieces(content, "m")
    assert len(str(refused.value).splitlines()) == 1


@examples(300)
@given(cut=st.integers(0, 10**6), noise=st.binary(max_size=4))
def test_any_bytes_are_read_or_refused(cut: int, noise: bytes) -> None:
    content = llama_2()
    place = cut % len(content)
    try:
        read_sentencepieces(content[:place] + noise + content[place + len(noise) :], "m")
    except WeightsError as refused:
        assert len(str(refused).splitlines()) == 1


def test_the_tokens_around_a_text_are_those_of_the_model_by_default(tmp_path: Path) -> None:
    additions = read_additions(tmp_path, made("llama-2")[0])
    assert (additions.before, additions.after) == ("<s>", None)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert read_additions(tmp_path, made("llama-2")[0]).before is None
