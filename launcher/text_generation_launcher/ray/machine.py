"""The engines that actors run on this machine, as files in a private folder. An actor takes over an engine whose actor
is gone, and starts one only on devices that no other engine uses.

Each engine has a folder: `about` (what it runs, and on which devices), `pid`, `address` (once it serves), `log`, and
`lock`, which its actor holds. The kernel releases the lock with the actor's end, however it ends: an engine that is
alive and whose lock is free has lost its actor. The folder's own lock makes looking and starting one step.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from text_generation_common.report import last_told
from text_generation_launcher.ray.processes import ProcessIdentity
from text_generation_launcher.ray.starter import private
from text_generation_launcher.ray.values import ADDRESS_FILE, EnginePhase, EngineState, Order

# Seconds that the starter gets: it runs a program and writes a file.
STARTER_S = 60.0
# Bytes of a log after which its first part is dropped, and of an ended engine's log that are told as the reason.
MOST_LOG_BYTES, TOLD_BYTES = 16 * 1024 * 1024, 2000
# Seconds between two touches of the files: systems remove old files from /tmp.
TOUCH_S = 3600.0
LAST_LOG = "ended.log"


@dataclass(frozen=True, slots=True)
class EngineFiles:
    folder: Path

    @property
    def about(self) -> Path:
        return self.folder / "about"

    @property
    def pid(self) -> Path:
        return self.folder / "pid"

    @property
    def address(self) -> Path:
        return self.folder / ADDRESS_FILE

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def ending(self) -> Path:
        """Exists since the engine was asked to end."""
        return self.folder / "ending"

    def identity(self) -> ProcessIdentity | None:
        """The engine's process, dead or alive. None if it was never started."""
        try:
            pid, started = map(int, self.pid.read_text().split())
        except (OSError, ValueError):
            return None
        return ProcessIdentity(pid, started)

    def end(self, drain_s: float) -> None:
        """Asks the engine to end, and kills it when it was asked `drain_s` ago. To be called again and again."""
        identity = self.identity()
        if identity is None:
            return
        try:
            asked_s = self.ending.stat().st_mtime
        except FileNotFoundError:
            os.close(private(str(self.ending), os.O_WRONLY | os.O_CREAT))
            identity.send(signal.SIGTERM)
        else:
            if time.time() - asked_s > drain_s:
                identity.send(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class EngineAbout:
    """What is known of an engine before it starts. `devices`: the GPUs that Ray has given it; none on CPUs."""

    owner: str  # the Ray namespace whose actors may take it over
    name: str  # name of the replica
    order: str  # the order's digest
    devices: tuple[str, ...]
    drain_s: float

    def text(self) -> str:
        return json.dumps([self.owner, self.name, self.order, self.devices, self.drain_s])

    @classmethod
    def of(cls, text: str) -> "EngineAbout":
        owner, name, order, devices, drain_s = json.loads(text)
        return cls(str(owner), str(name), str(order), tuple(map(str, devices)), float(drain_s))

    def can_serve_as(self, wanted: "EngineAbout") -> bool:
        """Whether this engine, left by its actor, is as good as `wanted`. On GPUs any replica of the same order is:
        only one engine has room there. On CPUs only the same replica is, since the other's actor may come back."""
        is_alike = (self.owner, self.order, set(self.devices)) == (wanted.owner, wanted.order, set(wanted.devices))
        return is_alike and (bool(self.devices) or self.name == wanted.name)


class KeptEngine:
    """An engine and the lock on it, which an actor holds to its end."""

    def __init__(self, files: EngineFiles, node: str, drain_s: float, lock: int) -> None:
        self._files = files
        self._node = node
        self._drain_s = drain_s
        self._lock = lock
        self._identity = files.identity()
        self._touched_s = time.monotonic()
        self._is_ending = False

    @property
    def folder(self) -> Path:
        return self._files.folder

    def state(self) -> EngineState:
        pid = self._identity.pid if self._identity is not None else 0
        if self._identity is None or not self._identity.is_alive:
            return EngineState(EnginePhase.ENDED, "", pid, self._node, _end_of(self._files.log))
        if self._is_ending:
            self._files.end(self._drain_s)
        self._care_for_files()
        try:
            address = self._files.address.read_text().strip()
        except FileNotFoundError:
            return EngineState(EnginePhase.STARTING, "", pid, self._node)
        return EngineState(EnginePhase.SERVING, address, pid, self._node)

    def end(self) -> None:
        """Asks the engine to end. `state` kills it when that takes too long."""
        self._is_ending = True
        self._files.end(self._drain_s)

    def release(self) -> None:
        """Gives up the lock: another actor may take the engine over."""
        os.close(self._lock)

    def _care_for_files(self) -> None:
        with suppress(OSError):
            if os.path.getsize(self._files.log) > MOST_LOG_BYTES:
                shutil.copyfile(self._files.log, f"{self._files.log}.1")
                os.truncate(self._files.log, 0)
        if time.monotonic() - self._touched_s > TOUCH_S:
            self._touched_s = time.monotonic()
            for path in self._files.folder.iterdir():
                if path != self._files.ending:
                    os.utime(path)


class MachineEngines:
    """The engines of one user on this machine. `folder` is private; `node` is the machine's address in the cluster;
    `kind` is what devices are called. Fronts are kept in the same way, in a folder of their own: their device is the
    port."""

    def __init__(self, folder: Path, node: str, kind: str = "GPU") -> None:
        self._folder = folder
        self._node = node
        self._kind = kind

    def claim(self, owner: str, name: str, order: Order, devices: Sequence[str]) -> KeptEngine | str:
        """An engine that was left by its actor and runs the same order, or a new one. A text, why there is none yet,
        if the devices are in use: engines without an actor that use them are asked to end. Then call it again."""
        wanted = EngineAbout(owner, name, order.digest, tuple(devices), order.drain_s)
        with self._lock() as held:
            for files, about, lock in self._engines():
                if lock is not None and about.can_serve_as(wanted) and not files.ending.exists():
                    return KeptEngine(files, self._node, order.drain_s, lock)
                shared = sorted(set(about.devices) & set(devices))
                if shared:
                    identity = files.identity()
                    pid = identity.pid if identity is not None else 0
                    used = f"{self._kind} {', '.join(shared)} is used by the launcher with pid {pid}"
                    if lock is None:
                        return f"{used}, whose actor is alive"
                    os.close(lock)
                    files.end(about.drain_s)
                    return f"{used}, which was asked to end"
                if lock is not None:
                    os.close(lock)
            return self._start(wanted, order, held)

    def _start(self, about: EngineAbout, order: Order, held: int) -> KeptEngine:
        files = EngineFiles(self._folder / uuid.uuid4().hex[:12])
        files.folder.mkdir(mode=0o700)
        lock = _opened(files.lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(files.about, "w", opener=private) as file:
            file.write(about.text())
        argv = order.command(self._node, files.folder)
        starter = (sys.executable, "-m", "text_generation_launcher.ray.starter", str(files.pid), str(files.log), *argv)
        subprocess.run(starter, env=environment(order, about.devices), pass_fds=[held], timeout=STARTER_S, check=True)
        return KeptEngine(files, self._node, order.drain_s, lock)

    def _engines(self) -> Iterator[tuple[EngineFiles, EngineAbout, int | None]]:
        """The living engines, each with its lock, or with None if an actor holds the lock. Folders of dead engines
        without an actor are removed."""
        for folder in sorted(path for path in self._folder.iterdir() if path.is_dir()):
            files = EngineFiles(folder)
            lock = _locked(files.lock)
            identity = files.identity()
            if identity is not None and identity.is_alive:
                yield files, EngineAbout.of(files.about.read_text()), lock
            elif lock is not None:
                self._remove(files)
                os.close(lock)

    def _remove(self, files: EngineFiles) -> None:
        with suppress(FileNotFoundError):
            os.replace(files.log, self._folder / LAST_LOG)
        shutil.rmtree(files.folder, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[int]:
        held = _opened(self._folder / "lock")
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield held
        finally:
            os.close(held)


def environment(order: Order, devices: Sequence[str]) -> dict[str, str]:
    """The environment of an engine: that of the machine's Ray without Ray's own variables, which hold its token.

    OMP_NUM_THREADS is Ray's as well. On GPUs the engine's launcher knows better; on CPUs the replicas of a machine
    share its cores, which the launcher of one replica cannot know.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    kept.pop("OMP_NUM_THREADS", None)
    return kept if devices or not order.threads else kept | {"OMP_NUM_THREADS": str(order.threads)}


def _opened(path: Path) -> int:
    return private(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock on a file, or None if another process has it."""
    lock = _opened(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _end_of(log: Path) -> str:
    """The last lines of a log, in one line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - TOLD_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "it has left no log"
    return last_told(lines) or " | ".join(line for line in lines[-3:] if line.strip()) or "it has written nothing"
