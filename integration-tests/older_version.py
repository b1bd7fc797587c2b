"""Programs of this build that speak the version of proto/engine.proto before the newest, as the build before does."""

import sys
from pathlib import Path

from server_process import LAUNCHER

PROGRAM = """#!{python}
from text_generation_router.wire import version

version.VERSION -= 1  # before any other module reads it
from {module} import main

main()
"""
LAUNCHER_PROGRAM = """#!{python}
from pathlib import Path

from text_generation_launcher.cli import main

main(program_directories=[Path(__file__).parent])
"""
MODULES = {
    "text-generation-router": "text_generation_router.cli",
    "text-generation-engine": "text_generation_router.engine_cli",
}


def make_programs(folder: Path) -> Path:
    """Makes the programs in `folder`, and returns the launcher that starts them."""
    for name, module in MODULES.items():
        _write(folder / name, PROGRAM.format(python=sys.executable, module=module))
    (folder / "text-generation-server").symlink_to(LAUNCHER.with_name("text-generation-server"))
    launcher = folder / "text-generation-launcher"
    _write(launcher, LAUNCHER_PROGRAM.format(python=sys.executable))
    return launcher


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
