"""Compiles csrc/ for kinds of processors, when the package is built or installed; and reads csrc/arguments.h, the one
declaration of what Python passes to C.

Standard library only: the build runs this file before any other package is installed. Without a C compiler nothing is
built, the shard computes with torch alone, and built/skipped.json says why.

    python build.py                  # builds every target that the compiler knows
    python build.py avx2 portable    # builds the first of these targets that the compiler knows
    python build.py --check          # compiles with warnings as errors, and keeps nothing

A library that was built from the same sources with this file is not built again.
"""

import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
BUILT = HERE / "built"
SOURCES = HERE / "csrc"
# The best target comes first. `library.py` lists the processor features that each target needs.
TARGETS = {
    "amx": ["-march=sapphirerapids"],
    "avx512_bf16": ["-march=cooperlake"],
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
}
PORTABLE: dict[str, list[str]] = {"portable": []}
# Macros for instructions that only some processors of a target have: defined where compiler and assembler know them.
OPTIONAL = {"avx2": "-DCAN_AVX_VNNI"}
FLAGS = ["-O2", "-std=gnu11", "-pthread", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# A test program for a target. A compiler that cannot build it lacks something that the target needs, so the target is
# left out. A compiler that can build it must build csrc/ too.
PROBE = """
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
_Static_assert(sizeof(long) == 8 && sizeof(void *) == 8, "the kernels need 64-bit numbers and pointers");
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__)
__m512 probe(__m512 sums, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sums, a, b); }
#endif
#if defined(__AMX_BF16__)
void probe_tiles(void) { _tile_dpbf16ps(0, 1, 2); }
#endif
#if defined(CAN_AVX_VNNI)
#pragma GCC target("avxvnni")
__m256i probe_bytes(__m256i sums, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(sums, a, b); }
#endif
"""
# Why a target has no library, if only the best target for one machine was asked for.
ONLY_BEST = "`make install` has built the kernels for one kind of processor only; `make kernels` builds them for all"
POINTER = "P"
WORD_BYTES = 8

# For each argument's name: its code in the module struct, P for a pointer, q an integer, d a floating-point number.
Arguments = dict[str, str]


class BuildError(Exception):
    """The kernels do not compile. The text contains the compiler's output."""


def read_declarations(text: str) -> tuple[dict[str, Arguments], dict[str, int]]:
    """The arguments of each kernel in arguments.h, in order, and its constants (NAME = value)."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    structs = re.findall(r"struct (\w+)_arguments \{(.*?)\};", text, re.DOTALL)
    kernels = {name: dict(map(_argument, body.split(";")[:-1])) for name, body in structs}
    return kernels, {name: int(value) for name, value in re.findall(r"\b([A-Z]\w*) = (\d+)", text)}


def _argument(declaration: str) -> tuple[str, str]:
    match = re.fullmatch(r"(?:const )?(\w+) (\*?)(\w+)", declaration.strip())
    codes = {"long": "q", "double": "d"}
    if match is None or not (match[2] or match[1] in codes):
        raise BuildError(f"arguments.h: {declaration.strip()!r} is not a pointer, a long or a double")
    return match[3], POINTER if match[2] else codes[match[1]]


KERNELS, CONSTANTS = read_declarations((SOURCES / "arguments.h").read_text())


def sources_digest() -> str:
    """SHA-256 of all C sources, which a library carries in itself: one that was built from others is not used."""
    files = sorted(SOURCES.glob("*.[ch]"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


SOURCES_DIGEST = sources_digest()


def library_path(target: str) -> Path:
    return BUILT / f"kernels-{target}.so"


def why_skipped() -> dict[str, str]:
    """Targets that the last build skipped, each with the reason."""
    try:
        skipped: dict[str, str] = json.loads((BUILT / "skipped.json").read_text())
    except FileNotFoundError:
        return {}
    return skipped


def build(best_of: Sequence[str] = ()) -> dict[str, str]:
    """Compiles the libraries of all targets or, with `best_of`, of the first of these that compiler and system can do.
    Libraries of the same sources stay. Returns the targets that were skipped, and why. BuildError if the sources do not
    compile: then no file has changed."""
    skipped: dict[str, str] = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for targets in [[target] for target in best_of] or [[*_targets()]]:
            skipped |= _compile_into(folder, [target for target in targets if not _is_current(target)], FLAGS)
            if any(_is_granted(target, folder) for target in targets if target not in skipped):
                break
        BUILT.mkdir(exist_ok=True)
        for stale in (library_path(target) for target in _targets() if not _is_current(target)):
            stale.unlink(missing_ok=True)
        for path in folder.glob("*.so"):
            shutil.copy(path, BUILT)
    skipped = {t: skipped.get(t, ONLY_BEST) for t in _targets() if not library_path(t).exists()}
    (BUILT / "skipped.json").write_text(json.dumps(skipped, indent=2) + "\n")
    return skipped


def _is_current(target: str) -> bool:
    """Whether the target's library was built from these sources, and not before this file, which has the flags."""
    library = library_path(target)
    if not library.exists() or library.stat().st_mtime < Path(__file__).stat().st_mtime:
        return False
    return SOURCES_DIGEST.encode() in library.read_bytes()


def _is_granted(target: str, folder: Path) -> bool:
    """Whether the system lets programs use the target's instructions. Its library is in `folder` or built before."""
    library = next(folder.glob(library_path(target).name), library_path(target))
    return target != "amx" or ctypes.CDLL(str(library)).request_matrix_unit() == 0


def check() -> dict[str, str]:
    """Compiles everything with warnings as errors. Returns the targets that this compiler cannot check, and why.
    BuildError with all warnings."""
    with TemporaryDirectory() as folder:
        return _compile_into(Path(folder), _targets(), [*FLAGS, *WARNINGS])


def built_targets() -> list[str]:
    return [target for target in (*TARGETS, *PORTABLE) if library_path(target).exists()]


def _targets() -> dict[str, list[str]]:
    return (TARGETS if platform.machine() == "x86_64" else {}) | PORTABLE


def _compile_into(folder: Path, targets: Iterable[str], flags: list[str]) -> dict[str, str]:
    """Compiles a library for each target into `folder`, with one compiler for each core. Returns the targets that were
    skipped, and why."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return dict.fromkeys(targets, f"there was no C compiler ({compiler[0]}) when the package was built")
    probe, assertions = folder / "probe.c", folder / "assertions.c"
    probe.write_text(PROBE)
    assertions.write_text(_assertions())
    commands = {target: [*compiler, *_targets()[target], f"-I{SOURCES}"] for target in targets}
    sources = [assertions, *sorted(SOURCES.glob("*.c"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def failures(targets: Iterable[str], runs: Callable[[str], list[list[object]]]) -> dict[str, str]:
            """The compiler's output for each target for which it fails. The last argument of a run is its result."""
            running = {t: [pool.submit(_run, [*commands[t], *a[:-1], "-o", a[-1]]) for a in runs(t)] for t in targets}
            words = {t: "\n".join(filter(None, (run.result() for run in each))) for t, each in running.items()}
            return {t: text for t, text in words.items() if text}

        unknown = failures(commands, lambda t: [[*FLAGS, probe, folder / f"{t}.probe"]])
        able = [target for target in commands if target not in unknown]
        more = OPTIONAL.keys() & able
        for target in more - failures(more, lambda t: [[*FLAGS, OPTIONAL[t], probe, folder / f"{t}.probe"]]).keys():
            commands[target].append(OPTIONAL[target])
        failed = failures(able, lambda t: [[*flags, "-c", c, folder / f"{t}-{c.stem}.o"] for c in sources]) or failures(
            able, lambda t: [[*flags, *folder.glob(f"{t}-*.o"), "-lm", folder / library_path(t).name]]
        )
    if failed:
        raise BuildError("\n".join(f"the CPU kernels do not compile for {t}:\n{words}" for t, words in failed.items()))
    said = f"{compiler[0]} could not build for it when the package was built"
    return {target: f"{said}: {_first_error(words)}" for target, words in unknown.items()}


def _run(command: Sequence[object]) -> str:
    """Runs a compiler. Returns its output if it fails, and otherwise nothing."""
    done = subprocess.run([*map(str, command)], stderr=subprocess.PIPE, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}, without a message"


def _first_error(words: str) -> str:
    lines = words.splitlines()
    return next((line for line in lines if "error" in line), lines[0])


def _assertions() -> str:
    """C assertions that fail to compile unless the compiler puts each argument at the same offset as Python's module
    struct.
    """
    lines = ["#include <stddef.h>", '#include "team.h"']
    for kernel, arguments in KERNELS.items():
        for number, name in enumerate(arguments):
            at = f"offsetof(struct {kernel}_arguments, {name}) == {number * WORD_BYTES}"
            lines.append(f'_Static_assert({at}, "{kernel}: {name} is not where Python puts it");')
        size = f"sizeof(struct {kernel}_arguments) == {len(arguments) * WORD_BYTES}"
        fits = f"{len(arguments)} <= MAX_ARGUMENTS"
        lines.append(f'_Static_assert({size} && {fits}, "{kernel}: not as large as Python expects");')
    lines.append(f'EXPORT const char sources_digest[] = "{SOURCES_DIGEST}";')
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    checks = arguments == ["--check"]
    try:
        skipped = check() if checks else build(arguments)
    except BuildError as error:
        sys.exit(str(error))
    done = [target for target in _targets() if target not in skipped]
    print("compiled without a warning:" if checks else "built:", ", ".join(done) or "nothing")
    for target, reason in skipped.items():
        if reason != ONLY_BEST:
            print(f"not {target}: {reason}")
    if checks and not done:
        sys.exit("the C code was not checked")


if __name__ == "__main__":
    main(sys.argv[1:])
