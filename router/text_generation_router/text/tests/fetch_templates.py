"""Fetches chat templates of real models: `make fetch-templates`. They are files of packages, each downloaded in one
version with one SHA-256, and are not part of this repository. `test_real_templates.py` reads them."""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[4] / ".templates"


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    sha256: str
    templates: str  # folder in the package with the templates
    is_source: bool = False  # whether the file is the package's source, because its wheels have no templates


PACKAGES = (
    Package(
        "llama-cpp-python",
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "vendor/llama.cpp/models/templates/",
        is_source=True,
    ),
    Package("trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396", "trl/chat_templates/"),
    Package(
        "axolotl",
        "0.19.0",
        "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc",
        "axolotl/utils/chat_templates/templates/",
    ),
)


def fetch(package: Package, folder: Path) -> int:
    """Writes the package's templates into `folder`. Returns their number."""
    with tempfile.TemporaryDirectory() as name:
        download = Path(name)
        wanted = download / "requirements.txt"
        wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        kind = "--no-binary" if package.is_source else "--only-binary"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", kind, ":all:"]
        if package.is_source:  # what builds a package may have wheels
            pip[-1] = package.name
        subprocess.run([*pip, "--dest", download / "files", "--requirement", wanted], check=True)
        (archive,) = (download / "files").iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        templates = dict(_templates(archive, package.templates))
        for template, content in templates.items():
            (folder / template).write_bytes(content)
    return len(templates)


def _templates(archive: Path, folder: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of each template; a name has no folders."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.namelist():
                if _is_template(member, folder):
                    yield Path(member).name, wheel.read(member)
        return
    with tarfile.open(archive) as source:
        for entry in source:
            if entry.isfile() and _is_template(entry.name, folder):
                file = source.extractfile(entry)
                assert file is not None
                yield Path(entry.name).name, file.read()


def _is_template(member: str, folder: str) -> bool:
    return folder in member and member.endswith(".jinja")


if __name__ == "__main__":
    for package in PACKAGES:
        count = fetch(package, FOLDER / package.name)
        print(f"{FOLDER / package.name}: {count} templates of {package.name} {package.version}")
