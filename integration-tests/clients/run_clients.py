"""Runs the official clients, each in a virtual environment of its own, against a server:

    .venv/bin/python integration-tests/clients/run_clients.py [URL]

Without a URL, starts `text-generation-launcher` on its default model, and stops the launcher in the end. The exit
status is 1 if a check fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from text_generation_benchmark.process import ServerCommand, free_port, running

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"

START_S = 120.0
CHECKS_S = 600.0


@dataclass(frozen=True, slots=True)
class OfficialClient:
    name: str  # name of the virtual environment in which the client is installed
    packages: tuple[str, ...]
    script: str


CLIENTS = (
    OfficialClient("text-generation", ("text-generation==0.7.0",), "check_text_generation.py"),
    # The asynchronous client of huggingface_hub 0 needs aiohttp, and does not require it.
    OfficialClient("huggingface-hub-0", ("huggingface_hub==0.36.*", "aiohttp"), "check_huggingface_hub.py"),
    OfficialClient("huggingface-hub-2", ("huggingface_hub>=2,<3",), "check_huggingface_hub.py"),
    OfficialClient("openai", ("openai",), "check_openai.py"),
)


class Failure(Exception):
    """The checks could not be run; the text says why in one line."""


def install(client: OfficialClient) -> Path:
    """Path of the Python interpreter in the client's environment. The environment is made anew unless it has exactly
    the client's packages.
    """
    root = ENVIRONMENTS / client.name
    python = root / "bin" / "python"
    stamp = root / "installed"
    wanted = "\n".join(client.packages)
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(root, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *client.packages]
    if subprocess.run(pip).returncode:
        raise Failure(f"{wanted!r} could not be installed; see pip's lines above")
    stamp.write_text(wanted)
    return python


def check(client: OfficialClient, url: str) -> bool:
    """Runs the client's script, which prints one line for each check. The user's tokens, keys and proxies are not
    passed on.
    """
    python = install(client)
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "PATH", "TMPDIR")}
    kept |= {"HOME": str(ENVIRONMENTS), "HF_HOME": str(ENVIRONMENTS), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run([python, HERE / client.script, url], env=kept, timeout=CHECKS_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"FAIL {client.name}: the checks did not end within {CHECKS_S:g} s")
        return False


@contextmanager
def started_server() -> Iterator[str]:
    launcher = shutil.which("text-generation-launcher")
    if launcher is None:
        raise Failure("there is no text-generation-launcher on PATH; install tgi-py first, or give the URL of a server")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        arguments = [launcher, "--hostname", "127.0.0.1", "--port", str(port), "--shard-uds-path", f"{folder}/shard"]
        with running(ServerCommand("the server", arguments, port, "/health", START_S), Path(folder) / "log"):
            yield f"http://127.0.0.1:{port}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the official clients against a server.")
    parser.add_argument("url", nargs="?", help="URL of a running server; without it, a server is started")
    parser.add_argument("--only", choices=[client.name for client in CLIENTS], help="run this client alone")
    arguments = parser.parse_args()
    clients = [client for client in CLIENTS if arguments.only in (None, client.name)]
    try:
        if arguments.url:
            return run_all(clients, arguments.url.rstrip("/"))
        with started_server() as url:
            return run_all(clients, url)
    except (Failure, RuntimeError) as failure:
        print(f"run_clients: {failure}", file=sys.stderr)
        return 1


def run_all(clients: list[OfficialClient], url: str) -> int:
    failed = [client.name for client in clients if not check(client, url)]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(clients)} clients passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
