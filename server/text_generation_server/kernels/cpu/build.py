"""Compiles csrc/ once for each kind of processor the compiler knows, when the package is built or installed.

Standard library only: the build runs it before anything else is there. Without a C compiler nothing is built, and the
shard computes with torch alone.
"""

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE / "built"
# The best first. What a processor must have is in `library.py`.
TARGETS = {
    "amx": ["-march=sapphirerapids"],
    "avx512_bf16": ["-march=cooperlake"],
    "avx2": ["-march=x86-64-v3"],
}
PORTABLE: dict[str, list[str]] = {"portable": []}
FLAGS = ["-O2", "-std=gnu11", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi"]


def library_path(target: str) -> Path:
    return BUILT / f"kernels-{target}.so"


def build() -> list[str]:
    """The targets that were built; nothing where there is no compiler."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    shutil.rmtree(BUILT, ignore_errors=True)
    if shutil.which(compiler[0]) is None:
        return []
    BUILT.mkdir()
    targets = (TARGETS if platform.machine() == "x86_64" else {}) | PORTABLE
    running = {target: _compile(compiler, flags, library_path(target)) for target, flags in targets.items()}
    # An older compiler does not know the newest processors: those of them get the next best library.
    return [target for target, process in running.items() if process.wait() == 0]


def _compile(compiler: list[str], flags: list[str], out: Path) -> "subprocess.Popen[bytes]":
    sources = sorted(map(str, (HERE / "csrc").glob("*.c")))
    return subprocess.Popen([*compiler, *flags, *FLAGS, *sources, "-lm", "-o", str(out)], stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    print("built:", ", ".join(build()) or "nothing: there is no C compiler (cc)")
