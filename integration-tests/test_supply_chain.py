"""The packages that `make install` fetches: each has a version and hashes, and serving needs only a few."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
MAX_DIRECT_DEPENDENCIES = 25
MAX_RELEASE_WORDS = 600
MAX_UPGRADING_LINES = 10
# An import of a script that runs in the environment of a peer.
ELSEWHERE = {
    "benchmark/text_generation_benchmark/peers/gguf_file.py: gguf",
    "benchmark/text_generation_benchmark/peers/llama_library.py: gguf",
    "benchmark/text_generation_benchmark/peers/llama_library.py: llama_cpp",
}


def entries(lock: Path) -> Iterator[tuple[Requirement, frozenset[str]]]:
    """Each requirement of a lock file, and its hashes."""
    joined = re.sub(r"\\\n\s*", " ", lock.read_text())
    for line in joined.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = re.split(r"\s--hash=", line.strip())
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", found.strip()) for found in hashes)
            yield Requirement(requirement), frozenset(found.strip() for found in hashes)


def test_every_locked_package_has_one_version_and_hashes_except_torch():
    assert {lock.name for lock in LOCKS} == {"build.txt", "run.txt", "test.txt", "tools.txt", "torch.txt"}
    for lock in LOCKS:
        for requirement, hashes in entries(lock):
            assert [spec.operator for spec in requirement.specifier] == ["=="], requirement
            assert hashes or requirement.name == "torch", requirement


def test_the_lock_fits_pyproject():
    """Fails if a dependency changed in pyproject.toml and `make lock` was not run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked: dict[str, list[Requirement]] = {}
    for lock in LOCKS:
        if lock.name in ("test.txt", "torch.txt"):
            for requirement, _ in entries(lock):
                locked.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        wanted = Requirement(text)
        pins = locked[canonicalize_name(wanted.name)]
        for pin in pins:
            (version,) = [spec.version for spec in pin.specifier]
            assert wanted.specifier.contains(version), f"{wanted} against {pin}"


def test_build_requirements_are_those_of_pyproject():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    lines = (ROOT / "requirements" / "build.in").read_text().splitlines()
    assert set(requires) <= set(lines)


def test_few_packages_are_needed_to_serve():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(dependencies) <= MAX_DIRECT_DEPENDENCIES


def test_no_lock_names_a_host():
    """A lock file must work with any package index."""
    for path in (ROOT / "requirements").iterdir():
        assert "://" not in path.read_text(), path.name


def test_what_serving_needs_is_a_part_of_what_tests_need():
    run, test = (
        {
            (canonicalize_name(each.name), str(each.specifier)): hashes
            for each, hashes in entries(ROOT / "requirements" / name)
        }
        for name in ("run.txt", "test.txt")
    )
    assert run.items() < test.items()


def test_what_serving_needs_has_what_torch_needs():
    """torch is installed without its requirements: `torch-needs.in` names them by hand. What only a build for GPUs asks
    for comes with that build."""
    run = entries(ROOT / "requirements" / "run.txt")
    locked = {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each, _ in run}
    needs = [Requirement(text) for text in requires("torch") or ()]
    needs = [each for each in needs if not each.marker or each.marker.evaluate({"extra": ""})]
    needs = [each for each in needs if not re.match(r"(nvidia|cuda|triton|pytorch-triton)\b", each.name)]
    assert len(needs) > 5
    assert [each for each in needs if not each.specifier.contains(locked.get(canonicalize_name(each.name), "0"))] == []


def imported(file: Path) -> Iterator[str]:
    """The first name of each module that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_every_import_of_the_product_is_in_run_or_in_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [text for extra, texts in extras.items() if extra != "test" for text in texts]
    known = {canonicalize_name(Requirement(text).name) for text in texts} | {"torch", "triton"}
    known |= {canonicalize_name(requirement.name) for requirement, _ in entries(ROOT / "requirements" / "run.txt")}
    owners = packages_distributions()
    packages = [*ROOT.glob("*/text_generation_*"), ROOT / "clients/python/text_generation"]
    files = [file for folder in packages for file in folder.rglob("*.py") if "tests" not in file.parts]
    assert len(files) > 300
    unknown = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imported(file)
        if name not in sys.stdlib_module_names and not name.startswith("text_generation")
        if not known & {canonicalize_name(owner) for owner in owners.get(name, [name])}
    }
    assert unknown == ELSEWHERE


def test_what_installs_names_one_host():
    makefile = ROOT / "Makefile"
    (index,) = re.findall(r"^TORCH_INDEX \?= (\S+)$", makefile.read_text(), re.MULTILINE)
    files = [*(ROOT / "deploy").rglob("*"), *(ROOT / ".ci").rglob("*"), *ROOT.glob("benchmark/*/peers/*.py")]
    files = [makefile, ROOT / "pyproject.toml", ROOT / "hatch_build.py", *filter(Path.is_file, files)]
    urls = {url for file in files for url in re.findall(r"\w+://[^\s'\"]+", file.read_text(errors="replace"))}
    local = re.compile(r"http://(127\.0\.0\.1|localhost|prometheus):")
    assert len(files) > 10 and {url for url in urls if not local.match(url)} == {index}


def test_changes_are_cut_by_release_and_short():
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    version = re.search(r'__version__ = "(.*)"', (ROOT / "clients/python/text_generation/__init__.py").read_text())
    assert version is not None and any(release.startswith(f"{version[1]} ") for release in releases)
    for release in releases:
        upgrading = release.partition("### Upgrading\n")[2].partition("###")[0].strip()
        assert len(release.split()) <= MAX_RELEASE_WORDS, release.splitlines()[0]
        assert len(upgrading.splitlines()) <= MAX_UPGRADING_LINES, release.splitlines()[0]


def test_make_run_needs_no_more_than_serving_does_and_targets_for_developers_need_the_packages_for_tests():
    makefile = (ROOT / "Makefile").read_text()
    targets = dict(re.findall(r"^([a-z][a-z-]*):((?: .*)?)$", makefile, re.MULTILINE))
    serving = {"install", "run", "kernels"}
    parts = {"install-test", "torch", "editable", "test-packages"}
    without = {"bench-peers", "lock", "audit", "gpu-check", "clean"}
    assert len(targets) > 30
    for target, needs in targets.items():
        wanted = "install" if target in serving else "install-test"
        assert target in parts | without or wanted in needs.replace(".venv/installed", "install").split(), target
