"""Chromium without a window, driven through its debugging pipe."""

import base64
import json
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IS_BOUNDED = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
# Why no test can run here; "" if tests can. With MUST_RUN, as `make test-page` sets it, they then fail.
WHY_NOT = (
    "no Chromium: after `apt-get install chromium` this test runs"
    if PROGRAM is None
    else "Chromium reserves much address space: `ulimit -v unlimited` runs this test"
    if IS_BOUNDED
    else ""
)
if WHY_NOT and os.environ.get("MUST_RUN"):
    raise RuntimeError(WHY_NOT)
LIMIT_S = 60.0
# The number and the text of keys.
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowRight": (39, ""),
    "ArrowLeft": (37, ""),
}
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
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
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def open(self, url: str) -> None:
        """Goes to an address, with neither requests nor complaints of the page before."""
        self.value("0")  # takes the events until now
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=url)

    def show_as(self, width: int, height: int, scheme: str = "light") -> None:
        """Gives the page another size, and `light` or `dark` colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def click(self, selector: str) -> None:
        """Clicks with the mouse at the middle of the first element, once it is there."""
        place = self.until(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)}); if (!element) return null;"
            " element.scrollIntoView({block: 'nearest'}); const box = element.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", **event)

    def write(self, text: str) -> None:
        """Types into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses a key that KEYS names."""
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

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
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(event["params"]["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))

    def value(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, found: Callable[[Any], bool] = bool, limit_s: float = LIMIT_S) -> Any:
        """The script's value, once it is there."""
        deadline = time.monotonic() + limit_s
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


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """The address at which the application answers."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
