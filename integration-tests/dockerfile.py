"""Reads deploy/Dockerfile and its list of files that the build does not see."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILE = REPOSITORY / "deploy" / "Dockerfile"
IGNORED = FILE.with_name("Dockerfile.dockerignore")


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str


@dataclass(slots=True)
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def texts(self, name: str) -> list[str]:
        return [each.text for each in self.instructions if each.name == name]

    @property
    def environ(self) -> dict[str, str]:
        words = [word for text in self.texts("ENV") for word in shlex.split(text)]
        return dict(word.split("=", 1) for word in words)

    @property
    def entry_point(self) -> list[str]:
        return list(json.loads(self.texts("ENTRYPOINT")[-1]))

    @property
    def health_command(self) -> list[str]:
        return list(json.loads(self.texts("HEALTHCHECK")[-1].partition("CMD ")[2]))


def stages() -> list[Stage]:
    found: list[Stage] = []
    for each in _instructions(FILE.read_text()):
        if each.name == "FROM":
            base, _, name = each.text.partition(" AS ")
            found.append(Stage(base, name))
        else:
            found[-1].instructions.append(each)
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        yield Instruction(name, rest.strip())


def context() -> list[str]:
    """The tracked files that the build sees. The last line that names a file, or a folder around it, counts."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    patterns = [line for line in IGNORED.read_text().splitlines() if line and not line.startswith("#")]
    return [path for path in listed.splitlines() if not _is_ignored(path, patterns)]


def _is_ignored(path: str, patterns: list[str]) -> bool:
    parts = path.split("/")
    around = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    is_ignored = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        # `**/` also stands for no folder at all.
        if any(fnmatch(each, bare) or fnmatch(f"/{each}", bare.replace("**/", "*/")) for each in around):
            is_ignored = not pattern.startswith("!")
    return is_ignored
