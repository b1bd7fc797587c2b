"""The grammar of a chat's whole text: reasoning first, then calls of tools or the answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from text_generation_router.text.calls.formats import BodyKind
from text_generation_router.text.calls.written import Arguments, CallNumber
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.call_arguments import (
    ArgumentStyle,
    DefinedRule,
    arguments_rule,
    asked_arguments,
)
from text_generation_router.text.grammars.combined import (
    TEXT,
    CallForm,
    Marker,
    Part,
    Schema,
    after_reasoning,
    either,
    tool_calls_grammar,
)
from text_generation_router.text.grammars.conversion import lark_grammar
from text_generation_router.text.grammars.forms import CallsForm, ChatForm

# Checks what a request asks for, and returns the text of what can be followed, without what is left out. Raises
# RefusedGrammarError.
Check = Callable[[AskedGrammar], str]
ANY_TEXT = lark_grammar(f"start: TEXT\n{TEXT}")
ANY_OBJECT: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
CALL_NUMBER = DefinedRule("/(0|[1-9][0-9]{0,3})/")
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _of_object(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object also where it allows other types beside it."""
    schema = {"type": "object"} | dict(NO_ARGUMENTS if given is None else given)
    return schema | {"type": "object"} if isinstance(schema["type"], list) else schema


class ChatGrammar:
    """Makes the grammar of a chat's whole text."""

    def __init__(self, form: ChatForm, check: Check) -> None:
        self._form = form
        self._check = check

    def of(self, answer: str | None) -> str:
        """`answer`: the checked grammar of an answer in words; None: any text. Raises RefusedGrammarError."""
        if self._form.calls is not None:
            answer = self._with_calls(self._form.calls, answer)
        form = self._form.reasoning
        if form is None:
            return answer or ANY_TEXT
        begin, end = self._marker(form.begin), self._marker(form.end)
        try:
            return after_reasoning(answer or ANY_TEXT, end, form.is_open, begin, form.max_tokens)
        except RefusedGrammarError as refusal:
            raise RefusedGrammarError(str(refusal), "max_thinking_tokens") from None

    def _with_calls(self, form: CallsForm, answer: str | None) -> str:
        written = form.written
        parts = [[self._part(part, form, i) for part in call] for i, call in enumerate(written.calls)]
        opening, separator, closing = map(self._texts, (written.opening, written.separator, written.closing))
        starts = [text for text in self._texts(written.syntax.starts) if isinstance(text, str)]
        first = (written.opening or written.calls[0])[0]
        calls = CallForm(parts, opening, separator, closing, [text for text in starts if text != first])
        several = form.several and written.several
        if form.is_required:
            return tool_calls_grammar(calls, several=several)
        if answer is not None:
            return either(tool_calls_grammar(calls, several=several), answer)
        return tool_calls_grammar(calls, at_least_one=False, several=several, free_text=True)

    def _part(self, part: str | Arguments | CallNumber, form: CallsForm, place: int) -> Part:
        """`place`: the tool's, among all tools."""
        if isinstance(part, CallNumber):
            return CALL_NUMBER
        if not isinstance(part, Arguments):
            return self._texts((part,))[0]
        if form.syntax.body in (BodyKind.XML, BodyKind.PYTHONIC, BodyKind.PYTHONIC_LINES):
            return self._rule(part, form, place)
        return self._schema(form, part.tool)

    def _rule(self, part: Arguments, form: CallsForm, place: int) -> DefinedRule:
        """The arguments of a tool."""
        style = ArgumentStyle(form.syntax.xml, part.is_loose)
        schema, is_loose = _of_object(form.schemas[part.tool]), part.tool not in form.strict
        followed = self._followed(asked_arguments(style, schema, is_loose))
        markers = map(self._marker, form.syntax.texts)
        ids = {marker.text: marker.token_id for marker in markers if marker.token_id is not None}
        return arguments_rule(style, None if followed is None else followed[1], f"a{place}", ids)

    def _schema(self, form: CallsForm, name: str) -> Schema:
        """The schema of a tool's arguments."""
        text = orjson.dumps(_of_object(form.schemas[name])).decode()
        asked = AskedGrammar("tools", GrammarKind.JSON_SCHEMA, text, is_loose=name not in form.strict)
        followed = self._followed(asked)
        return Schema.of(dict(ANY_OBJECT) if followed is None else followed)

    def _followed(self, asked: AskedGrammar) -> Any:
        """What was asked, read as JSON. Unless the tool is strict, keywords that no grammar can follow are left out;
        None: the schema is refused without them too, and any arguments are taken."""
        try:
            return orjson.loads(self._check(asked))
        except RefusedGrammarError:
            if not asked.is_loose:
                raise
            return None

    def _texts(self, texts: Sequence[str]) -> list[str | Marker]:
        markers = [self._marker(text) for text in texts]
        return [marker.text if marker.token_id is None else marker for marker in markers]

    def _marker(self, text: str) -> Marker:
        return Marker(text, self._form.token_ids.get(text))
