"""Which torch and which Triton are installed, and what is said of it, with two package indexes on this machine."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAME, _, VERSION = (ROOT / "requirements" / "torch.txt").read_text().strip().partition("==")
WAIT_S = 60  # for an index that answers, on a machine however busy
TESTED_TRITON = "3.5"
CLOSED = "http://127.0.0.1:1"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Silent(Quiet):
    """Takes requests, and does not answer until the client has gone."""

    def do_GET(self) -> None:
        self.rfile.read()


@dataclass(frozen=True, slots=True)
class Indexes:
    """URLs of the index of builds for CPUs, of an index that never answers, and of the default index."""

    cpu: str
    silent: str
    default: str
    triton_hash: str  # SHA-256 of the wheel of TESTED_TRITON


def write_wheel(index: Path, package: str, version: str, files: dict[str, str], needs: str = "") -> None:
    folder, info = index / package, f"{package}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{package}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{needs}"
    described = {"METADATA": metadata, "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, text in (files | {f"{info}/{file}": text for file, text in described.items()}).items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", "")
    links = [f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in folder.glob("*.whl")]
    (folder / "index.html").write_text("\n".join(links))


def write_torch(index: Path, build: str, version: str, cuda: str, needs: str = "") -> None:
    """A torch that says what its build is."""
    says = f"__version__ = '{VERSION}+{build}'\ncuda: Optional[str] = {cuda}\n"
    write_wheel(index, NAME, version, {f"{NAME}/version.py": says}, needs)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexes]:
    folder = tmp_path_factory.mktemp("indexes")
    write_torch(folder / "cpu", "cpu", f"{VERSION}+cpu", "None", "Requires-Dist: sympy\n")
    write_torch(folder / "default", "cu130", VERSION, "'13.0'", "Requires-Dist: triton==3.0\n")
    for version in ("3.0", TESTED_TRITON):
        write_wheel(folder / "default", "triton", version, {"triton/__init__.py": "x" * 3 * 2**20})
    handlers = [partial(Quiet, directory=str(folder)), Silent]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    urls = [f"http://127.0.0.1:{server.server_port}" for server in servers]
    tested = next((folder / "default" / "triton").glob(f"*-{TESTED_TRITON}-*.whl"))
    digest = hashlib.sha256(tested.read_bytes()).hexdigest()
    yield Indexes(f"{urls[0]}/cpu", urls[1], f"{urls[0]}/default", digest)
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with an empty virtual environment, whose pip is this one's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    pip = tmp_path / ".venv" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {tmp_path}/.venv/bin/python "$@"\n')
    pip.chmod(0o755)
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "torch.txt", tmp_path / "requirements")
    return tmp_path


def make_torch(
    checkout: Path, default: str, cpu: str, driver: str = "", target: str = "torch", wait_s: int = WAIT_S
) -> tuple[set[str], list[str]]:
    """Runs `make torch`; the packages that are there then, and what it says after the first line."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": default, "PIP_NO_CACHE_DIR": "1", "NO_PROXY": "*"}
    variables = [f"TORCH_INDEX={cpu}", f"TORCH_WAIT_S={wait_s}", f"NVIDIA_DRIVER={driver}"]
    command = ["make", "--silent", "--file", str(ROOT / "Makefile"), target, *variables]
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    there = {path.stem for path in checkout.glob(".venv/lib/python3*/site-packages/*.dist-info")}
    return there, done.stdout.splitlines()[1:]


def with_tests(checkout: Path, indexes: Indexes, driver: str = "") -> set[str]:
    """The packages once what tests need is there, too."""
    (checkout / "requirements" / "test.txt").write_text(f"triton=={TESTED_TRITON} --hash=sha256:{indexes.triton_hash}")
    return make_torch(checkout, indexes.default, CLOSED, driver, target="test-packages")[0]


def test_without_a_driver_the_build_for_cpus_is_taken_alone_and_once(checkout: Path, indexes: Indexes) -> None:
    there, said = make_torch(checkout, indexes.default, indexes.cpu)
    assert there == {f"{NAME}-{VERSION}+cpu"} and said == [f"torch {VERSION}+cpu: 1 MiB, without CUDA"]
    assert make_torch(checkout, CLOSED, CLOSED) == (there, said), "no index is asked again"
    assert with_tests(checkout, indexes) == {*there, f"triton-{TESTED_TRITON}"}, "tests need Triton"


@pytest.mark.parametrize("index", ["silent", "closed", "without torch"])
def test_an_index_of_builds_for_cpus_that_does_not_serve_leaves_the_default_one(
    checkout: Path, indexes: Indexes, index: str
) -> None:
    cpu = {"silent": indexes.silent, "closed": CLOSED, "without torch": f"{indexes.default}/triton"}[index]
    wait_s = 1 if index == "silent" else WAIT_S
    there, (elsewhere, said) = make_torch(checkout, indexes.default, cpu, wait_s=wait_s)
    assert there == {f"{NAME}-{VERSION}", "triton-3.0"}
    assert elsewhere == f"{cpu} gives no torch: pip takes it from its default index, with CUDA"
    assert said.startswith(f"torch {VERSION}+cu130: 4 MiB, with CUDA, for which this machine has no driver;")
    assert "make clean install TORCH_INDEX=" in said


def test_with_a_driver_torch_comes_from_the_default_index(checkout: Path, indexes: Indexes) -> None:
    there, said = make_torch(checkout, indexes.default, indexes.cpu, driver="/proc/driver/nvidia/version")
    assert there == {f"{NAME}-{VERSION}", "triton-3.0"} and said == [f"torch {VERSION}+cu130: 4 MiB, with CUDA"]
    assert with_tests(checkout, indexes, "/proc/driver/nvidia/version") == there, "torch has brought Triton"
