"""Finds the texts that match a pattern of `patterns.toml`."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prose.texts import PAIR, STRING, ProseText

PATTERNS = Path(__file__).parent / "patterns.toml"


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str
    regex: re.Pattern[str]
    why: str
    say: str
    wrong: tuple[str, ...]
    right: tuple[str, ...]
    kinds: frozenset[str]  # kinds of text in which to search; empty: all kinds but PAIR

    def is_for(self, text: ProseText) -> bool:
        return text.kind in self.kinds if self.kinds else text.kind != PAIR


@dataclass(frozen=True, slots=True)
class AllowedWording:
    """A wording that is allowed: `text` in the file `path`."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class ProseFinding:
    path: str
    line: int
    pattern: Pattern
    words: str  # the words that match, and the words around them

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: “{self.words}” ({self.pattern.name}): {self.pattern.why}; say {self.pattern.say}"
        )


@dataclass(slots=True)
class Checker:
    patterns: tuple[Pattern, ...]
    data: tuple[str, ...]
    allowed: tuple[AllowedWording, ...]
    _used: set[AllowedWording] = field(default_factory=set)

    @classmethod
    def from_file(cls, path: Path = PATTERNS) -> "Checker":
        table = tomllib.loads(path.read_text())
        patterns = tuple(_pattern(entry) for entry in table["pattern"])
        allowed = tuple(AllowedWording(entry["path"], entry["text"]) for entry in table.get("allowed", ()))
        return cls(patterns, tuple(entry["path"] for entry in table["data"]), allowed)

    def findings(self, path: str, texts: list[ProseText]) -> Iterator[ProseFinding]:
        """Findings in the texts of one file, in order. `path` is relative to the repository."""
        is_data = path.startswith(self.data)
        allowed = [entry for entry in self.allowed if entry.path == path]
        for text in texts:
            if is_data and text.kind == STRING:
                continue
            joined = text.joined
            for pattern in self.patterns:
                if not pattern.is_for(text):
                    continue
                for match in pattern.regex.finditer(joined):
                    if not self._is_allowed(allowed, joined, match):
                        words = joined[max(0, match.start() - 30) : match.end() + 30].strip()
                        yield ProseFinding(path, text.line_at(match.start()), pattern, words)

    def unused(self, paths: set[str]) -> list[AllowedWording]:
        """Entries for files of `paths` that allowed nothing. To be called after `findings` has read these files."""
        return [entry for entry in self.allowed if entry.path in paths and entry not in self._used]

    def _is_allowed(self, entries: list[AllowedWording], joined: str, match: re.Match[str]) -> bool:
        for entry in entries:
            start = joined.find(entry.text)
            while start >= 0:
                if start <= match.start() and match.end() <= start + len(entry.text) + 1:
                    self._used.add(entry)
                    return True
                start = joined.find(entry.text, start + 1)
        return False


def _pattern(entry: Mapping[str, Any]) -> Pattern:
    regex = re.compile(entry["regex"], re.IGNORECASE)
    wrong, right = tuple(entry["wrong"]), tuple(entry["right"])
    return Pattern(
        name=entry["name"],
        regex=regex,
        why=entry["why"],
        say=entry["say"],
        wrong=wrong,
        right=right,
        kinds=frozenset(entry.get("kinds", ())),
    )
