"""Facts about a tokenizer that are needed to join the token ids of a text's parts, which certain_cuts.py cuts."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

from text_generation_router.text.tokens.certain_cuts import has_certain_cuts


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
