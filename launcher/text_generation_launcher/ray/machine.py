"""A launcher on this machine, as a child of an actor's process: the launcher ends with the actor, however the actor
ends."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from text_generation_common.report import last_told
from text_generation_launcher.process import die_with_parent
from text_generation_launcher.ray.values import ADDRESS_FILE, EnginePhase, EngineState, Order

# Maximum number of bytes of a log, beyond which its older part is dropped; number of last bytes of an ended launcher's
# log in which the reason of its end is looked for.
MAX_LOG_BYTES, REASON_BYTES = 16 * 1024 * 1024, 2000
# Seconds between two touches of the files: systems remove old files from /tmp, and actors files older than LOG_KEPT_S.
TOUCH_S = 3600.0
# Seconds for which the files of a launcher are kept after the end of its actor.
LOG_KEPT_S = 2 * TOUCH_S


class HostedLauncher:
    """One launcher, which its construction starts. The launcher writes two files into the private `folder`: `log`, and
    `address` once its engine serves. To be made on a thread that lives as long as the actor: the kernel sends
    `last_signal` to the launcher when that thread ends."""

    def __init__(
        self,
        order: Order,
        node: str,
        folder: Path,
        devices: Sequence[str] = (),
        last_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        """`node` is the machine's address in the cluster, `devices` are the GPUs that Ray has given to the actor.
        Raises OSError if nothing can be started."""
        self.folder = folder
        self._node = node
        self._drain_s = order.drain_s
        self._log = folder / "log"
        self._address = ""
        self._touched_s = time.monotonic()
        self._asked_s: float | None = None  # when the launcher was asked to end
        with open(self._log, "ab", opener=private) as log:
            self._process = subprocess.Popen(
                order.command(node, folder),
                env=environment(order, devices),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(last_signal),
            )

    def state(self) -> EngineState:
        pid = self._process.pid
        if self._process.poll() is not None:
            return EngineState(EnginePhase.ENDED, "", pid, self._node, _end_of(self._log))
        if self._asked_s is not None and time.monotonic() - self._asked_s > self._drain_s:
            self._process.kill()
        self._care_for_files()
        if not self._address:
            with suppress(FileNotFoundError):
                self._address = (self.folder / ADDRESS_FILE).read_text().strip()
        return EngineState(
            EnginePhase.SERVING if self._address else EnginePhase.STARTING, self._address, pid, self._node
        )

    def end(self) -> None:
        """Asks the launcher to end. `state` kills it when that takes too long."""
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._process.terminate()

    def _care_for_files(self) -> None:
        with suppress(OSError):
            if os.path.getsize(self._log) > MAX_LOG_BYTES:
                shutil.copyfile(self._log, f"{self._log}.1")
                os.truncate(self._log, 0)
        if time.monotonic() - self._touched_s > TOUCH_S:
            self._touched_s = time.monotonic()
            for path in self.folder.iterdir():
                os.utime(path)


def new_folder(machine: Path) -> Path:
    """A private folder for one launcher within `machine`, which all actors of the machine share. Removes the folders of
    launchers whose actors ended LOG_KEPT_S ago."""
    for old in machine.iterdir():
        with suppress(OSError):
            if time.time() - (old / "log").stat().st_mtime > LOG_KEPT_S:
                shutil.rmtree(old)
    return Path(tempfile.mkdtemp(dir=machine))


def environment(order: Order, devices: Sequence[str]) -> dict[str, str]:
    """The environment of an engine: that of the machine's Ray without Ray's own variables, which hold its token.

    Ray sets OMP_NUM_THREADS too. On GPUs the variable is removed, and the engine's launcher chooses the number of
    threads. On CPUs the order chooses the number, because replicas share the cores of a machine and the launcher of one
    replica does not know the others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept.pop("OMP_NUM_THREADS", None)
    return kept if devices or not order.threads else kept | {"OMP_NUM_THREADS": str(order.threads)}


def private(path: str, flags: int) -> int:
    """Opens a file, as `opener` of `open`, which only this user can read."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _end_of(log: Path) -> str:
    """The last lines of a log, in one line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - REASON_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it has left no log"
    return last_told(lines) or " | ".join(line for line in lines[-3:] if line.strip()) or "it has written nothing"
