"""Command lines in the code blocks of our documents."""

import re
from collections.abc import Iterator
from pathlib import Path

from manifests import REPOSITORY

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
# What a shell puts in the place of $(hostname …) and of a variable.
FILLED = ((re.compile(r"\$\(.*?\)"), "10.0.0.3"), (re.compile(r"\$\w+"), "0"))


def commands(page: Path, program: str) -> Iterator[str]:
    """Command lines in the code blocks of a page that begin with `program`, from there to the end of the line or to a
    comment."""
    is_fenced = False
    for line in page.read_text().splitlines():
        is_fenced ^= line.startswith("```")
        if (is_fenced or line.startswith("    ")) and f"{program} " in line:
            for pattern, word in FILLED:
                line = pattern.sub(word, line)
            yield line[line.index(program) :].partition(" # ")[0].rstrip("'")
