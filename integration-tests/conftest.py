"""Starts one server with the demo model in float32, shared by all tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--dtype", "float32", "--max-concurrent-requests", "64") as server:
        yield server
