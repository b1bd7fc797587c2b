"""What a request asks the form of its text to be, before it is turned into a grammar of llguidance."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# Most bytes of a grammar as the client has sent it, most levels of JSON in it, and most strings to choose from.
MAX_BYTES, MAX_DEPTH, MAX_CHOICES = 2**16, 64, 4096


class GrammarKind(StrEnum):
    JSON_SCHEMA = "JSON schema"  # the text is a schema, written as JSON
    REGEX = "regular expression"  # which the whole answer matches
    CHOICE = "choice"  # the text is a JSON list of strings, of which the answer is one
    ARGUMENTS = "schema of arguments"  # the text is made by `call_arguments`
    RULES = "grammar"  # in llguidance's Lark syntax, or in llama.cpp's GBNF


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    field: str  # the request's field, for errors
    kind: GrammarKind
    text: str
    # TGI takes schemas with the keyword `properties` only, and its clients' tests expect the error.
    needs_properties: bool = False
    # Whether what cannot be followed of a schema is left out. Otherwise the schema is refused.
    is_loose: bool = False


class RefusedGrammarError(Exception):
    """The grammar is refused. The text says why, in one line that can follow the name of the request's field."""

    def __init__(self, reason: str, field: str = "") -> None:
        """`field`: the request's field, where it is not the field of the AskedGrammar."""
        super().__init__(reason)
        self.field = field


@dataclass(frozen=True, slots=True)
class MadeGrammar:
    """The result for what a request wants."""

    grammar: str  # llguidance's JSON text, which shards compile; "" if it is refused
    refusal: str = ""  # why it is refused
    field: str = ""  # as in RefusedGrammarError
    # Names of what the grammar does not follow, each behind its field, which may be "", as in RefusedGrammarError.
    left_out: Sequence[tuple[str, str]] = ()

    @property
    def size(self) -> int:
        return len(self.grammar) + len(self.refusal) + sum(len(name) for _, name in self.left_out)
