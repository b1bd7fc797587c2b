"""Grammars for what surrounds an answer: reasoning before it, and calls of tools in the form that a model knows.

What they are made of is checked over a vocabulary of single bytes. Special tokens have a meaning only over the model's
own vocabulary, with which the whole is compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.call_arguments import DefinedRule
from text_generation_router.text.grammars.conversion import lark_grammar, prepared_text
from text_generation_router.text.grammars.rules import literal

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
