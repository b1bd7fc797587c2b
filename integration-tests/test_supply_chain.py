"""The packages that `make install` fetches: each has a version and hashes, and serving needs only a few."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
MOST_DIRECT_DEPENDENCIES = 25


def entries(lock: Path) -> Iterator[tuple[Requirement, int]]:
    """Each requirement of a lock file, and the number of its hashes."""
    joined = re.sub(r"\\\n\s*", " ", lock.read_text())
    for line in joined.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = re.split(r"\s--hash=", line)
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", found.strip()) for found in hashes)
            yield Requirement(requirement), len(hashes)


def test_every_locked_package_has_one_version_and_hashes_except_torch():
    assert {lock.name for lock in LOCKS} == {"build.txt", "locked.txt", "tools.txt", "torch.txt"}
    for lock in LOCKS:
        for requirement, num_hashes in entries(lock):
            assert [spec.operator for spec in requirement.specifier] == ["=="], requirement
            assert num_hashes > 0 or requirement.name == "torch", requirement


def test_the_lock_fits_pyproject():
    """Fails if a dependency changed in pyproject.toml and `make lock` was not run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked: dict[str, list[Requirement]] = {}
    for lock in LOCKS:
        if lock.name in ("locked.txt", "torch.txt"):
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
    assert len(dependencies) <= MOST_DIRECT_DEPENDENCIES


def test_no_lock_names_a_host():
    """A lock file must work with any package index."""
    for path in (ROOT / "requirements").iterdir():
        assert "://" not in path.read_text(), path.name
