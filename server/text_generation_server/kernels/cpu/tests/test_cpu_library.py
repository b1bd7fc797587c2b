"""Which libraries are built, which error is shown if one is not, and which library is used."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from text_generation_common import cpu_features
from text_generation_common.flags.kinds import CpuTarget
from text_generation_server.errors import OptionError
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.cpu import build, library, load_kernels
from text_generation_server.kernels.cpu.build import CONSTANTS, KERNELS, SOURCES, BuildError, read_declarations

CPU = torch.device("cpu")
HATCH_BUILD = Path(__file__).parents[5] / "hatch_build.py"
# A compiler that builds everything without team.c among its sources, and fails with its own message otherwise.
FAILING_COMPILER = """#!/bin/sh
case "$*" in
  *team.c*) echo "team.c:7:1: error: the moon is full" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for libraries in which nothing is built yet."""
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return tmp_path / "built"


@pytest.fixture
def failing_compiler(tmp_path: Path) -> str:
    path = tmp_path / "cc-fails"
    path.write_text(FAILING_COMPILER)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def copied_build(tmp_path: Path) -> Path:
    """build.py and csrc/ in a folder of their own, as the package's build finds them."""
    shutil.copytree(build.SOURCES, tmp_path / "copy" / "csrc")
    return Path(shutil.copy(str(build.__file__), tmp_path / "copy"))


@pytest.fixture
def short_sources(copied_build: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """csrc/ with all headers and one short file."""
    sources = copied_build.parent / "csrc"
    for path in sources.glob("*.c"):
        if path.name != "team.c":
            path.unlink()
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def run(script: Path, compiler: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"CC": compiler}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def needs_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc)")


def test_without_a_compiler_nothing_is_built_and_torch_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert set(build.build()) == {*build._targets()}
    assert library.choose_target().target is None and load_kernels() is None
    why = "there was no C compiler (no-such-compiler) when the package was built"
    assert select_backend(CPU).name == f"torch's, since {why}"


def test_the_build_of_the_package_succeeds_without_a_compiler(copied_build: Path) -> None:
    done = run(copied_build, "no-such-compiler")
    assert done.returncode == 0 and "built: nothing" in done.stdout
    assert "not portable: there was no C compiler (no-such-compiler)" in done.stdout
    assert (copied_build.parent / "built" / "skipped.json").exists()


def test_a_compile_error_fails_the_build_with_the_compilers_words(copied_build: Path, failing_compiler: str) -> None:
    built = copied_build.parent / "built"
    built.mkdir()
    (built / "kernels-portable.so").write_text("the one before")
    done = run(copied_build, failing_compiler)
    assert done.returncode == 1
    assert "do not compile for portable" in done.stderr and "error: the moon is full" in done.stderr
    assert "no C compiler" not in done.stdout + done.stderr
    assert [path.name for path in built.iterdir()] == ["kernels-portable.so"]


def test_a_compile_error_fails_the_build_hook(
    tmp_path: Path, copied_build: Path, failing_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", failing_compiler)
    kernels, features = tmp_path / "server/text_generation_server/kernels", tmp_path / "common/text_generation_common"
    kernels.mkdir(parents=True)
    copied_build.parent.rename(kernels / "cpu")
    shutil.copytree(
        Path(cpu_features.__file__).parent, features, ignore=lambda _, names: {*names} - {"cpu_features.py"}
    )
    with pytest.raises(SystemExit, match="the moon is full"):
        runpy.run_path(shutil.copy(HATCH_BUILD, tmp_path))["compile_kernels"](every_target=True)


def test_an_install_builds_the_best_target_alone_and_a_library_that_is_current_stays(
    folder: Path, short_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    monkeypatch.setattr(build, "TARGETS", {"avx512": ["-march=no-such-processor"], "avx2": []})
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    assert list(build.build(["avx512", "avx2", "portable"])) == ["avx512", "portable"]
    assert build.why_skipped()["portable"] == build.ONLY_BEST and "no-such-processor" in build.why_skipped()["avx512"]
    before = build.library_path("avx2").stat()
    (folder / "kernels-portable.so").write_text("of other sources")
    build.build(["avx2", "portable"])
    assert [path.name for path in folder.glob("*.so")] == ["kernels-avx2.so"]
    assert build.library_path("avx2").stat() == before


@pytest.mark.parametrize(("option", "wrong"), [("-DIS_KNOWN", "!defined(IS_KNOWN)"), ("-mno-such-instruction", "0")])
def test_a_target_is_built_with_what_only_some_of_its_processors_have_if_the_compiler_knows_it(
    folder: Path, short_sources: Path, monkeypatch: pytest.MonkeyPatch, option: str, wrong: str
) -> None:
    needs_compiler()
    monkeypatch.setattr(build, "TARGETS", {"avx2": []})
    monkeypatch.setattr(build, "OPTIONAL", {"avx2": option})
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    (short_sources / "optional.c").write_text(f"#if {wrong}\n#error left out\n#endif\n")
    build.build(["avx2"])
    assert build.library_path("avx2").exists()


@pytest.mark.parametrize(
    ("features", "name"), [("avx512", "cpu (avx2); not avx512, since "), ("portable", "torch's, since ")]
)
def test_a_change_of_processor_is_told_with_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, features: str, name: str
) -> None:
    """The kernels of an install for one processor, on a better one and on a lesser one."""
    built = Path(str(library.__file__)).parent / "built" / "kernels-avx2.so"
    if not built.exists():
        pytest.skip("needs a C compiler (cc) when the package is installed")
    folder.mkdir()
    shutil.copy(built, folder)
    (folder / "skipped.json").write_text(json.dumps(dict.fromkeys(("avx512", "portable"), build.ONLY_BEST)))
    flags = cpu_features.NEEDS[features] | (cpu_features.NEEDS["avx2"] if features == "avx512" else set())
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    assert select_backend(CPU).name == f"{name}{build.ONLY_BEST}" and "`make kernels`" in build.ONLY_BEST


def test_a_warning_fails_the_check(copied_build: Path, short_sources: Path) -> None:
    needs_compiler()
    (short_sources / "team.c").write_text("static int nobody_calls_this(void) { return 1; }\n")
    done = run(copied_build, "cc", "--check")
    assert done.returncode == 1 and "nobody_calls_this" in done.stderr
    assert not (copied_build.parent / "built").exists()


def test_python_and_the_compiler_must_agree_on_every_argument(
    folder: Path, short_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler()
    monkeypatch.setattr(build, "TARGETS", {})
    monkeypatch.setitem(build.KERNELS, "embed", dict.fromkeys(("ids", "weight", "tokens", "row_bytes", "out"), "q"))
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    with pytest.raises(build.BuildError, match="embed: tokens is not where Python puts it"):
        build.build()


def test_a_target_the_compiler_does_not_know_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiler()
    monkeypatch.setattr(build, "TARGETS", {"avx2": ["-march=no-such-processor"]})
    monkeypatch.setattr(library, "TARGETS", {"avx2": []})
    monkeypatch.setattr(library, "processor_flags", lambda: cpu_features.NEEDS["avx2"])
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    built = Path(str(library.__file__)).parent / "built" / "kernels-portable.so"
    if built.exists():  # a library of the same sources stays, and does not have to be compiled for 10 s
        folder.mkdir()
        shutil.copy(built, folder)
    skipped = build.build()
    assert list(skipped) == ["avx2"] and "no-such-processor" in skipped["avx2"]
    assert load_kernels("portable") is not None and load_kernels("avx2") is None
    name = select_backend(CPU).name
    assert name.startswith("cpu (portable); not avx2, since cc could not build for it when the package was built:")


def test_the_best_library_that_the_processor_can_run_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.library_path("portable").exists():
        pytest.skip("needs a C compiler (cc) when the package is installed")
    monkeypatch.setattr(library, "processor_flags", lambda: cpu_features.NEEDS["avx2"])
    assert library.choose_target().target == "avx2" and library.why_not("portable") is None
    assert "; not avx512, since this processor has no avx512bw, avx512cd, avx512dq" in select_backend(CPU).name
    monkeypatch.setattr(library, "processor_flags", set)
    assert library.choose_target().target == "portable"


def test_a_library_built_from_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.library_path("portable").exists():
        pytest.skip("needs a C compiler (cc) when the package is installed")
    monkeypatch.setattr(library, "SOURCES_DIGEST", "of other sources")
    assert load_kernels() is None
    assert library.why_not("portable") == "it was built from other C sources; install the package again"


def test_every_target_says_what_it_needs_and_can_be_asked_for() -> None:
    assert list(cpu_features.NEEDS) == [*build.TARGETS, *build.PORTABLE] == [*CpuTarget]


def test_a_target_that_is_asked_for_is_used_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.library_path("portable").exists():
        pytest.skip("needs a C compiler (cc) when the package is installed")
    assert select_backend(CPU, "portable").name == "cpu (portable)"
    monkeypatch.setattr(library, "processor_flags", lambda: cpu_features.NEEDS["avx512"] | cpu_features.NEEDS["avx2"])
    assert library.choose_target().target == "avx512"
    words = "--cpu-target amx cannot be used, since this processor has no amx_bf16, .*: leave it out, or choose one of"
    with pytest.raises(OptionError, match=f"{words} avx512, avx2, portable"):
        select_backend(CPU, "amx")


def test_a_call_must_name_every_argument_and_no_other() -> None:
    packer = library.Packer(1, build.KERNELS["embed"])
    given = dict.fromkeys(build.KERNELS["embed"], 7)
    assert packer.pack(given) == packer.pack(dict(reversed(given.items())))
    for wrong in (given | {"rows": 7}, {name: 7 for name in given if name != "out"}):
        with pytest.raises(AssertionError, match=r"taken: .*'row_bytes', 'out'"):
            packer.pack(wrong)


# The C sources: each name has one meaning, and Python reads arguments.h as the compiler does.
FUNCTION = r"^(?!#|typedef)[A-Za-z][\w *]*?[ *](\w+)\([^;{}]*\) \{"
STRUCT = r"^struct (?:__attribute__\(\(\w+\)\) )?(\w+) \{"
MACRO = r"^#define (\w+)"


def test_no_function_struct_or_macro_has_the_name_of_another() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCES.glob("*.[ch]")):
        for pattern in (FUNCTION, STRUCT, MACRO):
            for name in re.findall(pattern, path.read_text(), re.MULTILINE):
                files[name].add(f"{path.name} {pattern}")
    assert {"gemm", "score_keys", "attend_tile_by_type", "tile_config", "query_block", "LANES"} <= files.keys()
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_arguments_are_read_in_order_and_by_kind() -> None:
    text = """
    enum type { F32 = 0, BF16 = 1 }; /* NOT = 7 */
    enum { MAX_ARGUMENTS = 16 };
    /* struct old_arguments { long gone; }; */
    struct scale_arguments {
      const float *x; /* [T]; or null */
      long tokens;
      double factor;
      void *out;
    };
    """
    kernels, constants = read_declarations(text)
    assert constants == {"F32": 0, "BF16": 1, "MAX_ARGUMENTS": 16}
    assert list(kernels["scale"].items()) == [("x", "P"), ("tokens", "q"), ("factor", "d"), ("out", "P")]
    assert list(kernels) == ["scale"]


@pytest.mark.parametrize("field", ["int tokens", "float eps", "long a, b", "enum type type", "long numbers[2]"])
def test_arguments_that_do_not_take_8_bytes_are_refused(field: str) -> None:
    with pytest.raises(BuildError, match=re.escape(field)):
        read_declarations(f"struct scale_arguments {{\n  {field};\n}};")


def test_every_exported_kernel_has_declared_arguments() -> None:
    sources = "".join(path.read_text() for path in SOURCES.glob("*.c"))
    assert set(re.findall(r"^EXPORT void (\w+)\(const void \*arguments", sources, re.MULTILINE)) == set(KERNELS)
    assert max(map(len, KERNELS.values())) <= CONSTANTS["MAX_ARGUMENTS"]
