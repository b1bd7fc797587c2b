"""A copy of the repository, in which one file at a time is changed."""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

from mutation.mutants import Mutant

# Folders with what our packages are imported from; the rest is made by an installation and not under version control.
PACKAGES = ("benchmark", "clients/python", "common", "launcher", "proto", "router", "server")
BUILT = ("proto/text_generation_proto", "server/text_generation_server/kernels/cpu/built")


class Copy:
    def __init__(self, source: Path, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
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
        # Compiled once; what was compiled is told from what was changed by its contents, not by a time in seconds.
        compileall.compile_dir(root, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self.python_path = [str(root / package) for package in PACKAGES]

    def environment(self) -> dict[str, str]:
        """Of the tests and the processes they start: our code is imported from here."""
        scripts = str(Path(sys.executable).parent)
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(self.python_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": scripts + os.pathsep + os.environ.get("PATH", ""),
        }

    def change(self, mutant: Mutant) -> str:
        """The source before."""
        path = self.root / mutant.path
        source = path.read_text()
        path.write_text(mutant.applied(source))
        return source

    def restore(self, name: str, source: str) -> None:
        (self.root / name).write_text(source)
