"""The findings of the check's stages, case by case, and the journal through which a stage's process passes them to the
check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a table. `failure` says what is wrong; it is empty if the check passed."""

    table: str
    cells: Mapping[str, str]  # the text of each column, by the column's name
    figures: Mapping[str, float] = field(default_factory=dict)  # numbers by name, for later stages and for the targets
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of a case, without the cells that all lines of the case share."""

    cells: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A part of a stage that may fail alone. `cells` are unique within the stage."""

    table: str
    cells: Mapping[str, str]
    run: Callable[[], Iterable[Measured]]

    @property
    def name(self) -> str:
        return ", ".join(self.cells.values())

    def finding(self, measured: Measured) -> Finding:
        return Finding(self.table, {**self.cells, **measured.cells}, measured.figures, measured.failure)


@dataclass(frozen=True, slots=True)
class FailedCase:
    stage: str
    function: str  # as in plans.Stage
    case: str


@dataclass(frozen=True, slots=True)
class Known:
    """What the stages that ran before leave for the next ones."""

    figures: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[FailedCase, ...] = ()  # in the order of running
    out: str = ""  # the results' folder; empty: none


@dataclass(frozen=True, slots=True)
class Request:
    """What the check asks of a stage's process."""

    function: str  # as in plans.Stage
    journal: str
    known: Known = Known()
    only: str = ""  # name of the only case to run; empty: all

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Request:
        fields = json.loads(path.read_text())
        known = fields.pop("known")
        failed = tuple(FailedCase(**case) for case in known.pop("failed"))
        return cls(**fields, known=Known(**known, failed=failed))


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a stage. Without a GPU a stage is only rehearsed, with sizes that suit the slow Triton
    interpreter."""

    device: torch.device
    request: Request

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def figures(self) -> Mapping[str, float]:
        return self.request.known.figures


@dataclass(slots=True)
class JournalContent:
    findings: list[Finding] = field(default_factory=list)
    begun: dict[str, Finding] = field(default_factory=dict)  # an empty finding for each case that has begun, by name
    unended: str = ""  # name of the case that has begun and not ended
    failed: list[str] = field(default_factory=list)  # names of the cases with a failure
    broken: list[str] = field(default_factory=list)  # names of the cases that broke the GPU's context or the process


class Journal:
    """A file with a line of JSON for each beginning and end of a case, and for each finding."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, name: str, table: str, cells: Mapping[str, str]) -> None:
        self._write({"begin": name, "finding": asdict(Finding(table, cells))})

    def add(self, name: str, finding: Finding) -> None:
        self._write({"of": name, "finding": asdict(finding)})

    def end(self, name: str, broken: bool = False) -> None:
        self._write({"end": name, "broken": broken})

    def read(self) -> JournalContent:
        """Reads the file. A last line that was cut off, because its writer was killed, is left out."""
        content = JournalContent()
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        for line in lines:
            if line.endswith("\n"):
                self._take(json.loads(line), content)
        return content

    def _take(self, entry: dict[str, Any], content: JournalContent) -> None:
        if "begin" in entry:
            content.unended = entry["begin"]
            content.begun[content.unended] = Finding(**entry["finding"])
        elif "of" in entry:
            content.findings.append(Finding(**entry["finding"]))
            if content.findings[-1].failure and entry["of"] not in content.failed:
                content.failed.append(entry["of"])
        else:
            content.unended = ""
            content.broken += [entry["end"]] if entry["broken"] else []

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(entry) + "\n")
