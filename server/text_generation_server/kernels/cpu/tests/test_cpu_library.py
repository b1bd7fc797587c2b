"""What is built, and which of it is used."""

import shutil
from pathlib import Path

import pytest

from text_generation_server.kernels.cpu import build, library, load_kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is built there yet."""
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return tmp_path / "built"


def test_without_a_compiler_nothing_is_built_and_torch_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.build() == []
    assert library.usable_targets() == [] and load_kernels() is None


def test_a_target_the_compiler_does_not_know_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc)")
    monkeypatch.setattr(build, "TARGETS", {"future": ["-march=no-such-processor"]})
    monkeypatch.setattr(build, "FLAGS", ["-O0", *build.FLAGS[1:]])
    assert build.build() == ["portable"]
    assert load_kernels("portable") is not None


def test_the_best_library_that_the_processor_can_run_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.library_path("portable").exists():
        pytest.skip("needs a C compiler (cc) when the package is installed")
    monkeypatch.setattr(library, "_processor_flags", lambda: library.NEEDS["avx2"])
    assert library.usable_targets() == ["avx2", "portable"]
    monkeypatch.setattr(library, "_processor_flags", set)
    assert library.usable_targets() == ["portable"]


def test_every_target_says_what_it_needs() -> None:
    assert set(library.NEEDS) == {*build.TARGETS, *build.PORTABLE}
