"""Ctrl-C ends a whole server within two seconds at every stage of its start, and when fronts serve; one process that
serves is ended so by test_first_start.py."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_process import START_LIMIT_S, ServerProcess, wait_until

from text_generation_common.tests.slowness import Seconds, assert_within

LIMIT_S = 2.0
INTERRUPTED, SERVED = 130, 0
# Starts, and what the log or the list of connections to a hub says when they are interrupted. A hub that accepts
# connections and never answers stands in the place of HUB.
HUB = "a/model"
# Python writes a line for each module that it has imported. This one is imported by the launcher's own code, after the
# line from which Ctrl-C ends the process without a traceback.
MODULE, LINE_OF_MODULE = "text_generation_common", "import time:"
# A shard logs this, and the name of a point at which it then waits: a start that a busy machine sees late is not over.
HELD, HELD_S = "fault injected: ", 5
STAGES = {
    "the launcher's modules are loaded": ((), MODULE, INTERRUPTED),
    "the hub is asked": (("--model-id", HUB), HUB, INTERRUPTED),
    "weights are loaded": (("--testing",), f"{HELD}shard.load", INTERRUPTED),
    "warm-up": (("--testing",), f"{HELD}shard.warmup", INTERRUPTED),
    "engine and fronts are ready": (("--api-workers", "2"), "Serving demo", SERVED),
}


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_ends_a_server_within_two_seconds_and_without_a_warning(stage: str, silent_hub: socket.socket) -> None:
    flags, sign, status = STAGES[stage]

    def start_and_end() -> Seconds:
        environ = {"PYTHONPROFILEIMPORTTIME": "1"} if sign == MODULE else {}
        if sign.startswith(HELD):
            environ = {"FAILPOINTS": f"{sign.removeprefix(HELD)}:delay={HELD_S}"}
        server, asked = interruptible(ServerProcess(*flags, by_command=True, environ=environ)), ExitStack()
        try:
            if sign == HUB:
                asked.enter_context(silent_hub.accept()[0])
            else:
                wait_until(lambda: sign in server.log(), START_LIMIT_S, sign)
            already = len(server.log())
            os.kill(server.pid, signal.SIGINT)
            taken = Seconds.of(lambda: server.running.wait(START_LIMIT_S))
            # Python itself ends by the signal while modules are loaded; the test may see that too late.
            assert server.running.returncode in ((status, -signal.SIGINT) if sign == MODULE else (status,))
            said = [line for line in server.log()[already:].splitlines() if not line.startswith(LINE_OF_MODULE)]
            assert not [line for line in said if " INFO " not in line], said
        finally:
            server.stop()
            asked.close()
        return taken

    assert_within(start_and_end, clock=LIMIT_S)


def interruptible(server: ServerProcess) -> ServerProcess:
    """Starts a server that receives Ctrl-C even if this process was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        server.start()
    finally:
        signal.signal(signal.SIGINT, before)
    return server
