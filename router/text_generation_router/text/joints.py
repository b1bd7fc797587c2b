"""What is needed to join the ids of a text's parts: see certain_cuts."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

from text_generation_router.text.certain_cuts import has_certain_cuts


@dataclass(frozen=True, slots=True)
class Joints:
    front: tuple[int, ...]  # special tokens that every text gets
    back: tuple[int, ...]
    ids_of_letter: Mapping[str, int]  # how many ids an ASCII letter has by itself

    @classmethod
    def of(cls, tokenizer: Tokenizer, content: Mapping[str, Any]) -> Self | None:
        """`content` is that of tokenizer.json. None: texts cannot be cut."""
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
