"""The tokens of a GGUF file, and what the file says of them: checked, for `tokenizer.py` and `side_files.py`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import cast

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.container import GgufHeader, shown
from text_generation_common.gguf.splits import SPLITTINGS

MODEL, PREFIX = "tokenizer.ggml.model", "tokenizer.ggml."
EMBEDDING = "token_embd.weight"
# Limits of tokens. The longest in use are runs of a few hundred spaces, the largest vocabularies have 262,208, which
# take 4 MiB with their lengths.
MAX_TOKEN_CHARS, MAX_TOKENS, MAX_TOKEN_BYTES = 1024, 2**19, 12 * 2**20
# Letters of struct for kinds of numbers.
WHOLE_NUMBERS = "BbHhIiQq"
NUMBERS = WHOLE_NUMBERS + "fd"
# Texts of tokens that end an answer, as llama.cpp knows them: many files name only one of a model's end tokens.
ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
     "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>"}
)  # fmt: skip
# In the form of gpt-oss a message ends with <|end|>, and the answer goes on.
GOES_ON, GOES_ON_BESIDE = "<|end|>", frozenset({"<|return|>", "<|call|>"})


class TokenKind(IntEnum):
    """As sentencepiece numbers the kinds of its pieces; 0 is GGUF's alone."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What holds for a kind of tokenizer where a file has no such key."""

    bos: int | None
    eos: int | None
    unknown: int | None
    adds_bos: bool
    adds_eos: bool


DEFAULTS: Mapping[str, ModelDefaults] = {
    "llama": ModelDefaults(1, 2, 0, adds_bos=True, adds_eos=False),
    "gpt2": ModelDefaults(None, None, None, adds_bos=False, adds_eos=False),
    "t5": ModelDefaults(None, 1, 2, adds_bos=False, adds_eos=True),
}


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The id of a token is its place."""

    model: str  # a key of DEFAULTS
    pre: str  # a key of SPLITTINGS; empty unless `model` is gpt2
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    special: Mapping[str, int]  # ids of bos, eos, eot, eom and unknown, as far as there are any
    before: int | None  # the token before every text
    after: int | None

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer: those that the file names, and those whose texts are known for it."""
        named = {self.special[name] for name in ("eos", "eot", "eom") if name in self.special}
        ends = ENDS.intersection(self.tokens)
        if ends >= GOES_ON_BESIDE:
            ends -= {GOES_ON}
            named -= {id for id in named if self.tokens[id] == GOES_ON}
        return sorted(named | {id for id, text in enumerate(self.tokens) if text in ends})

    def special_text(self, name: str) -> str | None:
        return self.tokens[self.special[name]] if name in self.special else None


@lru_cache(maxsize=1)
def read_vocabulary(header: GgufHeader) -> TokenTable:
    """Kept, because three files are made of it when a server starts. WeightsError for a tokenizer of another kind, or
    for keys that contradict each other or the weights."""
    model = header.text(MODEL)
    if model not in DEFAULTS:
        read = ", ".join(DEFAULTS)
        raise WeightsError(
            f"{header.path}: a tokenizer of the kind {shown(model)} ({MODEL}) is not supported, only {read}: choose"
            " another model"
        )
    pre = _splitting_of(header) if model == "gpt2" else ""
    tokens = _tokens(header)
    count = len(tokens)
    kinds = _kinds(header, tokens)
    scores = _numbers(header, "scores", count, NUMBERS) or []
    if model != "gpt2" and not scores:
        raise header.error(f"it has no {PREFIX}scores, without which its tokenizer cannot be made")
    if not all(map(math.isfinite, scores)):
        raise header.error(f"{PREFIX}scores has a number that is not finite")
    defaults = DEFAULTS[model]
    special = _special(header, count, {"bos": defaults.bos, "eos": defaults.eos, "unknown": defaults.unknown})
    adds_bos = header.flag(f"{PREFIX}add_bos_token", SPLITTINGS[pre].adds_bos if pre else defaults.adds_bos)
    adds_eos = header.flag(f"{PREFIX}add_eos_token", defaults.adds_eos)
    for adds, name in ((adds_bos, "bos"), (adds_eos, "eos")):
        if adds and name not in special:
            raise header.error(f"{PREFIX}add_{name}_token asks for a token that {PREFIX}{name}_token_id does not name")
    return TokenTable(
        model=model,
        pre=pre,
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        special=special,
        before=special["bos"] if adds_bos else None,
        after=special["eos"] if adds_eos else None,
    )


def _kinds(header: GgufHeader, tokens: Sequence[str]) -> list[int]:
    """The kind of each token. Tokens that end answers are control tokens: some files call them words."""
    found = _numbers(header, "token_type", len(tokens), WHOLE_NUMBERS) or [TokenKind.NORMAL] * len(tokens)
    kinds = [int(kind) for kind in found]
    if not set(kinds) <= set(TokenKind):
        raise header.error(f"{PREFIX}token_type has a number that is not a type of tokens")
    for id, text in enumerate(tokens):
        if text in ENDS:
            kinds[id] = TokenKind.CONTROL
    return kinds


def _splitting_of(header: GgufHeader) -> str:
    pre = header.text(f"{PREFIX}pre", "")
    if pre in SPLITTINGS:
        return pre
    named = (
        f"names the splitting of texts {shown(pre)}, which is not known here" if pre else "does not say how to split"
    )
    raise WeightsError(
        f"{header.path}: {PREFIX}pre {named}: choose a newer file of the model, or its original repository"
    )


def _tokens(header: GgufHeader) -> list[str]:
    array = header.texts(f"{PREFIX}tokens", MAX_TOKENS, MAX_TOKEN_BYTES)
    rows = header.tensors[EMBEDDING].shape[0] if EMBEDDING in header.tensors else array.count
    if rows != array.count:
        raise header.error(f"it has {array.count} tokens, and {rows} rows in {EMBEDDING}")
    tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(array.texts())]
    if len(max(tokens, key=len)) > MAX_TOKEN_CHARS:
        raise header.error(f"a token has more than {MAX_TOKEN_CHARS} characters")
    if len(set(tokens)) < len(tokens):
        raise header.error("two of its tokens are the same")
    return tokens


def _numbers(header: GgufHeader, name: str, count: int, kinds: str) -> Sequence[float] | None:
    array = header.array(PREFIX + name)
    if array is None:
        return None
    if array.count != count or array.numbers not in kinds:
        what = "number" if kinds is NUMBERS else "whole number"
        raise header.error(f"{PREFIX}{name} does not have one {what} for each of {count} tokens")
    return cast(Sequence[float], array.values())


def _special(header: GgufHeader, count: int, defaults: Mapping[str, int | None]) -> dict[str, int]:
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown"):
        key = f"{PREFIX}{name}_token_id"
        id = header.whole(key, -1) if key in header.metadata else defaults.get(name)
        if id is None:
            continue
        if not 0 <= id < count:
            raise header.error(f"{key} is {id}, and it has {count} tokens")
        found[name] = id
    return found
