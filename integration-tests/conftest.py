"""Starts one server with the demo model in float32, and makes one run without faults, for all tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scale import SHORT
from server_process import ServerProcess
from streams import StreamAnswer


@pytest.fixture(scope="session", autouse=True)
def few_slots() -> Iterator[None]:
    """Servers have 131,072 token slots unless a flag says otherwise: more than any test here needs. The demo model
    would get five times as many, and a start would take twice the processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAX_BATCH_TOTAL_TOKENS", str(2**17))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--dtype", "float32", "--max-concurrent-requests", "64", "--enable-prefill-logprobs") as server:
        yield server


@pytest.fixture(scope="session")
def one_shard() -> list[StreamAnswer]:
    """The answer of each stream in a run without faults, with one shard."""
    return SHORT.undisturbed(1)
