"""Chromium without a window, driven through its debugging pipe."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Tab:
    """One page. `requests`: the addresses that it has asked for. `complaints`: what its console has."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 2**16)
            assert piece, "Chromium has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))

    def value(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, found: Callable[[Any], bool] = bool) -> Any:
        """The script's value, once it is there."""
        deadline = time.monotonic() + LIMIT_S
        while not found(value := self.value(script)):
            assert time.monotonic() < deadline, (script, self.complaints)
            time.sleep(0.1)
        return value


@contextmanager
def tab_of(program: str, folder: Path) -> Iterator[Tab]:
    commands, answers = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3, and writes answers to 4.
    shell = f'exec 3<&{commands[0]} 4>&{answers[1]}; exec "$@"'
    command = ["bash", "-c", shell, "chromium", program, *FLAGS, f"--user-data-dir={folder}"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, pass_fds=(commands[0], answers[1]), stderr=log, stdout=log)
    os.close(commands[0])
    os.close(answers[1])
    try:
        yield Tab(answers[0], commands[1])
    finally:
        os.close(commands[1])
        os.close(answers[0])
        process.kill()
        process.wait()
