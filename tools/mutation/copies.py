"""Makes a copy of the repository, in which one file at a time is changed."""

import compileall
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from py_compile import PycInvalidationMode

from mutation.mutants import Mutant

# Folders from which our packages are imported. Files that an installation makes are not under version control.
PACKAGES = ("benchmark", "clients/python", "common", "launcher", "proto", "router", "server")
BUILT = ("proto/text_generation_proto", "server/text_generation_server/kernels/cpu/built")


class Copy:
    def __init__(self, source: Path, root: Path, environ: Mapping[str, str]) -> None:
        """`environ`: the environment of this process."""
        root.mkdir(exist_ok=True)
        self.root = root
        self._environ = environ
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name)
        for name in BUILT:
            shutil.copytree(source / name, root / name, dirs_exist_ok=True)
        # The copy is compiled once. Python compares contents to find a changed file, because file times have a
        # resolution of a second.
        compileall.compile_dir(root, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self.python_path = [str(root / package) for package in PACKAGES]

    def environment(self) -> dict[str, str]:
        """The environment of the tests and of the processes that they start: our code is imported from the copy."""
        scripts = str(Path(sys.executable).parent)
        return {
            **self._environ,
            "PYTHONPATH": os.pathsep.join(self.python_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",  # read when triton is imported, see server/conftest.py
            "PATH": scripts + os.pathsep + self._environ.get("PATH", ""),
        }

    def change(self, mutant: Mutant) -> str:
        """Writes the mutant into its file, and returns the file's text from before."""
        path = self.root / mutant.path
        source = path.read_text()
        path.write_text(mutant.applied(source))
        return source

    def restore(self, name: str, source: str) -> None:
        (self.root / name).write_text(source)
