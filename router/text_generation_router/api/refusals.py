"""What is asked for and is not there: refused by its name. Pure: the child processes that read large bodies use it."""

from typing import Any

from text_generation_router.errors import ValidationError

# Fields that are not supported, and the values that ask for nothing; null never does.
SHARED_REFUSALS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({}, []),
    "response_format": ({"type": "text"},),
}
COMPLETION_REFUSALS = SHARED_REFUSALS | {"best_of": (1,), "echo": (False,)}
CHAT_REFUSALS = SHARED_REFUSALS | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_prompt": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}


def refuse(value: dict[str, Any], refusals: dict[str, tuple[Any, ...]]) -> None:
    """Raises ValidationError naming the first field that asks for what there is not."""
    for name, neutral in refusals.items():
        given = value.get(name)
        # Types are compared too: true is not 1.
        if given is not None and not any(type(given) is type(item) and given == item for item in neutral):
            raise ValidationError(f"`{name}` is not supported yet")


def refuse_tool_calls(value: dict[str, Any]) -> None:
    messages = value.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("tool_calls"):
            raise ValidationError("`tool_calls` in `messages` is not supported yet")
