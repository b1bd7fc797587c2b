import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import Decoder

from text_generation_router.text.tokens.token_bytes import TokenBytes

VOCAB = ["a", "##b", "c</w>", "d", ".", "é", "▁", "▁▁a", "<0xC3>", "<0x0a>", "<0xZZ>"]


def token_bytes(decoder: Decoder | None) -> TokenBytes:
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[]))
    tokenizer.decoder = decoder
    return TokenBytes(tokenizer)


def added(decoder: Decoder | None, token: str, previous: str | None = "a") -> bytes:
    return token_bytes(decoder).of(VOCAB.index(token), None if previous is None else VOCAB.index(previous))


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.BPEDecoder(suffix="</w>"), decoders.Metaspace(), decoders.Fuse()],
    ids=["none", "WordPiece", "BPEDecoder", "Metaspace", "Fuse"],
)
def test_pieces_add_up_to_what_the_library_decodes(decoder):
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    table = TokenBytes(tokenizer)
    for text in (["a", "##b", "d", "."], ["d", "c</w>", "a", "a"], ["▁▁a", "▁", "▁▁a"], ["é", "é"]):
        ids = [VOCAB.index(token) for token in text]
        previous: list[int | None] = [None, *ids]
        pieces = [table.of(*pair) for pair in zip(ids, previous, strict=False)]
        assert b"".join(pieces).decode() == tokenizer.decode(ids)


def test_the_bytes_of_a_token_never_include_its_neighbours_text():
    class Forgetful:
        """A tokenizer whose text of two tokens does not begin with the text of the first token."""

        decoder = None

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "mine" if ids == [1] else "not mine" if ids == [0, 1] else "it"

    assert TokenBytes(Forgetful()).of(1, 0) == b"mine"  # type: ignore[arg-type]


def test_only_hexadecimal_numbers_are_bytes():
    fallback = decoders.ByteFallback()
    assert added(fallback, "<0xC3>") == b"\xc3" and added(fallback, "<0x0a>") == b"\n"
    assert added(fallback, "<0xZZ>") == b"<0xZZ>" and added(decoders.Fuse(), "<0xC3>") == b"<0xC3>"


def test_the_first_token_alone_loses_its_space():
    strip = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    assert [added(strip, "▁▁a", previous) for previous in (None, "a")] == [b" a", b"  a"]
    assert [added(decoders.Metaspace(), "▁▁a", previous) for previous in (None, "a")] == [b"a", b"  a"]
    never = decoders.Metaspace(prepend_scheme="never")
    assert [added(never, "▁▁a", previous) for previous in (None, "a")] == [b"  a", b"  a"]


def test_an_id_without_a_token_adds_nothing():
    assert token_bytes(decoders.ByteLevel()).of(10**6, 0) == b""
