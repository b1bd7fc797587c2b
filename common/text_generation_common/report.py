"""How a command reports the error that ends it: a line with the cause, and a line that says what to do."""

import json
import logging
import re
from collections.abc import Sequence

from text_generation_common.logs import JsonFormatter

_ERROR = "error: "
# Words with which the part of an error begins that says what to do.
_WORDS = (
    "ask|check|choose|convert|delete|download|give|if|install|leave|look|lower|make|pack|pass|pip|please|quantize|raise"
    "|remove|repair|run|set|start|try|unset|use|write|you need|did you mean|do (?:its|the|they)|does it|is it|is there"
)
_ADVICE = re.compile(rf"[:;.] ((?:{_WORDS})\b.*)", re.IGNORECASE)


def parted(text: str) -> tuple[str, str]:
    """The cause, and what to do: "" if `text`, an error's one line, does not say it."""
    text = " ".join(text.split())
    found = _ADVICE.search(text)
    return (text, "") if found is None else (text[: found.start()], found[1])


def last_told(lines: Sequence[str]) -> str:
    """The last cause among these lines that was written by `told`, in one of its two forms; "" if there is none."""
    return next(filter(None, map(_cause, reversed(lines))), "")


def _cause(line: str) -> str:
    if line.startswith(_ERROR):
        return line.removeprefix(_ERROR)
    try:
        entry = json.loads(line) if line.startswith("{") else {}
    except ValueError:  # the line is not whole
        return ""
    return str(entry["message"]) if "kind" in entry and entry.get("level") == "ERROR" else ""


def told(text: str, hint: str = "", kind: str = "", json_output: bool = False) -> str:
    """The error as one or two lines of text, or as one JSON object. `kind` is the name of the error's class, which
    users of TGI know; only JSON has it."""
    cause, advice = (text, hint) if hint else parted(text)
    if not json_output:
        return f"{_ERROR}{cause}" + (f"\nhint: {advice}" if advice else "")
    fields = ({"hint": advice} if advice else {}) | ({"kind": kind} if kind else {})
    record = {"name": "text_generation_launcher", "levelname": "ERROR", "msg": cause, "fields": fields}
    return JsonFormatter().format(logging.makeLogRecord(record))
