"""The largest number of characters that one token can cover. It serves to refuse prompts that are too long before
tokenizing.

The bound must never refuse a prompt that fits. So it exists only for tokenizers that lose no text: byte-level or
byte-fallback BPE whose normalizer and pre-tokenizer neither delete text nor merge text without limit. With any other
tokenizer (for example if it strips whitespace or merges unknown characters) one token may cover any number of
characters, and only the payload limit bounds a prompt.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

# The steps of a tokenizer's normalizer, pre-tokenizer or decoder, taken out of the nested lists of tokenizer.json.


def flat_steps(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps in order: `step` itself or, if it is a `Sequence`, the steps that it lists under `key`. None has no
    steps.
    """
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in flat_steps(part, key)]
    return [step]


# Most code points that Unicode composition joins into one (the longest canonical decomposition).
MAX_COMPOSED = 4
LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace"}


def max_chars_per_token(tokenizer: dict[str, Any]) -> int | None:
    """The bound, in characters. `tokenizer`: the content of tokenizer.json. Returns None if there is no bound."""
    model = tokenizer.get("model") or {}
    vocab = model.get("vocab")
    added = tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE" or not isinstance(vocab, dict) or not vocab:
        return None
    steps = flat_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    covers_every_byte = _has_all_bytes(model, vocab, steps)
    # A token with lstrip or rstrip covers all whitespace before or after it, of any length.
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    factor = _normalizer_factor(flat_steps(tokenizer.get("normalizer"), "normalizers"))
    if not covers_every_byte or swallows or factor is None or not all(map(_keeps_text, steps)):
        return None
    return factor * max(len(text) for text in [*vocab, *(token["content"] for token in added)])


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return step["type"] in LOSSLESS_PRE_TOKENIZERS


def _normalizer_factor(steps: Sequence[Mapping[str, Any]]) -> int | None:
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor = MAX_COMPOSED
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _has_all_bytes(model: dict[str, Any], vocab: dict[str, int], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every byte has a token: BPE drops bytes without one."""
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return any(step["type"] == "ByteLevel" for step in steps) and all(symbol in vocab for symbol in byte_symbols())


def byte_symbols() -> list[str]:
    """The characters that stand for the bytes 0 to 255 in byte-level vocabularies (GPT-2's table): printable characters
    for themselves, characters from U+0100 on for the other bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = count(256)
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
