"""What the stages of the check find, and how it travels from their processes to the check."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of a table. `failure` says what is wrong, empty if nothing is."""

    table: str
    cells: Mapping[str, str]  # by column
    figures: Mapping[str, float] = field(default_factory=dict)  # what other stages and the targets read, by name
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage is given. Without a GPU all is as small as the Triton interpreter needs it to be: a rehearsal."""

    device: torch.device
    figures: Mapping[str, float]  # of the stages before

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def append(path: Path, finding: Finding) -> None:
    with path.open("a") as out:
        out.write(json.dumps(asdict(finding)) + "\n")


def read(path: Path) -> Iterator[Finding]:
    """A line that its writer was killed over is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return (Finding(**json.loads(line)) for line in lines if line.endswith("\n"))
