"""What our processes import is on the GPU's machine, or in .gpu/ (`make gpu-wheels`)."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
# What docs/gpu.md says that the machine has.
THERE = ("torch", "triton", "transformers", "grpcio", "protobuf", "prometheus_client")
# The processes that the check starts. The module that needs llguidance and little else comes first.
MODULES = (
    "text_generation_router.text.grammars.checking_child",
    *("text_generation_server.cli", "text_generation_server.server", "text_generation_server.load"),
    *("text_generation_server.grammars.compiler", "text_generation_server.grammars.constraints"),
    *("text_generation_router.cli", "text_generation_router.serve", "text_generation_launcher.cli"),
    *("text_generation_launcher.supervisor", "pytest", "xdist.plugin"),
)
PROGRAM = """
import importlib, importlib.abc, sys
missing = set(sys.argv[1].split(","))
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
for name in sys.argv[2].split(","):
    importlib.import_module(name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def carried() -> list[str]:
    (line,) = re.findall(r"^GPU_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return line.split()


def with_needs(packages: list[str]) -> set[str]:
    """The packages, and all that is installed with them."""
    found: set[str] = set()
    left = [normal(name) for name in packages]
    while left:
        if (name := left.pop()) in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue  # a package of another platform
        left += [normal(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.parametrize("left_out", ["", "llguidance"])
def test_all_that_our_processes_import_is_there_or_carried(left_out: str):
    known = with_needs([*THERE, *carried()]) - {left_out}
    missing = {module for module, owners in packages_distributions().items() if not known & set(map(normal, owners))}
    ours = {path.name for part in ("common", "router", "server", "launcher", "benchmark", "tools", "proto")
            for path in (ROOT / part).iterdir()}  # fmt: skip
    search = os.pathsep.join(filter(None, sys.path))
    checks = [*(ROOT / "tools/gpu_check").glob("*.py"), *(ROOT / "tools/gpu_check/checks").glob("*.py")]
    names = [".".join(path.relative_to(ROOT / "tools").with_suffix("").parts) for path in checks]
    command = [sys.executable, "-c", PROGRAM, ",".join(missing - ours), ",".join([*MODULES, *names])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": search}, check=False
    )
    assert (done.returncode != 0) == bool(left_out), done.stderr[-2000:]
