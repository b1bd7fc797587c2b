"""Texts of models in each format of calls, and what they consist of: the rows of `call_texts.jsonl`, with the fields of
`CallText`. Imports nothing of this repository, so that other servers' readers can be given the same texts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The tools of every request, with the schemas of their arguments.
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "units": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object"},
        },
        "required": ["city"],
    },
    "clock": {"type": "object", "properties": {}},
    "run.code": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}


@dataclass(frozen=True, slots=True)
class CallText:
    format: str
    title: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as JSON text)
    content: str = ""
    reasoning: str = ""
    ids: tuple[str | None, ...] = ()  # as the model has written them
    is_spelled: bool = False  # whether other text contains markers, or parts of them
    prompt: str = ""  # the end of the rendered prompt
    reasoning_format: str = "think"

    @property
    def label(self) -> str:
        return f"{self.format}: {self.title}"


def _of_row(row: dict[str, Any]) -> CallText:
    """The row's fields, with its lists as tuples."""
    tuples = {"calls": tuple(map(tuple, row.get("calls", ()))), "ids": tuple(row.get("ids", ()))}
    return CallText(**row | tuples)


_LINES = Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
CALL_TEXTS = tuple(_of_row(json.loads(line)) for line in _LINES)
