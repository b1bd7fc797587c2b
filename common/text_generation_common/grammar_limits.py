"""What a grammar may cost llguidance, in the router that checks it and in the shard that follows it: values of its
LLParserLimits. Of 298 schemas, expressions and choices that are meant to be followed, none needs half as much."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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
