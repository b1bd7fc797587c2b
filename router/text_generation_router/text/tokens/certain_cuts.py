"""Finds places where a text can be cut so that its parts, tokenized one by one, certainly give the ids of the whole.

A cut lies between an ASCII letter and a single space that is followed by another ASCII letter. No step of the accepted
tokenizers joins the text on the left of a cut with the text on its right, or looks across the cut:

- added tokens: no added token contains such a place, ends with a letter, or depends on whitespace or word borders next
  to a letter or space;
- normalizers: letters stay as they are, and the space stays or becomes one other character; neither composes with its
  neighbours, because a character that composes with a letter or space comes after it and is not an ASCII letter;
- the pre-tokenizer splits at the cut, whatever the text before and after;
- or there is no such pre-tokenizer and BPE merges over the whole text, but no token of the vocabulary has a space after
  a letter, so no merge crosses the cut.

Any other tokenizer has no certain cuts. Unigram over a text that is not split has none, even if no token crosses the
cut: Unigram adds up scores from the left, and their rounding can decide between two nearly equal tokenizations.

Many tokenizers treat the beginning of a text specially (they put a space before it). So each part is tokenized together
with the letter before it, and the ids of that letter are then removed.
"""

import re
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

from text_generation_router.text.tokens.length_bound import flat_steps

# Facts about a tokenizer that are needed to join the token ids of a text's parts, which certain_cuts.py cuts.


@dataclass(frozen=True, slots=True)
class Joints:
    front: tuple[int, ...]  # special tokens before every text
    back: tuple[int, ...]  # special tokens behind every text
    ids_of_letter: Mapping[str, int]  # number of token ids of each ASCII letter alone

    @classmethod
    def of(cls, tokenizer: Tokenizer, content: Mapping[str, Any]) -> Self | None:
        """Finds the facts. `content`: the content of tokenizer.json. Returns None if texts cannot be cut for this
        tokenizer.
        """
        added = tokenizer.get_added_tokens_decoder().values()
        normalizer = tokenizer.normalizer
        normalized = [normalizer.normalize_str(token.content) for token in added if normalizer and token.normalized]
        if not has_certain_cuts(content, normalized):
            return None
        plain = tokenizer.encode("a a", add_special_tokens=False).ids
        encoding = tokenizer.encode("a a", add_special_tokens=True)
        mask = encoding.special_tokens_mask
        if mask.count(0) != len(plain):
            return None
        begin = mask.index(0)
        front, back = encoding.ids[:begin], encoding.ids[begin + len(plain) :]
        if encoding.ids != [*front, *plain, *back]:
            return None
        letters = string.ascii_letters
        encodings = tokenizer.encode_batch_fast(list(letters), add_special_tokens=False)
        return cls(
            tuple(front), tuple(back), {letter: len(e.ids) for letter, e in zip(letters, encodings, strict=True)}
        )


CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
SPACES = " \u2581"  # SentencePiece models write a space as U+2581
# An added token that matches this pattern could begin at, end at or cross a cut.
AT_A_CUT = re.compile(rf"[A-Za-z][{SPACES}]|[{SPACES}][A-Za-z]|[A-Za-z]\Z|\A[{SPACES}]\Z")
LETTER_SPACE = re.compile(rf"[A-Za-z][{SPACES}]")
BESIDE_A_CUT = re.compile(rf"[A-Za-z{SPACES}]")

# Characters searched at a time. The search for a cut holds the interpreter lock, so it must be short.
WINDOW_CHARS = 1024

# Regular expressions of pre-tokenizers. They never match a letter followed by a space, but may match a space followed
# by a letter. So a match ends at every cut, and the matches after the cut do not depend on the text before.
SPLITTING_PATTERNS = frozenset(
    {
        # How GPT-2's pre-tokenizer splits a text.
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # How Llama 3's pre-tokenizer splits a text.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # How the pre-tokenizer of Qwen 2 and 3 splits a text.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # How Qwen 3.5's pre-tokenizer splits a text.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # How GPT-4o's pre-tokenizer splits a text.
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # How the pre-tokenizer of Mistral's Tekken splits a text.
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Pre-tokenizers that look at one character at a time, so they split a part just as they split the whole text.
LOCAL_PRE_TOKENIZERS = frozenset({"Digits", "Punctuation"})
NEUTRAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})


@dataclass(frozen=True, slots=True)
class TextPart:
    """The part text[start:stop]. If `has_context`, its first character is the letter before the part (see the top of
    this file).
    """

    start: int
    stop: int
    has_context: bool


def has_certain_cuts(tokenizer: Mapping[str, Any], added_contents: Sequence[str]) -> bool:
    """Whether texts can be cut safely with a tokenizer. `tokenizer`: the content of tokenizer.json. `added_contents`:
    the normalized texts of the added tokens that are matched with normalized text.
    """
    added = tokenizer.get("added_tokens") or []
    contents = [*(token["content"] for token in added), *added_contents]
    if any(map(AT_A_CUT.search, contents)) or any(map(_looks_around, added)):
        return False
    normalizers = flat_steps(tokenizer.get("normalizer"), "normalizers")
    if not all(map(_keeps_words, normalizers)):
        return False
    model = tokenizer.get("model") or {}
    if model.get("type") not in ("BPE", "Unigram") or model.get("dropout"):
        return False
    steps = flat_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    spaces_are_gone = any(map(_replaces_spaces, normalizers))
    if not spaces_are_gone and _splits_words(steps):
        return True
    return _splits_nothing(steps, spaces_are_gone) and _merges_words_apart(model)


def cut_into_parts(text: str, part_chars: int) -> list[TextPart]:
    """Cuts the text into parts, in its order. A part has at least `part_chars` characters, and begins at the nearest
    cut before. Holds the interpreter lock for one window of text at a time.
    """
    parts: list[TextPart] = []
    stop = len(text)
    while stop:
        letter = _last_cut(text, stop - part_chars)
        parts.append(TextPart(letter, stop, bool(letter)))
        stop = letter + 1 if letter else 0
    return parts[::-1]


def _last_cut(text: str, end: int) -> int:
    """Position of the last cut before `end`, given as the position of the letter before it; 0 if there is no cut."""
    while end > 1:
        begin = max(end - WINDOW_CHARS, 1)
        # + 2 because the pattern also reads the space and the letter after the last position.
        if last := max((found.start() for found in CUT.finditer(text, begin, end + 2)), default=0):
            return last
        end = begin
        time.sleep(0)  # gives the interpreter lock to another thread: by itself a thread keeps it for 5 ms
    return 0


def _looks_around(token: Mapping[str, Any]) -> bool:
    """Whether the added token's match depends on a letter or space beside it, where a cut could be, or includes it."""
    first, last = token["content"][:1], token["content"][-1:]
    single = token.get("single_word")
    return bool(
        ((single or token.get("lstrip")) and BESIDE_A_CUT.match(first))
        or ((single or token.get("rstrip")) and BESIDE_A_CUT.match(last))
    )


def _keeps_words(normalizer: Mapping[str, Any]) -> bool:
    kind = normalizer.get("type")
    if kind == "Prepend":  # changes only the beginning of the text, where there is no cut
        return normalizer.get("prepend") == SPACES[1]
    if kind == "Replace":
        return _replaces_spaces(normalizer)
    return kind in NEUTRAL_NORMALIZERS


def _replaces_spaces(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") != "Replace":
        return False
    return normalizer["pattern"].get("String") == " " and normalizer.get("content") == SPACES[1]


def _splits_words(steps: Sequence[Mapping[str, Any]]) -> bool:
    for step in steps:
        if step["type"] in LOCAL_PRE_TOKENIZERS:
            continue
        if step["type"] == "ByteLevel":
            return bool(step.get("use_regex", True))
        if step["type"] == "Metaspace":
            return bool(step.get("split", True)) and step.get("replacement") == SPACES[1]
        is_isolated = step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
        return is_isolated and step["pattern"].get("Regex") in SPLITTING_PATTERNS
    return False


def _splits_nothing(steps: Sequence[Mapping[str, Any]], spaces_are_gone: bool) -> bool:
    """Whether the pre-tokenizer leaves the text whole: Metaspace without splitting; or, if the normalizer replaces all
    spaces, no pre-tokenizer or a pre-tokenizer that splits at spaces."""
    if not steps:
        return spaces_are_gone
    if len(steps) > 1:
        return False
    [step] = steps
    if step["type"] == "Metaspace":
        return not step.get("split", True) and step.get("replacement") == SPACES[1]
    return spaces_are_gone and step["type"] == "Split" and step["pattern"].get("String") == " "


def _merges_words_apart(model: Mapping[str, Any]) -> bool:
    vocab = model.get("vocab") or {}
    return (
        model["type"] == "BPE"
        and not model.get("ignore_merges")  # ignore_merges turns a part that is itself a token into that token
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        # Otherwise it would be an unknown character, and be merged with unknown characters beside it.
        and SPACES[1] in vocab
        and not any(map(LETTER_SPACE.search, vocab))
    )
