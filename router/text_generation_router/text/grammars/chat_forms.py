"""The form of a chat's whole text: reasoning first, then calls of tools or the answer."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from text_generation_router.errors import GrammarError
from text_generation_router.text.calls.written import Arguments, WrittenCalls
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.combined import (
    TEXT,
    CallForm,
    Marker,
    Part,
    Schema,
    after_reasoning,
    either,
    marker_of,
    tool_calls_grammar,
)
from text_generation_router.text.grammars.conversion import lark_grammar

# Checks what a request asks for. Raises GrammarError.
Check = Callable[[AskedGrammar], Awaitable[str]]
ANY_TEXT = lark_grammar(f"start: TEXT\n{TEXT}")
ANY_OBJECT: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


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

    written: WrittenCalls
    schemas: Mapping[str, Mapping[str, Any] | None]  # a schema of the arguments for each tool's name
    strict: frozenset[str]  # the tools whose schemas must be followed
    is_required: bool
    several: bool


@dataclass(frozen=True, slots=True)
class ChatForm:
    tokenizer: Tokenizer
    reasoning: ReasoningForm | None = None
    calls: CallsForm | None = None

    async def grammar(self, answer: str | None, check: Check) -> str:
        """`answer`: the checked grammar of an answer in words; None: any text. Raises GrammarError."""
        if self.calls is not None:
            answer = await self._with_calls(self.calls, answer, check)
        if self.reasoning is None:
            return answer or ANY_TEXT
        form = self.reasoning
        try:
            begin, end = self._marker(form.begin), self._marker(form.end)
            return after_reasoning(answer or ANY_TEXT, end, form.is_open, begin, form.max_tokens)
        except RefusedGrammarError as refusal:
            raise GrammarError("max_thinking_tokens", str(refusal)) from None

    async def _with_calls(self, form: CallsForm, answer: str | None, check: Check) -> str:
        schemas = {name: await self._schema(form, name, check) for name in form.schemas}
        written = form.written

        def parts(texts: Sequence[str | Arguments]) -> list[Part]:
            return [self._part(text, schemas) for text in texts]

        calls = CallForm(
            [parts(call) for call in written.calls],
            parts(written.opening),
            parts(written.separator),
            parts(written.closing),
        )
        several = form.several and written.several
        if form.is_required:
            return tool_calls_grammar(calls, several=several)
        if answer is not None:
            return either(tool_calls_grammar(calls, several=several), answer)
        return tool_calls_grammar(calls, at_least_one=False, several=several, free_text=True)

    async def _schema(self, form: CallsForm, name: str, check: Check) -> Schema:
        """The schema of a tool's arguments. A schema that no grammar can follow counts as any object, unless the tool
        is strict."""
        given = form.schemas[name]
        schema = {"type": "object"} | dict(NO_ARGUMENTS if given is None else given)
        text = orjson.dumps(schema).decode()
        try:
            await check(AskedGrammar("tools", GrammarKind.JSON_SCHEMA, text))
        except GrammarError:
            if name in form.strict:
                raise
            schema = dict(ANY_OBJECT)
        return Schema.of(schema)

    def _part(self, part: str | Arguments, schemas: Mapping[str, Schema]) -> Part:
        if isinstance(part, Arguments):
            return schemas[part.tool]
        marker = self._marker(part)
        return part if marker.token_id is None else marker

    def _marker(self, text: str) -> Marker:
        return marker_of(text, self.tokenizer)
