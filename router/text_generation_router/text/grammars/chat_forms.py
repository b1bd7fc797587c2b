"""The grammar of a chat's whole text: reasoning first, then calls of tools or the answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from text_generation_router.text.grammars.conversion import lark_grammar, prepared_text
from text_generation_router.text.grammars.forms import CallsForm, ChatForm
from text_generation_router.text.grammars.rules import literal

# Grammars for what surrounds an answer: reasoning before it, and calls of tools in the form that a model knows.
#
# What they are made of is checked over a vocabulary of single bytes. Special tokens have a meaning only over the
# model's own vocabulary, with which the whole is compiled.

# Free text; and what models write between the end of their reasoning and the answer.
TEXT = r"TEXT: /(.|\n)*/"
GAP = r"GAP: /[ \n]{1,4}/"


@dataclass(frozen=True, slots=True)
class Marker:
    """A text that begins or ends a part of an answer, such as `</think>`."""

    text: str
    token_id: int | None = None  # the one token that it is; None: ordinary tokens spell it

    @property
    def rule(self) -> str:
        """How rules of Lark call it."""
        return literal(self.text) if self.token_id is None else f"<[{self.token_id}]>"


def after_reasoning(
    grammar: str, end: Marker, opens_inside: bool, start: Marker | None = None, max_tokens: int | None = None
) -> str:
    """The grammar of an answer whose reasoning is free text that `end` ends; then `grammar` holds.

    `opens_inside`: the reasoning begins with the first token, because the prompt has its start; otherwise it begins
    with `start`, or there is none. `max_tokens`: number of tokens after which nothing but `end` can follow. Raises
    RefusedGrammarError if `max_tokens` is given and `end` is not one token.
    """
    if end.token_id is not None:
        limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
        thoughts, rule = f"thoughts {end.rule}", f"thoughts{limit}: TEXT\n{TEXT}"
    elif max_tokens is None:
        thoughts, rule = "thoughts", f"thoughts[suffix={end.rule}]: TEXT\n{TEXT}"
    else:
        raise RefusedGrammarError(f"the reasoning has no limit in tokens, because {end.text!r} is not one token")
    before = f"{thoughts} GAP?" if opens_inside else f"({start.rule} {thoughts} GAP?)?" if start is not None else ""
    return _before(f"start: {before} @answer\n{rule}\n{GAP}\n", grammar)


def _before(rules: str, grammar: str) -> str:
    """`rules`, which refer to `grammar` as `@answer`, as llguidance's JSON text."""
    parts = orjson.loads(grammar)["grammars"]
    parts[0] = {**parts[0], "name": "answer"}
    return orjson.dumps({"grammars": [{"lark_grammar": rules}, *parts]}).decode()


def either(first: str, second: str) -> str:
    """The grammar of texts that one of two grammars allows."""
    parts: list[object] = [{"lark_grammar": "start: @first | @second"}]
    for name, grammar in (("first", first), ("second", second)):
        own, *others = orjson.loads(grammar)["grammars"]
        parts += [{**own, "name": name}, *others]
    return orjson.dumps({"grammars": parts}).decode()


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON value in a call."""

    text: str  # as llguidance takes it; `of` makes it

    @classmethod
    def of(cls, schema: object) -> "Schema":
        """From a JSON schema, of which a copy is changed. Raises RefusedGrammarError."""
        return cls(prepared_text(orjson.loads(orjson.dumps(schema))))


Part = str | Marker | Schema | DefinedRule


@dataclass(frozen=True, slots=True)
class CallForm:
    """The calls of one answer: `opening call (separator call)* closing`."""

    calls: Sequence[Sequence[Part]]  # for each tool, the parts of a call of it, from the first marker to the last
    opening: Sequence[Part] = ()
    separator: Sequence[Part] = ()
    closing: Sequence[Part] = ()
    avoided: Sequence[str] = ()  # other texts at which a reader looks for calls: no free text has them

    @property
    def trigger(self) -> str | Marker:
        """The text with which each group of calls begins."""
        first = {(self.opening or call)[0] for call in self.calls}
        if len(first) != 1 or not isinstance(trigger := first.pop(), str | Marker):
            raise ValueError("all calls must begin with the same text")
        return trigger


def tool_calls_grammar(
    form: CallForm, *, at_least_one: bool = True, several: bool = True, free_text: bool = False
) -> str:
    """The grammar of an answer that consists of calls. With `free_text` other text may stand before the calls, and
    around them if there need not be any: text that never has the trigger, except where a call follows."""
    if not (at_least_one or free_text):
        raise ValueError("an answer without calls and text is empty")
    trigger = form.trigger
    openings = _rule(form.opening) if form.opening else _rule((trigger,))
    bodies = " | ".join(f"({_rule(call if form.opening else call[1:])})" for call in form.calls)
    more = f"({_rule(form.separator)} {'' if form.opening else openings} body)*" if several else ""
    rules = [f"group: {openings} body {more} {_rule(form.closing)}", f"body: {bodies}"]
    rules += (part.definitions for call in form.calls for part in call if isinstance(part, DefinedRule))
    if not free_text:
        return lark_grammar("\n".join(("start: group", *rules)))
    rest = _rule(form.opening[1:])
    rules[0] = f"group: lead {rest} body {more} {_rule(form.closing)}"
    if isinstance(trigger, Marker) and trigger.token_id is not None:
        lead, last = f"lead: FREE {trigger.rule}", "LAST: FREE"
    else:
        lead = f"lead[lazy]: FREE {_rule((trigger,))}"
        last = f"LAST: FREE & ~(TEXT {_rule((trigger,))} TEXT)"
    free = "FREE: TEXT" + "".join(f" & ~(TEXT {literal(text)} TEXT)" for text in form.avoided)
    start = "start: group" if at_least_one else f"start: group{'*' if several else '?'} LAST"
    return lark_grammar("\n".join((start, *rules, lead, last, free, TEXT)))


def _rule(parts: Sequence[Part]) -> str:
    """The parts one after the other, in Lark."""
    return " ".join(_part(part) for part in parts if part != "")


def _part(part: Part) -> str:
    if isinstance(part, Schema):
        return f"%json {part.text}"
    if isinstance(part, DefinedRule):
        return part.body
    return part.rule if isinstance(part, Marker) else literal(part)


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
