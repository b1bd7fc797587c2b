"""Reads a model's tokenizer for llguidance: alike where a grammar is checked, and in the shard that follows it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def read_grammar_tokens(tokenizer_json: str, count: int, end_ids: Sequence[int]) -> "LLTokenizer":
    """`count`: number of the model's logits or, if that is larger, of the tokenizer's tokens. `end_ids`: the ids that
    end a text. Raises any BaseException if llguidance cannot use the tokenizer: a panic of Rust is not an Exception."""
    from llguidance import LLTokenizer

    # llguidance takes a text that does not begin with a brace for the path of a file.
    return LLTokenizer("{" + tokenizer_json.lstrip()[1:], n_vocab=count, eos_token=list(end_ids) or None)
