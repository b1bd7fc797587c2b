"""Starts one server with the demo model in float32, and makes one run without faults, for all tests of this folder."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scale import SHORT
from server_process import NUM_WORKERS, WORKER, LaunchedServer, ServerProcess
from streams import StreamAnswer, undisturbed_answers

from text_generation_launcher.tests.forked_launchers import launchers


@pytest.fixture(scope="session", autouse=True)
def few_slots() -> Iterator[None]:
    """Servers have 32,768 token slots unless a flag says otherwise: more than most tests need. The demo model would get
    twenty times as many, and a start would take twice the processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAX_BATCH_TOTAL_TOKENS", str(2**15))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_launchers() -> Iterator[None]:
    with launchers(os.environ) as forking, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchedServer, "launchers", forking)
        yield


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServerProcess]:
    with ServerProcess("--dtype", "float32", "--max-concurrent-requests", "64", "--enable-prefill-logprobs") as server:
        yield server


@pytest.fixture(scope="session")
def server(shared_server: ServerProcess) -> ServerProcess:
    """Some files have a server of their own by this name."""
    return shared_server


@pytest.fixture(scope="session")
def one_shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[StreamAnswer]:
    """The answer of each stream in a run without faults, with one shard. The first of the processes that run tests to
    need it makes it for all. Only process 0 asks the shared server, of which it has the tests (all_tests.py)."""
    folder = tmp_path_factory.getbasetemp()
    if NUM_WORKERS > 1:
        folder = folder.parent
    kept = folder / "one_shard.json"
    with (folder / "one_shard.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            if WORKER:
                answers = SHORT.undisturbed(1)
            else:
                answers = undisturbed_answers(request.getfixturevalue("shared_server").url, SHORT.asks())
            kept.write_text(json.dumps([asdict(answer) for answer in answers]))
    answers = json.loads(kept.read_text())
    tuples = ("arrivals_s", "outcome")
    return [StreamAnswer(**each | {name: tuple(each[name]) for name in tuples}) for each in answers]
