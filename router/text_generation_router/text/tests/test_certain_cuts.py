"""The parts of a text, tokenized one by one, give the ids of the whole text."""

import asyncio
import json
import sys
import time
from functools import cache
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import text_generation_server
from text_generation_common.tests.examples import examples
from text_generation_router.scheduling.request import Share
from text_generation_router.text.tokens.certain_cuts import SPLITTING_PATTERNS, cut_into_parts
from text_generation_router.text.tokens.tokenization import Span, TextTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock,  and\n\n we'll see: the naïve café!",
    "    def run(self):\n        return self.run_all(x for x in range(10))  # 'tis the lazy dog's a b c",
] * 4
SPLITTING = sorted(SPLITTING_PATTERNS)


def finished(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that adds special tokens around each text, and has added tokens that may occur within a text."""
    tokenizer.add_special_tokens(["<s>", "</s>", AddedToken("<mask>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens(["<1  2>", "  ", AddedToken("[1]", single_word=True)])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)]
    )
    return tokenizer


def byte_level(pre_tokenizer=None, normalizer=None, **byte_options) -> Tokenizer:
    """A byte-level BPE tokenizer. `pre_tokenizer` runs before the ByteLevel pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": pre_tokenizer is None} | byte_options)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, last]) if pre_tokenizer else last
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finished(tokenizer)


def split(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_fallback(normalizer=None, pre_tokenizer=None) -> Tokenizer:
    """A byte-fallback BPE tokenizer. As in Llama 2's vocabulary, a token has a space only at its start, or is all
    spaces."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {token: i for i, token in enumerate([*model["vocab"], *(f"<0x{byte:02X}>" for byte in range(256))])}
    runs = [("▁", "▁"), ("▁▁", "▁▁")]
    for left, right in runs:
        vocab.setdefault(left + right, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]] + runs
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return finished(tokenizer)


def unigram(scheme: str, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finished(tokenizer)


LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
DEMO = Path(text_generation_server.__file__).parent / "demo_model" / "tokenizer.json"

TOKENIZERS = {
    "demo model": Tokenizer.from_file(str(DEMO)),
    "byte-level": byte_level(),
    "byte-level, spaces before": byte_level(add_prefix_space=True),
    "byte-level, composed": byte_level(normalizer=normalizers.NFC()),
    "byte-level, decomposed, lower case": byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    ),
    "byte-level, digits and punctuation apart": byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(True)]), use_regex=True
    ),
    **{f"byte-level, pattern {i}": byte_level(split(pattern)) for i, pattern in enumerate(SPLITTING)},
    "byte-fallback": byte_fallback(LLAMA_2),
    "byte-fallback, nothing before": byte_fallback(normalizers.Replace(" ", "▁")),
    "byte-fallback, split at spaces": byte_fallback(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "byte-fallback, unsplit Metaspace": byte_fallback(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "Unigram, always": unigram("always"),
    "Unigram, first": unigram("first", normalizers.NFKC()),
    "Unigram, never": unigram("never"),
}
CUTTING = {name: TextTokenizer.of(t, workers=1, max_waiting=1, part_chars=1) for name, t in TOKENIZERS.items()}

PIECES = st.sampled_from([
    "a", " a", "b ", " the", "fox", "'s", "'", " ", "  ", "\n", "\t", "é", "e\u0301", "\u0301", "\u200d", "\u00a0",
    "▁", "▁a", "1", "42", "!", ".", "的", "😀", "<s>", "</s>", "<mask>", "<1  2>", "[1]", "<|user|>", "\ufb01", "O",
])  # fmt: skip
TEXTS = st.lists(PIECES, min_size=1, max_size=25).map("".join) | st.text(max_size=30)


@cache
def whole(name: str) -> TextTokenizer:
    return TextTokenizer.of(TOKENIZERS[name], workers=1, max_waiting=1, part_chars=10**6)


def run(coroutine):
    return asyncio.run(coroutine)


async def spans_of(tokenizer: TextTokenizer, text: str) -> list[Span]:
    return [span async for spans in tokenizer.spans(text, Share(), list) for span in spans]


@pytest.mark.parametrize("name", CUTTING)
def test_every_tokenizer_of_the_table_has_cuts(name):
    text = "the fox and the dog"
    assert CUTTING[name]._joints is not None
    assert len(cut_into_parts(text, 1)) == 5


@pytest.mark.parametrize("name", CUTTING)
@given(text=TEXTS, special=st.booleans(), keep_last=st.none() | st.integers(1, 12))
@examples(60)
def test_parts_have_the_ids_of_the_whole(name, text, special, keep_last):
    whole = TOKENIZERS[name].encode(text, add_special_tokens=special).ids
    found = run(CUTTING[name].encode(text, special, Share(), keep_last))
    assert found.values == tuple(whole if keep_last is None else whole[-keep_last:])
    assert found.is_exact and found.count == len(found.values)


@pytest.mark.parametrize("name", CUTTING)
@given(text=TEXTS)
@examples(30)
def test_parts_have_the_spans_of_the_whole(name, text):
    assert run(spans_of(CUTTING[name], text)) == run(spans_of(whole(name), text))


@given(text=TEXTS, part_chars=st.integers(1, 20))
def test_parts_make_up_the_text(text, part_chars):
    parts = cut_into_parts(text, part_chars)
    assert "".join(text[part.start + part.has_context : part.stop] for part in parts) == text
    assert all(part.stop - part.start >= part_chars for part in parts[1:])


@pytest.mark.parametrize("name", ["demo model", "byte-level", "byte-fallback", "Unigram, always"])
@pytest.mark.parametrize("char", ["x", " ", "1", "的"])
def test_a_run_of_one_character_is_not_cut(name, char):
    """The text is so long that the search for a cut goes through many windows."""
    text = char * 100_000
    assert len(cut_into_parts(text, 1)) == 1
    whole = TOKENIZERS[name].encode(text).ids
    assert run(CUTTING[name].encode(text, True, Share(), keep_last=5)).values == tuple(whole[-5:])


def changed(change) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZERS["byte-level"].to_str())
    change(tokenizer)
    return tokenizer


def without_cuts() -> list[Tokenizer]:
    def spaced_vocabulary() -> Tokenizer:
        content = json.loads(TOKENIZERS["byte-fallback"].to_str())
        model = content["model"]
        model["vocab"]["e▁"] = len(model["vocab"])
        model["merges"].append(["e", "▁"])
        return Tokenizer.from_str(json.dumps(content))

    def unsplit_unigram() -> Tokenizer:
        tokenizer = Tokenizer.from_str(TOKENIZERS["Unigram, always"].to_str())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        return tokenizer

    return [
        spaced_vocabulary(),
        unsplit_unigram(),
        byte_level(split(r"[a-z ]+|[^a-z ]+")),
        byte_level(pre_tokenizers.Split(Regex(SPLITTING[0]), "merged_with_next")),
        byte_level(pre_tokenizers.Whitespace()),
        changed(lambda t: t.add_tokens(["word"])),
        changed(lambda t: t.add_tokens(["e t>"])),
        changed(lambda t: t.add_tokens([AddedToken(" >", lstrip=True)])),
        changed(lambda t: t.add_special_tokens([" "])),
        changed(lambda t: setattr(t, "normalizer", normalizers.Replace("a", " "))),
        changed(lambda t: setattr(t, "normalizer", normalizers.Strip())),
    ]


@pytest.mark.parametrize("tokenizer", without_cuts())
def test_with_any_other_tokenizer_no_text_is_cut(tokenizer):
    text = "the fox and the dog " * 3
    uncut = TextTokenizer.of(tokenizer, workers=1, max_waiting=1, part_chars=1)
    assert uncut._joints is None
    assert run(uncut.encode(text, True, Share())).values == tuple(tokenizer.encode(text).ids)
    uncut.close()


def test_the_beginning_of_a_text_that_is_too_long_is_not_tokenized():
    tokenizer = CUTTING["byte-level"]
    found = run(tokenizer.encode("the quick brown fox " * 50, True, Share(), most=10))
    assert found.values == () and 40 < found.count < 60 and not found.is_exact


def test_other_threads_run_while_a_cut_is_searched_for():
    searching = Thread(target=cut_into_parts, args=("a" * 200_000, 1000))
    before, turns = sys.getswitchinterval(), 0
    sys.setswitchinterval(60)  # no thread is made to give the interpreter lock away
    try:
        searching.start()
        while searching.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(before)
        searching.join()
    assert turns > 50, "200 windows of text are searched"
