"""System messages of a conversation whose template takes only one of them, as the first message."""

from collections.abc import Sequence

from text_generation_router.text.templates.messages import Message, joined

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
