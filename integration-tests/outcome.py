"""What came of a fault, and the tables of all programs that inject faults."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from streams import Comparison

from text_generation_benchmark import output


@dataclass(frozen=True, slots=True)
class Outcome:
    comparison: Comparison | None = None  # the streams that were under way, if there were any
    figures: Mapping[str, Any] = field(default_factory=dict)  # by what they measure, with its unit
    wrong: Mapping[str, bool] = field(default_factory=dict)  # what must not hold, and whether it holds

    def failures(self) -> list[str]:
        found = [text for text, is_wrong in self.wrong.items() if is_wrong]
        return found + (self.comparison.failures() if self.comparison else [])

    def cells(self) -> list[object]:
        streams = self.comparison
        counts = [streams.streams, streams.lost, streams.wrong_tokens, streams.other_texts] if streams else ["–"] * 4
        shown = [f"{name} {_shown(value)}" for name, value in self.figures.items()]
        return [*counts, ", ".join(shown), "; ".join(self.failures()) or "held"]


CELLS = "streams|lost|wrong tokens|other texts|measured|"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return (", ".join(map(str, value)) or "nothing") if isinstance(value, list | tuple) else str(value)


def table(head: str, rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, or nothing if it has no rows. `head`: names of its columns, with a | between them."""
    return output.table(head.split("|"), [[str(cell) for cell in row] for row in rows]) if rows else ""


def on_this_machine(*tables: str, model: str = "Demo model") -> str:
    """Tables below a line that tells what they were measured with."""
    head = f"{model}, float32, {os.cpu_count()} cores, torch {version('torch')}."
    return "\n\n".join([head, *filter(None, tables)])


def innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Report:
    """Tables and failures of a program, printed and written as they come. `write`: a Markdown file with marks."""

    def __init__(self, write: Path | None) -> None:
        self.failures: list[str] = []
        self._write = write

    def take(self, name: str, text: str, failures: Sequence[str] = ()) -> None:
        print()
        output.show_table(text, self._write, name)
        print()
        self.fail(*failures)

    def fail(self, *failures: str) -> None:
        for failure in failures:
            print(f"FAILED: {failure}", flush=True)
        self.failures += failures

    @property
    def status(self) -> int:
        """The exit status of the program."""
        return 1 if self.failures else 0
