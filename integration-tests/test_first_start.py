"""A first start, on a terminal: what it shows, how it ends, and that a limit a little above its need suffices, also for
the shard after one that was killed."""

import os
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import processes
import pytest
from server_process import LAUNCHER, START_LIMIT_S

from text_generation_common.tests.slowness import Seconds, assert_within

COLUMNS = 80
# A limit of address space, as a share of the highest use that was seen.
A_LITTLE_MORE = 1.02
ENDED_S = 2.0  # after Ctrl-C


class TerminalStart:
    """A launcher on a terminal, until it has served. `lines` are those that it shows."""

    def __init__(self, addresses: int | None) -> None:
        self._screen, end = os.openpty()
        termios.tcsetwinsize(end, (24, COLUMNS))
        unset = ("LOG_LEVEL", "MAX_BATCH_TOTAL_TOKENS", "COLUMNS")
        environ = {name: value for name, value in os.environ.items() if name not in unset}
        program = str(LAUNCHER if LAUNCHER.exists() else LAUNCHER.name)
        self.process = subprocess.Popen(
            [program, "--port", "0"],
            env=environ | {"TERM": "xterm", "NO_COLOR": "1"},
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            preexec_fn=lambda: _limit(addresses),
        )
        os.close(end)
        self.text = ""
        self.read_until(lambda: self.text.endswith("\n") and self.lines[-1].startswith("http://"))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def read_until(self, has_shown: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not has_shown():
            if not select.select([self._screen], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                self.end()
                raise TimeoutError(self.text)
            self.text += os.read(self._screen, 1 << 16).decode()

    def end(self) -> int:
        """The exit status after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(START_LIMIT_S)
        finally:
            with suppress(OSError):  # no process has the terminal open any more
                while select.select([self._screen], [], [], 0)[0]:
                    self.text += os.read(self._screen, 1 << 16).decode()
            os.close(self._screen)


def _limit(addresses: int | None) -> None:
    """Sets the limits of a new process, which receives Ctrl-C even if this process was started to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if addresses is not None:
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))


def highest_use(launcher: int) -> int:
    """The most bytes of address space that any process of the server has had."""
    family = processes.living(processes.family(launcher))
    fields = [Path(f"/proc/{process.pid}/status").read_text().split("VmPeak:") for process in family]
    return max(int(each[1].split()[0]) for each in fields if len(each) > 1) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_start_is_eight_lines_and_serves_with_a_limit_a_little_above_its_need_and_ctrl_c_ends_it() -> None:
    start = TerminalStart(None)
    need = highest_use(start.process.pid)
    lines = [line for line in start.lines if "  WARNING " not in line]
    assert start.end() == 0
    assert len(lines) <= 8 and all(len(line) <= COLUMNS for line in lines), start.text
    assert not set(lines[-1].removeprefix("http://localhost:")) - set("0123456789")

    def serve_and_end() -> Seconds:
        limited = TerminalStart(int(need * A_LITTLE_MORE))
        try:
            url, body = limited.lines[-1], {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
            answer = httpx.post(f"{url}/generate", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            [shard] = processes.shards(limited.process.pid).values()
            has_template = bool(processes.templates(limited.process.pid))
            shard.kill()
            assert httpx.post(f"{url}/generate", json=body, timeout=60).text == answer.text
            limited.read_until(lambda: "epoch 1 are lost" in limited.text and "Starting epoch 2" in limited.text)
            assert ("Starting epoch 2 of the shards in 0.0s" in limited.text) == has_template
            already = len(limited.text)
        finally:
            taken = Seconds.of(limited.end)
        assert limited.process.returncode == 0, limited.text
        assert "WARNING" not in limited.text[already:] and "ERROR" not in limited.text[already:], limited.text
        return taken

    assert_within(serve_and_end, clock=ENDED_S)
