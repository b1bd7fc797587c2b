"""What a request wants the whole text to be: the grammar of its answer, and for a chat what surrounds the answer.

These values travel as JSON to the child process that makes a grammar of them (`checking_child.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson
from tokenizers import Tokenizer

from text_generation_router.text.calls.formats import CALL_FORMATS, CallFormat
from text_generation_router.text.calls.written import WrittenCalls, written_calls
from text_generation_router.text.grammars.asked import MAX_DEPTH, AskedGrammar, GrammarKind, RefusedGrammarError


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning, which no grammar changes, before the answer."""

    begin: str
    end: str
    is_open: bool  # the prompt has its beginning
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CallsForm:
    """Calls that a grammar demands, or whose arguments it guides."""

    format: str  # a name in CALL_FORMATS
    schemas: Mapping[str, Mapping[str, Any] | None]  # a schema of the arguments for each tool's name
    strict: Sequence[str]  # the tools whose schemas must be followed
    is_required: bool
    several: bool

    @property
    def syntax(self) -> CallFormat:
        return CALL_FORMATS[self.format]

    @property
    def written(self) -> WrittenCalls:
        return written_calls(self.syntax, tuple(self.schemas))

    @property
    def texts(self) -> Iterator[str]:
        """Every text that may be a special token."""
        written = self.written
        yield from (*written.opening, *written.separator, *written.closing, *written.syntax.texts)
        yield from (part for call in written.calls for part in call if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class ChatForm:
    reasoning: ReasoningForm | None
    calls: CallsForm | None
    token_ids: Mapping[str, int]  # ids of the special tokens among its texts

    @classmethod
    def of(cls, tokenizer: Tokenizer, reasoning: ReasoningForm | None = None, calls: CallsForm | None = None) -> Self:
        texts = {*(() if calls is None else calls.texts)}
        texts |= set() if reasoning is None else {reasoning.begin, reasoning.end}
        found = ((text, special_id(text, tokenizer)) for text in sorted(texts))
        return cls(reasoning, calls, {text: token_id for text, token_id in found if token_id is not None})


def special_id(text: str, tokenizer: Tokenizer) -> int | None:
    """The id of the special token that the text is; None: ordinary tokens spell it. As for llguidance, tokens that were
    added in the form `<…>` are special tokens, whatever the tokenizer says: ordinary text does not spell them."""
    token_id = tokenizer.token_to_id(text)
    added = tokenizer.get_added_tokens_decoder().get(token_id) if token_id is not None else None
    is_special = added is not None and (added.special or (text.startswith("<") and text.endswith(">")))
    return token_id if is_special else None


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    asked: AskedGrammar | None  # the grammar of the answer; None: any text
    form: ChatForm | None = None  # what surrounds a chat's answer; None: nothing

    @property
    def field(self) -> str:
        """The request's field that a refusal blames, unless it names another one."""
        if self.asked is not None:
            return self.asked.field
        return "tools" if self.form is not None and self.form.calls is not None else "max_thinking_tokens"

    def to_json(self) -> bytes:
        """Without the field of the asked grammar: requests that differ in it only want the same. Raises
        RefusedGrammarError."""
        asked = self.asked and [self.asked.kind, self.asked.text, self.asked.needs_properties, self.asked.is_loose]
        try:
            return orjson.dumps([asked, self.form])
        except orjson.JSONEncodeError:  # a level beyond orjson's 254, or text that is not Unicode
            reason = f"it is not valid Unicode, or has more than {MAX_DEPTH} levels of objects and lists"
            raise RefusedGrammarError(reason) from None

    @classmethod
    def of_json(cls, content: bytes) -> Self:
        asked, form = orjson.loads(content)
        return cls(asked and AskedGrammar("", GrammarKind(asked[0]), *asked[1:]), form and _form_of(form))


def _form_of(value: dict[str, Any]) -> ChatForm:
    reasoning, calls = value["reasoning"], value["calls"]
    return ChatForm(reasoning and ReasoningForm(**reasoning), calls and CallsForm(**calls), value["token_ids"])
