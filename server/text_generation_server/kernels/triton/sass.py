"""What the machine code of a compiled kernel shows without a GPU: registers, spilled registers, length of its loops."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from triton import knobs

# A line of nvdisasm: an instruction behind its address, whose first word may be a predicate, or a label.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
LABEL = re.compile(r"^(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that has no other loop within it."""

    instructions: int
    exponentials: int
    spills: int  # loads from local memory and stores to it


@dataclass(frozen=True, slots=True)
class MachineCode:
    registers: int  # registers of a thread
    stack: int  # bytes of local memory of a thread
    instructions: int
    spills: int
    loops: tuple[Loop, ...]

    @property
    def spills_in_loops(self) -> int:
        return sum(loop.spills for loop in self.loops)

    @property
    def tiles(self) -> list[int]:
        """Instructions that a warp runs for one tile of attention, in each loop over tiles: they have exponentials."""
        return [loop.instructions for loop in self.loops if loop.exponentials]


NO_CODE = MachineCode(0, 0, 0, 0, ())


def read_code(cubin: bytes) -> MachineCode:
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
        text = _run(knobs.nvidia.nvdisasm.path, "--print-code", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return parse(text, int(found[1]), int(found[2]))


def _run(*command: str | Path) -> str:
    # A large kernel takes seconds, and beside the compilers of `make compile-gpu` on a busy machine more than a minute.
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def parse(text: str, registers: int, stack: int) -> MachineCode:
    """`text` is the listing of one kernel."""
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[str, int]] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := INSTRUCTION.match(line):
            names.append(instruction[2])
            if instruction[2].startswith("BRA") and (target := TARGET.search(instruction[3])):
                jumps.append((target[1], len(names)))
    # The loop that a kernel's end is padded with jumps to itself.
    back = {(labels[label], end) for label, end in jumps if label in labels and labels[label] < end - 1}
    loops = [_loop(names[start:end]) for start, end in sorted(back) if _is_innermost(start, end, back)]
    return MachineCode(registers, stack, len(names), _loop(names).spills, tuple(loops))


def _is_innermost(start: int, end: int, loops: set[tuple[int, int]]) -> bool:
    """The last one of several jumps back to one place ends the loop."""
    within = any(start < other and last <= end for other, last in loops)
    return not within and not any(start == other and last > end for other, last in loops)


def _loop(names: list[str]) -> Loop:
    exponentials = names.count("MUFU.EX2")
    return Loop(len(names), exponentials, sum(name.startswith(("LDL", "STL")) for name in names))
