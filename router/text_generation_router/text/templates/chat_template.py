"""Renders conversations to prompts with the model's chat templates, as `apply_chat_template` of transformers does."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from text_generation_router.errors import TemplateError
from text_generation_router.text.templates.facts import TemplateFacts
from text_generation_router.text.templates.jinja_template import JinjaTemplate

# A message as a template gets it: its content and the arguments of its calls in the form that the template takes.

# Names of a message's reasoning, the one that most templates read first.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Content = str | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: Content = None  # a text, or parts {"type": "text", "text": …}
    others: Mapping[str, Any] = field(default_factory=dict)  # other fields, which go to the template as they are


def message_for(facts: TemplateFacts, message: Message) -> dict[str, Any]:
    """The variables of one message. Its reasoning has every name that templates know."""
    role = "system" if message.role == "developer" and not facts.takes_developer else message.role
    variables = {"role": role, "content": _content_for(facts, message.content), **message.others}
    if not facts.takes_objects and isinstance(calls := message.others.get("tool_calls"), list):
        variables["tool_calls"] = [_with_text(call) for call in calls]
    reasoning = next((variables[name] for name in REASONING_NAMES if variables.get(name) is not None), None)
    return variables if reasoning is None else {"thinking": reasoning, **variables, "reasoning_content": reasoning}


def joined(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


def _content_for(facts: TemplateFacts, content: Content) -> str | list[dict[str, Any]] | None:
    """The content in the form that the client has sent, if the template takes that form. No content, as calls of tools
    may have, becomes an empty one unless the template looks for it: many templates raise an error if there is none.
    """
    if content is None:
        if facts.takes_none:
            return None
        content = ""
    if isinstance(content, str):
        return content if facts.takes_texts else [{"type": "text", "text": content}]
    return [dict(part) for part in content] if facts.takes_parts else joined(content)


def _with_text(call: Any) -> Any:
    """The call with its arguments as a JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(arguments := function.get("arguments", ""), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(arguments, ensure_ascii=False)}}


# System messages of a conversation whose template takes only one of them, as the first message.

SYSTEM_ROLES = ("system", "developer")


def orders_of(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """The orders in which a template may take the messages, the client's own first. The other order has one message of
    the role `system`, which is the first and has the texts of all."""
    system = [message for message in messages if message.role in SYSTEM_ROLES]
    if not system or (len(system) == 1 and messages[0].role == "system"):
        return [messages]
    text = "\n\n".join(joined(message.content) for message in system)
    first = Message("system", text, system[0].others)
    return [messages, [first, *(message for message in messages if message.role not in SYSTEM_ROLES)]]


def shows_all(prompt: str, messages: Sequence[Message]) -> bool:
    """Whether the prompt has the text of every system message as often as the messages have it."""
    contents = [joined(message.content) for message in messages]
    system = {joined(message.content).strip() for message in messages if message.role in SYSTEM_ROLES}
    return all(prompt.count(text) >= sum(text in content for content in contents) for text in system if text)


# Number of copied characters up to which a chat is cheap to render.
MAX_CHEAP_CHARS = 8_000_000
# Number of characters that a message takes in JSON besides its role and content.
MESSAGE_CHARS = 64
# Follows the content that is to be continued, so that its end is found in the prompt. Templates that strip the content
# take away the space.
END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders. Where `add_generation_prompt` or `continue_final_message` is None, the last message
    decides: an assistant's message is continued, any other message is answered.
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool | None = None  # whether the prompt ends with the beginning of the assistant's answer
    continue_final_message: bool | None = None  # whether the prompt ends with the last message, to be continued
    variables: Mapping[str, Any] = field(default_factory=dict)  # more variables than every chat has
    tools: Sequence[Mapping[str, Any]] | None = None  # each {"type": "function", "function": {"name": …, …}}
    documents: Sequence[Mapping[str, Any]] | None = None  # each usually {"title": …, "text": …}

    @property
    def is_continued(self) -> bool:
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        return self.add_generation_prompt is None and last.role == "assistant" and bool(last.content)

    @property
    def begins_an_answer(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.is_continued
        return self.add_generation_prompt

    @property
    def is_plain(self) -> bool:
        """Whether all that the template gets is texts, besides single numbers and truth values."""
        return (
            not self.tools
            and not self.documents
            and not any(message.others for message in self.messages)
            and all(value is None or isinstance(value, str | int | float) for value in self.variables.values())
        )


class ChatTemplate:
    """A model's chat templates. Unless rendering is cheap (see `is_cheap`), a template may be rendered and compiled
    only in a process that can be killed: rendering may never end.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], named: Mapping[str, str] | None = None) -> None:
        """`tokens`: the model's special tokens by name. `named`: the sources of its other templates. Raises StartError
        if a source is not valid Jinja.
        """
        self.tokens = tokens
        self._sources = source, named or {}
        self._default = JinjaTemplate(source)
        named_ones = {name: JinjaTemplate(text) for name, text in (named or {}).items() if name in ("tool_use", "rag")}
        self._with_tools = named_ones.get("tool_use", self._default)
        self._with_documents = named_ones.get("rag", self._default)

    @property
    def setup(self) -> tuple[str, Mapping[str, str], Mapping[str, str]]:
        """The arguments of another object like this one."""
        source, named = self._sources
        return source, self.tokens, named

    @property
    def uses_tools(self) -> bool:
        """Whether the template of a conversation with tools shows them to the model."""
        return "tools" in self._with_tools.facts.reads

    def source(self, with_tools: bool = False) -> str:
        """The source of the template that renders conversations, or those with tools."""
        return (self._with_tools if with_tools else self._default).source

    def is_cheap(self, conversation: Conversation) -> bool:
        """Whether the template certainly renders the conversation within a few milliseconds, so that the router itself
        may render it. The bound on the cost holds for plain conversations only.
        """
        template = self._chosen(conversation)
        if template.cost is None or not conversation.is_plain or conversation.variables.keys() & self.tokens.keys():
            return False
        messages = conversation.messages
        chars = len(template.source) + sum(len(m.role) + len(joined(m.content)) + MESSAGE_CHARS for m in messages)
        chars += sum(len(value) for value in conversation.variables.values() if isinstance(value, str))
        # With two orders, two prompts are rendered and searched for the text of each system message.
        passes = 1 if len(orders_of(messages)) == 1 else 2 + sum(m.role in SYSTEM_ROLES for m in messages)
        return passes * template.cost.of(len(messages), chars) <= MAX_CHEAP_CHARS

    def compile(self) -> None:
        """Compiles the templates. Raises StartError for an unknown filter or test."""
        for template in (self._default, self._with_tools, self._with_documents):
            template.compile()

    def render(self, conversation: Conversation) -> str:
        """The prompt, up to the place where the assistant's answer begins or the last message goes on. A template that
        refuses or leaves out some of several system messages gets one, as the first message. Raises TemplateError.
        """
        template = self._chosen(conversation)
        if conversation.documents and "documents" not in template.facts.reads:
            raise TemplateError("the model's chat template has no place for `documents`; leave them out", "documents")
        orders, prompts, errors = orders_of(conversation.messages), list[str](), list[TemplateError]()
        if len(orders) == 1:
            return self._rendered(template, conversation, conversation.messages)
        for messages in orders:
            try:
                prompts.append(self._rendered(template, conversation, messages))
            except TemplateError as error:
                errors.append(error)
                continue
            if shows_all(prompts[-1], conversation.messages):
                return prompts[-1]
        if not prompts:
            raise errors[0]
        return prompts[0]

    def _rendered(self, template: JinjaTemplate, conversation: Conversation, given: Sequence[Message]) -> str:
        messages = [message_for(template.facts, message) for message in given]
        continued = None
        if conversation.is_continued:
            if given[-1].content is None:
                raise TemplateError("the last message has no content that could be continued")
            continued = _mark_end(messages[-1])
        text = template.render(
            {
                **self.tokens,
                **conversation.variables,
                "messages": messages,
                "tools": _listed(conversation.tools),
                "documents": _listed(conversation.documents),
                "add_generation_prompt": conversation.begins_an_answer,
            }
        )
        return text if continued is None else _cut(text, continued)

    def _chosen(self, conversation: Conversation) -> JinjaTemplate:
        """As transformers chooses; in addition documents choose the template named `rag`, which its callers name."""
        if conversation.tools:
            return self._with_tools
        return self._with_documents if conversation.documents else self._default


def _listed(values: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    return list(values) if values else None


def _mark_end(message: dict[str, Any]) -> str:
    """Appends END_MARK to the message's text, and returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + END_MARK
        return content
    for part in reversed(content or ()):
        if isinstance(text := part.get("text"), str):
            part["text"] = text + END_MARK
            return text
    raise TemplateError("the last message has no content that could be continued")


def _cut(prompt: str, continued: str) -> str:
    """Cuts the prompt off after the text of the last message, so that the model continues it."""
    text, mark, rest = prompt.rpartition(END_MARK.rstrip())
    if not mark or continued.strip() not in text:
        raise TemplateError(
            "the chat template does not show the last message as it is, so it cannot be continued; send"
            " `continue_final_message` false"
        )
    return text if rest.startswith(" ") else text.rstrip()
