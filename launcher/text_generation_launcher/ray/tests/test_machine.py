"""Engines on a machine: one for each device, taken over by the next actor, ended in order. They are real processes."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from text_generation_launcher.ray.machine import KeptEngine, MachineEngines, environment
from text_generation_launcher.ray.processes import ProcessIdentity
from text_generation_launcher.ray.values import EngineOrder, EnginePhase

PROGRAM = (sys.executable, str(Path(__file__).with_name("engine_program.py")))
ORDER = EngineOrder((), drain_s=60.0, program=PROGRAM)
HANG_S = 60.0


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[MachineEngines]:
    yield MachineEngines(tmp_path, "127.0.0.1")
    for file in tmp_path.glob("*/pid"):
        identity = ProcessIdentity(*map(int, file.read_text().split()))
        identity.send(signal.SIGKILL)


def claimed(machine: MachineEngines, name: str = "a", order: EngineOrder = ORDER, *devices: str) -> KeptEngine:
    found = machine.claim("me", name, order, devices)
    assert isinstance(found, KeptEngine), found
    until(lambda: found.state().phase is not EnginePhase.STARTING)
    return found


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_an_engine_tells_its_address_and_ends_when_asked(machine: MachineEngines) -> None:
    engine = claimed(machine)
    state = engine.state()
    assert state.phase is EnginePhase.SERVING
    assert state.address.startswith("127.0.0.1:")
    engine.end()
    until(lambda: engine.state().phase is EnginePhase.ENDED)
    assert "serving" in engine.state().why


def test_an_engine_whose_actor_is_gone_is_taken_over(machine: MachineEngines) -> None:
    engine = claimed(machine)
    engine.release()  # as the kernel does when the actor is killed
    assert claimed(machine).state() == engine.state()


def test_an_engine_is_not_a_child_of_its_actor_and_has_a_session_of_its_own(machine: MachineEngines) -> None:
    pid = claimed(machine).state().pid
    assert os.getsid(pid) == pid
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()


def test_an_engine_with_an_actor_is_left_alone(machine: MachineEngines) -> None:
    engine = claimed(machine)
    assert claimed(machine).state().pid != engine.state().pid
    assert claimed(machine, "b").state().pid != engine.state().pid


def test_on_processors_an_engine_of_another_replica_is_left_to_its_own_actor(machine: MachineEngines) -> None:
    engine = claimed(machine)
    engine.release()
    assert claimed(machine, "b").state().pid != engine.state().pid
    assert claimed(machine, "a").state().pid == engine.state().pid


def test_on_gpus_an_engine_of_any_replica_of_the_order_is_taken_over(machine: MachineEngines) -> None:
    engine = claimed(machine, "a", ORDER, "0", "1")
    engine.release()
    assert claimed(machine, "b", ORDER, "1", "0").state().pid == engine.state().pid


def test_two_engines_never_share_a_gpu(machine: MachineEngines) -> None:
    engine = claimed(machine, "a", ORDER, "0")
    blocked = machine.claim("me", "b", ORDER, ["0"])
    assert blocked == f"GPU 0 is used by the launcher with pid {engine.state().pid}, whose actor is alive"
    engine.release()
    other = EngineOrder(("--fails", ""), drain_s=60.0, program=PROGRAM)
    blocked = machine.claim("me", "b", other, ["0"])
    assert isinstance(blocked, str)
    assert "was asked to end" in blocked
    until(lambda: isinstance(machine.claim("me", "b", other, ["0"]), KeptEngine))
    assert engine.state().phase is EnginePhase.ENDED


def test_an_engine_that_does_not_end_is_killed(machine: MachineEngines) -> None:
    engine = claimed(machine, "a", EngineOrder(("--stubborn",), drain_s=0.0, program=PROGRAM))
    engine.end()
    until(lambda: engine.state().phase is EnginePhase.ENDED)


def test_the_error_of_an_engine_that_ends_is_told(machine: MachineEngines) -> None:
    engine = claimed(machine, "a", EngineOrder(("--fails", "no such model"), program=PROGRAM))
    assert engine.state().phase is EnginePhase.ENDED
    assert engine.state().why == "Error: no such model"


def test_files_are_private_and_those_of_dead_engines_are_removed(machine: MachineEngines, tmp_path: Path) -> None:
    engine = claimed(machine)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.name != "address":
            assert file.stat().st_mode & 0o077 == 0, file
    engine.end()
    until(lambda: engine.state().phase is EnginePhase.ENDED)
    engine.release()
    claimed(machine, "b")
    assert len(list(tmp_path.glob("*/about"))) == 1


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


def test_a_signal_reaches_no_other_process_of_the_same_number() -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    assert me.is_alive
    other = ProcessIdentity(me.pid, me.started_ticks + 1)
    assert not other.is_alive
    other.send(signal.SIGKILL)
