"""The findings of the check's stages, and the file through which a stage's process passes them to the check."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a table. `failure` says what is wrong; it is empty if the check passed."""

    table: str
    cells: Mapping[str, str]  # the text of each column, by the column's name
    figures: Mapping[str, float] = field(default_factory=dict)  # numbers by name, for later stages and for the targets
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a stage. Without a GPU a stage is only rehearsed, with sizes that suit the slow Triton
    interpreter.
    """

    device: torch.device
    figures: Mapping[str, float]  # figures of the stages that ran before

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def append(path: Path, finding: Finding) -> None:
    with path.open("a") as out:
        out.write(json.dumps(asdict(finding)) + "\n")


def read(path: Path) -> Iterator[Finding]:
    """Reads the findings of a file. A last line that was cut off, because its writer was killed, is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return (Finding(**json.loads(line)) for line in lines if line.endswith("\n"))
