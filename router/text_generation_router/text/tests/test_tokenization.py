import asyncio
import json
import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from text_generation_router.errors import StartError
from text_generation_router.text.length_bound import byte_symbols, max_chars_per_token
from text_generation_router.text.tokenization import TextTokenizer


def trained() -> Tokenizer:
    """Byte-level BPE with `<s>` in front of what is encoded with special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained()


def bound_of(tokenizer: Tokenizer) -> int | None:
    return max_chars_per_token(json.loads(tokenizer.to_str()))


@pytest.fixture
def loaded(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = TextTokenizer.load(tmp_path, workers=2)
    yield loaded
    loaded.close()


def test_special_tokens_are_added_on_demand(loaded):
    plain = asyncio.run(loaded.encode("the fox", add_special_tokens=False))
    assert asyncio.run(loaded.encode("the fox", add_special_tokens=True)) == (0, *plain)


def test_truncation_keeps_the_tail(loaded):
    ids = asyncio.run(loaded.encode("the lazy dog", add_special_tokens=True))
    assert asyncio.run(loaded.encode("the lazy dog", add_special_tokens=True, keep_last=2)) == ids[-2:]


def test_a_files_own_truncation_and_padding_are_off(tmp_path):
    tokenizer = trained()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = TextTokenizer.load(tmp_path, workers=1)
    assert 2 < len(asyncio.run(loaded.encode("the quick brown fox", add_special_tokens=True))) < 64


def test_spans_cover_the_text_in_bytes(loaded):
    text = "the é fox 🦊"
    special, *spans = asyncio.run(loaded.spans(text))
    assert (special.text, special.start, special.stop) == ("", 0, 0)
    assert spans[-1].stop == len(text.encode())
    assert all(text.encode()[span.start : span.stop].decode() == span.text for span in spans)


def test_without_a_fast_tokenizer_the_start_fails_in_one_line(tmp_path):
    with pytest.raises(StartError, match=r"has no tokenizer\.json") as caught:
        TextTokenizer.load(tmp_path, workers=1)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="cannot be read as a tokenizer"):
        TextTokenizer.load(tmp_path, workers=1)


def test_a_megabyte_of_text_does_not_stall_the_event_loop(loaded):
    chooser = random.Random(1)
    text = "".join(chooser.choices(string.ascii_lowercase + " ", k=1_000_000))
    lags = []

    async def run() -> int:
        loop = asyncio.get_running_loop()
        encoding = asyncio.ensure_future(loaded.encode(text, add_special_tokens=True))
        while not encoding.done():
            asked = loop.time()
            await asyncio.sleep(0.001)
            lags.append(loop.time() - asked - 0.001)
        return len(encoding.result())

    assert asyncio.run(run()) > 100_000
    assert len(lags) > 10 and max(lags) < 0.05


def test_byte_symbols_are_the_librarys():
    assert set(byte_symbols()) == set(pre_tokenizers.ByteLevel.alphabet())


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.text("the quick\u0301 \n", max_size=60))
def test_no_text_has_fewer_tokens_than_the_bound_says(text):
    for tokenizer, bound in BOUNDED:
        assert len(text) <= bound * len(tokenizer.encode(text, add_special_tokens=False).ids)


def bounded() -> list[tuple[Tokenizer, int]]:
    plain, composed = trained(), trained()
    composed.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "bb")])
    pairs = [(tokenizer, bound_of(tokenizer)) for tokenizer in (plain, composed)]
    assert all(bound is not None for _, bound in pairs)
    return [(tokenizer, bound) for tokenizer, bound in pairs if bound is not None]


BOUNDED = bounded()


def test_tokenizers_that_lose_text_have_no_bound():
    stripping, replacing, removing, swallowing = trained(), trained(), trained(), trained()
    stripping.normalizer = normalizers.Strip()
    replacing.normalizer = normalizers.Replace("aaa", "b")
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    swallowing.add_special_tokens([AddedToken("<m>", lstrip=True)])
    few_bytes = Tokenizer(models.BPE({"a": 0}, []))
    few_bytes.pre_tokenizer = pre_tokenizers.ByteLevel()
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for tokenizer in (stripping, replacing, removing, swallowing, few_bytes, words):
        assert bound_of(tokenizer) is None


def test_byte_fallback_has_a_bound_where_all_bytes_have_tokens():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256}
    assert bound_of(Tokenizer(models.BPE(vocab, [], byte_fallback=True))) == 6
    del vocab["<0x41>"]
    assert bound_of(Tokenizer(models.BPE(vocab, [], byte_fallback=True))) is None
