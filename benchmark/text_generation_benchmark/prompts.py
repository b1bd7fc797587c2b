"""Prompts with an exact number of tokens, all different, so that a prefix cache cannot shorten the work."""

import random
import re
from pathlib import Path

from tokenizers import Tokenizer

WORD = re.compile("Ġ[a-z]{2,}")


class Prompts:
    """Makes prompts of random words, each of them one token. Every instance makes the same sequence of prompts."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words = sorted(word[1:] for word in self._tokenizer.get_vocab() if WORD.fullmatch(word))
        self._added = len(self._tokenizer.encode("").ids)
        self._words = [word for word in words if len(self._tokenizer.encode(f" {word}").ids) == self._added + 1]
        self._random = random.Random(0)

    @property
    def words(self) -> list[str]:
        """Words that are one token each, with the space before them."""
        return [f" {word}" for word in self._words]

    @property
    def answer(self) -> str:
        """The word of which all answers consist that pretended shards give to chats."""
        return self.words[0]

    def make(self, count: int, num_tokens: int) -> list[str]:
        """Makes `count` prompts of `num_tokens` tokens, including the tokens that the tokenizer adds at the start.
        RuntimeError if a prompt has another number of tokens.
        """
        prompts = []
        for _ in range(count):
            text = "".join(f" {word}" for word in self._random.choices(self._words, k=num_tokens - self._added))
            if len(self._tokenizer.encode(text).ids) != num_tokens:
                raise RuntimeError(f"words that are one token each do not make {num_tokens} tokens together: {text}")
            prompts.append(text)
        return prompts
