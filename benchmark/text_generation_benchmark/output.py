"""Output of the commands: lines on stderr, Markdown tables, and the marked tables of a file that --write replaces."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

START, END = "<!-- table: start -->", "<!-- table: end -->"

Row = Sequence[str]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(reason: str) -> NoReturn:
    """Prints `reason` and ends the command with exit status 1."""
    say(f"Error: {reason}")
    raise SystemExit(1)


def table(head: Row, lines: Sequence[Row]) -> str:
    """A Markdown table. A `|` inside a cell would end the cell, so it is replaced by a `/`."""
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in (head, *lines)]
    return "\n".join([rows[0], f"|{'---|' * len(head)}", *rows[1:]])


def aligned_table(rows: Sequence[Row]) -> str:
    """Cells padded to the width of their column. The first row is the header."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def columns(rows: Iterable[Mapping[str, str]]) -> str:
    """An aligned table. Each row has the same columns, by their names."""
    cells = list(rows)
    return aligned_table([list(cells[0]), *(list(row.values()) for row in cells)])


def show_table(text: str, write: Path | None, name: str = "table") -> None:
    """Prints the table. If there is a file to write, replaces the table called `name` in it."""
    print(text)
    if write is not None:
        write.write_text(replace_table(write.read_text(), text, name))


def replace_table(text: str, new: str, name: str = "table") -> str:
    """`text` with `new` between the marks of the table `name`. ValueError if `text` does not have the marks."""
    first, last = START.replace("table", name), END.replace("table", name)
    before, start, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        raise ValueError(f"there is no {first} … {last} to write into")
    return f"{before}{first}\n{new}\n{last}{after}"
