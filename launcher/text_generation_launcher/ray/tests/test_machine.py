"""Launchers that actors run on a machine: they end with the actor, or in order. They are real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from text_generation_launcher.process import PARENT_ENDED
from text_generation_launcher.ray import machine
from text_generation_launcher.ray.machine import HostedLauncher, environment, new_folder
from text_generation_launcher.ray.values import EngineOrder, EnginePhase

PROGRAM = (sys.executable, str(Path(__file__).with_name("engine_program.py")))
ORDER = EngineOrder((), drain_s=60.0, program=PROGRAM)
HANG_S = 60.0
# An actor whose process is killed once its engine serves.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from text_generation_launcher.ray.machine import HostedLauncher
from text_generation_launcher.ray.values import EngineOrder, EnginePhase
order = EngineOrder((), program=tuple(sys.argv[2:]))
launcher = HostedLauncher(order, "127.0.0.1", Path(os.environ["FOLDER"]), (), signal.Signals(int(sys.argv[1])))
while launcher.state().phase is EnginePhase.STARTING:
    time.sleep(0.01)
print(launcher.state().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

Start = Callable[..., HostedLauncher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[HostedLauncher] = []

    def begin(order: EngineOrder = ORDER, *devices: str) -> HostedLauncher:
        launcher = HostedLauncher(order, "127.0.0.1", new_folder(tmp_path), devices)
        started.append(launcher)
        until(lambda: launcher.state().phase is not EnginePhase.STARTING)
        return launcher

    yield begin
    for launcher in started:
        launcher._process.kill()
        launcher._process.wait()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_engine_tells_its_address_and_ends_when_asked(start: Start) -> None:
    engine = start()
    state = engine.state()
    assert state.phase is EnginePhase.SERVING
    assert state.address.startswith("127.0.0.1:")
    engine.end()
    until(lambda: engine.state().phase is EnginePhase.ENDED)
    assert "serving" in engine.state().why


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end on Linux only")
@pytest.mark.parametrize(("last_signal", "flags"), [(signal.SIGKILL, ("--stubborn",)), (PARENT_ENDED, ())])
def test_a_launcher_ends_with_its_actor_which_was_killed(
    tmp_path: Path, last_signal: signal.Signals, flags: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", KILLED, str(int(last_signal)), *PROGRAM, *flags]
    actor = subprocess.run(
        command, env=os.environ | {"FOLDER": str(tmp_path)}, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert actor.returncode == -signal.SIGKILL, actor.stderr
    until(lambda: not is_running(int(actor.stdout)))


def test_an_engine_has_a_session_of_its_own(start: Start) -> None:
    pid = start().state().pid
    assert os.getsid(pid) == pid


def test_an_engine_that_does_not_end_is_killed(start: Start) -> None:
    engine = start(EngineOrder(("--stubborn",), drain_s=0.0, program=PROGRAM))
    engine.end()
    until(lambda: engine.state().phase is EnginePhase.ENDED)


def test_the_error_of_an_engine_that_ends_is_told(start: Start) -> None:
    engine = start(EngineOrder(("--fails", "no such model"), program=PROGRAM))
    assert engine.state().phase is EnginePhase.ENDED
    assert engine.state().why == "Error: no such model"


def test_files_are_private_and_kept_for_a_while_after_the_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    for path in tmp_path.rglob("*"):
        if path.name != "address":
            assert path.stat().st_mode & 0o077 == 0, path
    other = new_folder(tmp_path)
    assert engine.folder.is_dir()
    long_ago_s = time.time() - machine.LOG_KEPT_S - 1.0
    os.utime(engine.folder / "log", (long_ago_s, long_ago_s))
    new_folder(tmp_path)
    assert (engine.folder.exists(), other.exists()) == (False, True)


def test_files_of_a_silent_engine_are_kept_while_its_actor_lives(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    long_ago_s = time.time() - machine.LOG_KEPT_S - 1.0
    os.utime(engine.folder / "log", (long_ago_s, long_ago_s))
    monkeypatch.setattr(machine, "TOUCH_S", -1.0)
    engine.state()
    new_folder(tmp_path)
    assert engine.folder.is_dir()


def test_a_long_log_loses_its_first_part(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(machine, "MAX_LOG_BYTES", 3)
    engine.state()
    assert (engine.folder / "log").read_text() == ""
    assert "serving" in (engine.folder / "log.1").read_text()


def test_an_engine_does_not_get_ray_s_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not {"RAY_AUTH_TOKEN", "OMP_NUM_THREADS"} & set(environment(ORDER, ["0"]))


def test_on_processors_shards_share_the_cores_of_their_replica() -> None:
    assert environment(EngineOrder((), shards=2, cores=8.0), [])["OMP_NUM_THREADS"] == "4"
    assert environment(EngineOrder((), shards=2, cores=0.5), [])["OMP_NUM_THREADS"] == "1"
    assert environment(EngineOrder((), shards=2), [])["OMP_NUM_THREADS"] == "1"


def test_a_replica_asks_for_gpus_where_there_are_any_unless_cores_were_asked_for() -> None:
    assert EngineOrder((), shards=2).needs(has_gpus=True) == (0.0, 2)
    assert EngineOrder((), shards=2).needs(has_gpus=False) == (2.0, 0)
    assert EngineOrder((), shards=2, cores=3.0).needs(has_gpus=True) == (3.0, 0)
    assert EngineOrder((), shards=2, cores=0.0).needs(has_gpus=False) == (0.0, 2)
