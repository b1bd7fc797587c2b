"""What a grammar may cost llguidance, and how llguidance reads a tokenizer: alike in the router, which checks it, and
in the shard that follows it. Of 298 schemas, expressions and choices that are meant to be followed, none needs half of
a limit.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Values of its LLParserLimits.
GRAMMAR_LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "max_lexer_states": 20_000,  # states of the automaton that reads terminals; one takes 1 to 2 kB
        # Work for one token, of the lexer and of the parser: each takes at most about 10 ms.
        "step_lexer_fuel": 50_000,
        "step_max_items": 12_000,
    }
)
# Bytes of stack of every thread of a shard: llguidance follows chains of rules by recursion when it compiles. A child
# process of the router has compiled the same text with half of it. 8 MiB suffice for a chain of 2,600 rules.
COMPILER_STACK_BYTES = 16 * 2**20


def read_grammar_tokens(tokenizer_json: str, count: int, end_ids: Sequence[int]) -> "LLTokenizer":
    """`count`: number of the model's logits or, if that is larger, of the tokenizer's tokens. `end_ids`: the ids that
    end a text. Raises any BaseException if llguidance cannot use the tokenizer: a panic of Rust is not an Exception."""
    from llguidance import LLTokenizer

    # llguidance takes a text that does not begin with a brace for the path of a file.
    return LLTokenizer("{" + tokenizer_json.lstrip()[1:], n_vocab=count, eos_token=list(end_ids) or None)
