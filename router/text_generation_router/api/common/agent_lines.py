"""Leaves out the lines of system prompts that agents write anew for every request. With such a line no two prompts
begin with the same tokens, so the prefix cache finds nothing.

Works on the JSON of a body, before its fields are checked.
"""

import re
from typing import Any

from text_generation_router.api.common.contract import MAX_NAMES

# Lines at the head of a system prompt that account for the request, such as
# `x-anthropic-billing-header: cc_version=2.1.36.1; cc_entrypoint=cli; cch=0a1b2;`.
NAME = r"x-anthropic-[a-z-]{1,64}(?=:)"
ACCOUNTS = re.compile(rf"(?:{NAME}[^\n]*(?:\n|\Z))+")
NAMES = re.compile(rf"^{NAME}", re.MULTILINE)
# A line with the number of tokens that the conversation may still have: at the end of a system prompt, or a message.
COUNTER = re.compile(r"<total_tokens>[^<\n]{1,40} tokens left</total_tokens>")
COUNTER_NAME = "total_tokens"
SYSTEM_ROLES = ("system", "developer")


def without_agent_lines(body: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The body without such lines, and the names of the lines that were left out. A message without any other text is
    left out, too."""
    names: dict[str, None] = {}
    changed: dict[str, Any] = {}
    for field in ("system", "instructions"):
        if field in body:
            changed[field] = _without(body[field], names)
    for field in ("messages", "input"):
        if isinstance(turns := body.get(field), list):
            changed[field] = [turn for turn in (_turn(turn, names) for turn in turns) if turn is not None]
    return (body | changed if names else body), tuple(names)[:MAX_NAMES]


def _turn(turn: Any, names: dict[str, None]) -> Any:
    if not isinstance(turn, dict) or turn.get("role") not in SYSTEM_ROLES:
        return turn
    content = turn.get("content")
    kept = _without(content, names)
    return None if content and not kept else turn | {"content": kept}


def _without(content: Any, names: dict[str, None]) -> Any:
    """`content`, a text or a list of blocks with texts, without the agents' lines. A value of another type is returned
    as it is, and the schema refuses it."""
    if isinstance(content, str):
        return _text(content, names)
    if not isinstance(content, list):
        return content
    blocks = []
    for block in content:
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            blocks.append(block)
        elif (kept := _text(text, names)) or not text:
            blocks.append(block | {"text": kept})
    return blocks


def _text(text: str, names: dict[str, None]) -> str:
    if found := ACCOUNTS.match(text):
        names.update(dict.fromkeys(NAMES.findall(found[0])))
        text = text[found.end() :]
    *before, last = COUNTER.split(text)
    if not before:
        return text
    names[COUNTER_NAME] = None
    return "".join(part.rstrip() for part in before) + last
