"""A tokenizer for the small checkpoints of the tests, and grammars for its texts."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_server.grammars.compiler import GrammarCompiler, ModelTokens

END = 2  # the end-of-text token of the checkpoints
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ['{"', '":', '", "', '"}', "true", "false", "null", " the", " a", "name", "age", "in", "er", "12", "2026"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog é"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
COMPACT: Any = {"whitespace_flexible": False}


def byte_level_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    """All bytes, and tokens of some words. Ids 0 to 2 are special."""
    byte_of = _byte_level_chars()
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *sorted(byte_of.values())])}
    merges: list[tuple[str, str]] = []
    for word in words:
        chars = [byte_of[byte] for byte in word.encode()]
        for count in range(1, len(chars)):
            pair = "".join(chars[:count]), chars[count]
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def _byte_level_chars() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokens_of(tokenizer: Tokenizer, vocab_size: int = 320) -> ModelTokens:
    return ModelTokens(tokenizer.to_str(), vocab_size, (END,))


def byte_compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(tokens_of(byte_level_tokenizer()), **options)


def schema_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)


def regex_grammar(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def lark_grammar(lark: str) -> str:
    return LLMatcher.grammar_from_lark(lark)
