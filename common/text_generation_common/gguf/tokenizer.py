"""Makes the content of a tokenizer.json from the tokenizer that a GGUF file holds. The tokenizers library is not used
here: it reads the content later, in processes with limits.

A sentencepiece model (`llama`) has scores and no merges. A merge joins two tokens to a third, the one with the highest
score first. Where two of them with equal scores overlap, llama.cpp takes the left one, the library the first one of its
list. Models that sentencepiece has trained have no equal scores.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from text_generation_common.gguf.container import WHOLE, GgufHeader, shown
from text_generation_common.gguf.splits import SPLITTINGS, Step
from text_generation_common.gguf.vocabulary import PREFIX, TokenKind, TokenTable, read_vocabulary

SPACE = "\u2581"
# Characters of all tokens of a sentencepiece model together, where merges are looked for, those of all its merges, and
# the number of these. The largest in use have 1.7 and 5 million characters, and 0.6 million merges.
MAX_CHARS, MAX_MERGE_CHARS, MAX_MERGES = 4_000_000, 8_000_000, 800_000
# The merges that a file lists, with their lengths: characters of byte-level tokens take 1 or 2 bytes.
MAX_MERGE_BYTES = 2 * MAX_MERGE_CHARS + 8 * MAX_MERGES
MAX_FOUND_IN_TEXTS = 2**15  # in use: 6,400
FOUND_IN_TEXTS = (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.USER_DEFINED)

Json = dict[str, Any]


def tokenizer_file(header: GgufHeader) -> Mapping[str, Any] | bytes:
    """What tokenizer.json says; a whole one as it is, whose readers check it like any other."""
    read_vocabulary(header)
    return _bytes(header, WHOLE) if WHOLE in header.metadata else tokenizer_json(header)


def tokenizer_json(header: GgufHeader) -> Mapping[str, Any]:
    """The content of a tokenizer.json. WeightsError for a tokenizer that is broken, or of a kind that is not read."""
    vocabulary = read_vocabulary(header)
    found_in_texts = sum(kind in FOUND_IN_TEXTS for kind in vocabulary.kinds)
    if found_in_texts > MAX_FOUND_IN_TEXTS:
        raise header.error(
            f"{found_in_texts} of its tokens are for control or of the user, at most {MAX_FOUND_IN_TEXTS} are read"
        )
    make = {"llama": _sentencepiece, "gpt2": _byte_level, "t5": _unigram}[vocabulary.model]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, "phi-3" in _name(header) or "phi3" in _name(header)),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _around(vocabulary),
        **make(vocabulary, header),
    }


def _bytes(header: GgufHeader, key: str) -> bytes:
    """The bytes of an array; none without the key."""
    array = header.array(key)
    if array is None:
        return b""
    if array.numbers not in "Bb":
        raise header.error(f"{key} is not a list of bytes")
    return array.content()


def _name(header: GgufHeader) -> str:
    return header.text("general.name", "").lower()


def _added_tokens(vocabulary: TokenTable, swallows_spaces: bool) -> list[Json]:
    """`swallows_spaces`: all but a few tokens take the spaces behind them, as in Phi-3, whose files do not say it."""
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return [
        {
            "id": id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": swallows_spaces and text not in kept,
            "normalized": False,
            "special": kind != TokenKind.USER_DEFINED,
        }
        for id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in FOUND_IN_TEXTS
    ]


def _around(vocabulary: TokenTable) -> Json | None:
    ids = [id for id in (vocabulary.before, vocabulary.after) if id is not None]
    if not ids:
        return None

    def single(id: int | None) -> list[Json]:
        return [] if id is None else [{"SpecialToken": {"id": vocabulary.tokens[id], "type_id": 0}}]

    text = {"Sequence": {"id": "A", "type_id": 0}}
    named = {vocabulary.tokens[id]: id for id in ids}
    return {
        "type": "TemplateProcessing",
        "single": [*single(vocabulary.before), text, *single(vocabulary.after)],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]} for text, id in named.items()},
    }


def _bpe(vocabulary: TokenTable, merges: Iterable[Sequence[str]], **settings: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: id for id, text in enumerate(vocabulary.tokens)},
        "merges": list(merges),
    } | settings


def _byte_level(vocabulary: TokenTable, header: GgufHeader) -> Json:
    splitting = SPLITTINGS[vocabulary.pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_split, splitting.steps), level]},
        "decoder": level,
        "model": _bpe(vocabulary, _listed_merges(vocabulary, header), ignore_merges=splitting.whole_words),
    }


def _split(step: Step) -> Mapping[str, Any]:
    if not isinstance(step, str):
        return step
    return {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}


def _listed_merges(vocabulary: TokenTable, header: GgufHeader) -> Iterable[tuple[str, str]]:
    known, merges = _texts_of(vocabulary.tokens), dict[tuple[str, str], None]()
    for text in header.texts(f"{PREFIX}merges", MAX_MERGES, MAX_MERGE_BYTES).texts():
        left, _, right = text.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise header.error(f"{PREFIX}merges has {shown(text)}, which does not join two tokens to a third")
        merges[known[left], known[right]] = None
    return merges


def _texts_of(tokens: Iterable[str]) -> dict[str, str]:
    """Each text for an equal one: merges are pairs of these, because texts of their own take three times the memory."""
    return {text: text for text in tokens}


def _sentencepiece(vocabulary: TokenTable, header: GgufHeader) -> Json:
    prefix = header.flag(f"{PREFIX}add_space_prefix", True)
    has_bytes = TokenKind.BYTE in vocabulary.kinds
    steps: list[Json] = [{"type": "ByteFallback"}] if has_bytes else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [_replace(SPACE, " "), *steps, {"type": "Fuse"}, *strip]
    merges = _merges_of_scores(vocabulary, header)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*_space_before(prefix), _replace(" ", SPACE)]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges,
            unk_token=vocabulary.special_text("unknown"),
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def _merges_of_scores(vocabulary: TokenTable, header: GgufHeader) -> list[tuple[str, str]]:
    joined = (TokenKind.UNDEFINED, TokenKind.NORMAL, TokenKind.UNUSED)
    rows = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
    scores = {text: score for text, kind, score in rows if kind in joined}
    if sum(map(len, scores)) > MAX_CHARS:
        raise header.error(f"its tokens have more than {MAX_CHARS} characters together")
    known, merges, chars = _texts_of(scores), list[tuple[str, str]](), 0
    for _, texts in groupby(sorted(scores, key=scores.__getitem__, reverse=True), key=scores.__getitem__):
        of_score = list[tuple[int, str, str]]()
        for text in texts:
            for place in range(1, len(text)):
                if (left := text[:place]) in known and (right := text[place:]) in known:
                    of_score.append((place, known[left], known[right]))
                    chars += len(text)
            if chars > MAX_MERGE_CHARS or len(merges) + len(of_score) > MAX_MERGES:
                raise header.error(
                    f"its merges have more than {MAX_MERGE_CHARS} characters, or are more than {MAX_MERGES}"
                )
        merges += [(left, right) for _, left, right in sorted(of_score, key=itemgetter(0))]
    return merges


def _unigram(vocabulary: TokenTable, header: GgufHeader) -> Json:
    """Unlike llama.cpp's, which counts words only, the library's score of an unknown character depends on all tokens:
    those that are found before the model sees a text get scores within those of words."""
    if "unknown" not in vocabulary.special:
        raise header.error(f"it has no {PREFIX}unknown_token_id")
    rows = [*zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)]
    least = min((score for _, kind, score in rows if kind == TokenKind.NORMAL), default=0.0)
    hidden = (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.BYTE)
    vocab = [
        (text, 0.0 if kind == TokenKind.USER_DEFINED else max(score, least) if kind in hidden else score)
        for text, kind, score in rows
    ]
    merges_spaces = header.flag(f"{PREFIX}remove_extra_whitespaces", False)
    prefix = merges_spaces or header.flag(f"{PREFIX}add_space_prefix", False)
    single = [_replace_all(r"\A +| +\z", ""), _replace_all(" {2,}", " ")] if merges_spaces else []
    steps = [*_charsmap(header), *single, *_space_before(prefix), _replace(" ", SPACE)]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "decoder": {"type": "Sequence", "decoders": [_replace(SPACE, " "), {"type": "Fuse"}, *strip]},
        "model": {"type": "Unigram", "unk_id": vocabulary.special["unknown"], "vocab": vocab, "byte_fallback": False},
    }


def _charsmap(header: GgufHeader) -> list[Json]:
    """The step that replaces characters, if the file has any to replace."""
    key = f"{PREFIX}precompiled_charsmap"
    if not (content := _bytes(header, key)):
        return []
    if len(content) < 4 or 4 + int.from_bytes(content[:4], "little") >= len(content):
        raise header.error(f"{key} is cut off")
    return [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}]


def _space_before(prefix: bool) -> list[Json]:
    return [{"type": "Prepend", "prepend": SPACE}] if prefix else []


def _replace(old: str, new: str) -> Json:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _replace_all(pattern: str, new: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}
