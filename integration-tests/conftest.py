"""Starts one server with the demo model in float32, and makes one run without faults, for all tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import scenarios
from scale import SHORT
from server_process import ServerProcess
from streams import StreamAnswer


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--dtype", "float32", "--max-concurrent-requests", "64", "--enable-prefill-logprobs") as server:
        yield server


@pytest.fixture(scope="session")
def one_shard() -> list[StreamAnswer]:
    """The answer of each stream in a run without faults, with one shard."""
    return scenarios.undisturbed(SHORT, 1)
