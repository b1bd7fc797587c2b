"""Where a text can be cut so that its parts, tokenized one by one, certainly have the ids of the whole.

A cut is made between an ASCII letter and a single space that another ASCII letter follows. There, none of the steps of
the tokenizers known here joins what is left of the cut with what is right of it, or looks across it:

- added tokens: none of them contains the place, ends with a letter, or takes whitespace or word borders into account
  beside a letter or space;
- normalizers: letters and the space stay as they are, or the space becomes one other character; nothing composes with
  them, as what could compose with a letter or a space stands behind it and is not a letter;
- a pre-tokenizer splits there, whatever stands before and after;
- without such a pre-tokenizer BPE merges over the whole text, but the vocabulary has no token with a space behind a
  letter, so no merge leads over the place.

Every other tokenizer has no certain cuts. Unigram over a text that is not split has none, even if no token leads over
the place: it adds up scores from the left, and their rounding can decide between two ways that are nearly equal.

The beginning of a text is special to many tokenizers (a space is put before it). So a part is tokenized together with
the letter before it, whose ids are then taken away.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
SPACES = " \u2581"  # U+2581 is what SentencePiece's models have for a space
# An added token with this could begin, end, or lie across a cut.
AT_A_CUT = re.compile(rf"[A-Za-z][{SPACES}]|[{SPACES}][A-Za-z]|[A-Za-z]\Z|\A[{SPACES}]\Z")
LETTER_SPACE = re.compile(rf"[A-Za-z][{SPACES}]")
BESIDE_A_CUT = re.compile(rf"[A-Za-z{SPACES}]")

# A cut is looked for within one window at a time: the search holds the interpreter lock.
WINDOW_CHARS = 1024

# Patterns of which no match leads from a letter to a space, while one may begin with a space and a letter. So a match
# ends at every cut, and what comes after it does not depend on what was before.
SPLITTING_PATTERNS = frozenset(
    {
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Qwen 3.5
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-4o
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Mistral's Tekken
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Pre-tokenizers that look at one character at a time, and so do the same to a part as to the whole.
LOCAL_PRE_TOKENIZERS = frozenset({"Digits", "Punctuation"})
NEUTRAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})


@dataclass(frozen=True, slots=True)
class TextPart:
    """text[start:stop], whose first character belongs to the part before if `has_context`."""

    start: int
    stop: int
    has_context: bool


def has_certain_cuts(tokenizer: Mapping[str, Any], added_contents: Sequence[str]) -> bool:
    """`tokenizer` is the content of tokenizer.json; `added_contents` the texts of its added tokens after the
    normalizer, which it matches with normalized texts."""
    added = tokenizer.get("added_tokens") or []
    contents = [*(token["content"] for token in added), *added_contents]
    if any(map(AT_A_CUT.search, contents)) or any(map(_looks_around, added)):
        return False
    normalizers = _flatten(tokenizer.get("normalizer"), "normalizers")
    if not all(map(_keeps_words, normalizers)):
        return False
    model = tokenizer.get("model") or {}
    if model.get("type") not in ("BPE", "Unigram") or model.get("dropout"):
        return False
    steps = _flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")
    spaces_are_gone = any(map(_replaces_spaces, normalizers))
    if not spaces_are_gone and _splits_words(steps):
        return True
    return _splits_nothing(steps, spaces_are_gone) and _merges_words_apart(model)


def cut_into_parts(text: str, part_chars: int) -> list[TextPart]:
    """In the text's order. A part has `part_chars` characters, or more up to the next cut. Holds the interpreter lock
    for one window of text at a time."""
    parts: list[TextPart] = []
    stop = len(text)
    while stop:
        letter = _last_cut(text, stop - part_chars)
        parts.append(TextPart(letter, stop, bool(letter)))
        stop = letter + 1 if letter else 0
    return parts[::-1]


def _last_cut(text: str, end: int) -> int:
    """Where the letter of the last cut before `end` stands; 0 if there is none."""
    while end > 1:
        begin = max(end - WINDOW_CHARS, 1)
        # The space and the letter behind the last place are looked at as well.
        if last := max((found.start() for found in CUT.finditer(text, begin, end + 2)), default=0):
            return last
        end = begin
    return 0


def _looks_around(token: Mapping[str, Any]) -> bool:
    """Whether what stands beside the token decides on it or belongs to it, in places that a cut could be in."""
    first, last = token["content"][:1], token["content"][-1:]
    single = token.get("single_word")
    return bool(
        ((single or token.get("lstrip")) and BESIDE_A_CUT.match(first))
        or ((single or token.get("rstrip")) and BESIDE_A_CUT.match(last))
    )


def _flatten(step: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for part in step[key] for inner in _flatten(part, key)]
    return [step]


def _keeps_words(normalizer: Mapping[str, Any]) -> bool:
    kind = normalizer.get("type")
    if kind == "Prepend":  # at the beginning, where no part begins with a cut
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
    """Metaspace without splitting; or no pre-tokenizer at all, or one that splits at spaces, of which none is left."""
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
        and not model.get("ignore_merges")  # with it, a part that is itself a token would not be merged
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and SPACES[1] in vocab  # so it is not unknown, and unknown characters around it are not fused
        and not any(map(LETTER_SPACE.search, vocab))
    )
