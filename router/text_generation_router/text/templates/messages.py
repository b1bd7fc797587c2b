"""A message as a template gets it: its content and the arguments of its calls in the form that the template takes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from text_generation_router.text.templates.facts import TemplateFacts

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
