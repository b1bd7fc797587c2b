"""Chats with which templates are compared: what a client sends, and how transformers renders it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime as RealTime
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from text_generation_router.api.common.messages import MessageBody
from text_generation_router.text.templates.chat_template import Conversation

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class FixedTime:
    """Stands in for `datetime` of both renderers."""

    @staticmethod
    def now() -> RealTime:
        return RealTime(2026, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    continued: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def conversation(self) -> Conversation:
        """As the server reads it: OpenAI's clients send arguments as JSON texts."""
        sent = self.with_texts()
        return Conversation(
            tuple(MessageBody.model_validate(message).message() for message in sent.messages),
            not self.continued,
            self.continued,
            self.variables,
            self.tools,
            self.documents,
        )

    def in_parts(self) -> "Chat":
        """The same chat, with contents as lists of parts."""
        return replace(self, messages=[_in_parts(message) for message in self.messages])

    def in_texts(self) -> "Chat":
        """The same chat, with contents as texts."""
        return replace(self, messages=[_in_texts(message) for message in self.messages])

    def with_texts(self) -> "Chat":
        """The same chat, with arguments of calls as JSON texts."""
        return replace(self, messages=[_with_texts(message) for message in self.messages])

    def by_transformers(self, source: str | dict[str, str]) -> str:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0})), **TOKENS)
        tokenizer.chat_template = source
        text = tokenizer.apply_chat_template(
            [dict(message) for message in self.messages],
            tools=self.tools,
            documents=self.documents,
            tokenize=False,
            add_generation_prompt=not self.continued,
            continue_final_message=self.continued,
            **self.variables,
        )
        assert isinstance(text, str)
        return text


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _in_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [{**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in functions]
    calls = [{**call, "function": function} for call, function in zip(message["tool_calls"], texts, strict=True)]
    return {**message, "tool_calls": calls}


def message(role: str, content: Any = None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def call(identifier: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> at a place, e.g. « Besançon ».",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
SYSTEM, HI = message("system", "Be brief. "), message("user", " Besançon? 😀 <b>&amp;</b> {{ x }}\n")
ASKED = message("user", "Weather in Besançon?")
# Identifiers of nine letters and digits, which Mistral's templates want.
CALLED = message("assistant", "", tool_calls=[call("abcdefgh1", "get_weather", city="Besançon", days=[1, 2])])
CALLED_TWICE = message(
    "assistant",
    "I look both up.",
    tool_calls=[call("abcdefgh1", "get_weather", city="Besançon"), call("abcdefgh2", "clock")],
)
RESULT = message("tool", '{"sky": "clear", "°C": 21}', tool_call_id="abcdefgh1", name="get_weather")
SECOND_RESULT = message("tool", "12:30", tool_call_id="abcdefgh2", name="clock")
TURNS = (message("user", "1 + 1?"), message("assistant", "2"), message("user", "2 + 2?"))
DOCUMENTS = (
    {"title": "Besançon", "text": "A town in the east of France.", "doc_id": "1", "contents": "A town."},
    {"title": "Doubs", "text": "A river.\n", "doc_id": "2", "contents": "A river."},
)
THOUGHT = message("assistant", "Four.", reasoning_content="Two and two\nis four.")

CHATS = {
    "plain": Chat([HI]),
    "system": Chat([SYSTEM, HI]),
    "turns": Chat(TURNS),
    "system and turns": Chat([SYSTEM, *TURNS]),
    "parts": Chat([message("user", [{"type": "text", "text": "One. "}, {"type": "text", "text": "Besançon."}])]),
    "tools": Chat([HI], tools=[WEATHER, CLOCK]),
    "tools and system": Chat([SYSTEM, *TURNS], tools=[WEATHER]),
    "call": Chat([ASKED, CALLED, RESULT], tools=[WEATHER, CLOCK]),
    "answered call": Chat([ASKED, CALLED, RESULT, message("assistant", "Clear."), HI], tools=[WEATHER, CLOCK]),
    "calls": Chat([SYSTEM, ASKED, CALLED_TWICE, RESULT, SECOND_RESULT], tools=[WEATHER, CLOCK]),
    "call without content": Chat([ASKED, {**CALLED, "content": None}, RESULT], tools=[WEATHER, CLOCK]),
    "call without tools": Chat([ASKED, CALLED, RESULT]),
    "documents": Chat([ASKED], documents=DOCUMENTS),
    "reasoning": Chat([*TURNS, THOUGHT, HI]),
    "reasoning by another name": Chat([*TURNS, message("assistant", "Four.", thinking="Two and two."), HI]),
    "reasoning and calls": Chat(
        [ASKED, {**CALLED, "reasoning_content": "I need the weather."}, RESULT], tools=[WEATHER, CLOCK]
    ),
    "thinking on": Chat([SYSTEM, *TURNS], variables={"enable_thinking": True}),
    "thinking off": Chat([SYSTEM, *TURNS], variables={"enable_thinking": False}),
    "thinking off with tools": Chat([*TURNS], tools=[WEATHER], variables={"enable_thinking": False, "thinking": False}),
    "effort": Chat(TURNS, variables={"reasoning_effort": "high", "date_string": "1 Jan 2025"}),
    "continued": Chat([HI, message("assistant", "So far")], continued=True),
    "continued with a space": Chat([HI, message("assistant", "So far ")], continued=True),
    "continued after reasoning": Chat([HI, message("assistant", "<think>\nHm.\n</think>\n\nSo")], continued=True),
    "roles in disorder": Chat([HI, HI]),
    "unknown role": Chat([message("narrator", "Once upon a time")]),
    "developer": Chat([message("developer", "Be brief."), HI]),
    "brief system": Chat([message("system", "Be brief."), HI]),
}
