"""Small tokenizers with the layouts of real ones, and the bytes that each of their tokens adds to a text.

The bytes are written down beside the tokens, so the tests do not depend on the tested code for them."""

from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import Decoder

SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = ("a", "the", " the", " end", "  ", "n", ".", "é", " 🦊", "�", "end.And", "\n")
# Byte strings of tokens that begin or end inside a character.
SHARDS = (b"\xf0\x9f", b"\xa6\x8a", b"\x9f\xa6\x8a!", b"\xa9 x", b" \xc3", b"\xef\xbf", b"\xbd\xbd")


@dataclass(frozen=True)
class HandMade:
    name: str
    tokenizer: Tokenizer
    bytes_of: dict[int, bytes]  # bytes of each token id; special tokens have none

    @cached_property
    def special(self) -> dict[int, str]:
        return {self.tokenizer.token_to_id(text): text for text in SPECIAL}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def bytes_of_run(self, ids: list[int]) -> bytes:
        return b"".join(self.bytes_of[i] for i in ids)


def finish(name: str, tokenizer: Tokenizer, bytes_of_token: dict[str, bytes]) -> HandMade:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return HandMade(name, tokenizer, {tokenizer.token_to_id(token): data for token, data in bytes_of_token.items()})


def byte_level() -> HandMade:
    """The layout of GPT-2 and Llama 3: each byte is written as a character of a table."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    symbol = {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}
    runs = {bytes([byte]) for byte in range(256)} | {word.encode() for word in WORDS} | set(SHARDS)
    table = {"".join(symbol[byte] for byte in run): run for run in sorted(runs)}
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(table)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finish("byte-level", tokenizer, table)


def llama_2(metaspace: bool) -> HandMade:
    """SentencePiece BPE with byte fallback, as converters write it: older files have a normalizer, newer files a
    Metaspace pre-tokenizer."""
    table = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    table |= {word.replace(" ", "▁"): word.encode() for word in (*WORDS, " ") if word != "\n"}
    vocab = {token: i for i, token in enumerate([*SPECIAL, *table])}
    merges = [("▁", "▁")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = strip_first_space()
    return finish(f"llama-2, {'pre-tokenizer' if metaspace else 'normalizer'}", tokenizer, table)


def strip_first_space() -> Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def unigram(byte_fallback: bool) -> HandMade:
    table = {word.replace(" ", "▁"): word.encode() for word in (*WORDS, " ", "🦊", "c", "f", "u", "s", "e", "r")}
    decoder: Decoder = decoders.Metaspace()
    if byte_fallback:
        table |= {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    vocab = [("<unk>", -20.0), *((token, -1.0 - len(token) / 99) for token in table)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return finish(f"unigram{', byte fallback' if byte_fallback else ''}", tokenizer, table)


HAND_MADE = (byte_level(), llama_2(metaspace=False), llama_2(metaspace=True), unigram(False), unigram(True))
