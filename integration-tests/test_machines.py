"""Machines of the tests of many machines: addresses of their own, cables that can be pulled, cut off and slowed."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machines
import pytest
from machines import Machine, Network
from server_process import wait_until
from slow_link import Slowness

PORT = 7000
# Sends a line to machine 1 and waits for the same line to come back.
ECHO = """
import contextlib, socket
server = socket.create_server(("{0}", {1}))
while True:
    taken, _ = server.accept()
    with contextlib.suppress(ConnectionError):  # the other machine has died
        while data := taken.recv(1 << 16):
            taken.sendall(data)
"""
ASK = """
import socket, sys, time
taken = socket.create_connection(("{0}", {1}), timeout=60)
while True:
    sent = b"x" * 200000 + str(time.monotonic()).encode()
    taken.sendall(sent)
    got = b""
    while len(got) < len(sent):
        got += taken.recv(1 << 16)
    assert got == sent
    print(time.monotonic(), flush=True)
    time.sleep(0.01)
"""
MAKER = """
import os
from pathlib import Path
from machines import Network
network = Network(1).__enter__()
print(network.machines[0].namespace, network.address, flush=True)
network.machines[0].start(["sleep", "1000"], Path("/dev/null"))
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if not machines.can_be_made():
        pytest.skip(machines.WITHOUT)
    with Network(2) as network:
        yield network


@pytest.fixture
def answers(network: Network, tmp_path: Path) -> Iterator[Path]:
    """The log of machine 0, with a line for each answer from machine 1."""
    log = tmp_path / "answers"
    there = network.machines[1]
    there.start([sys.executable, "-c", ECHO.format(there.address, PORT)], tmp_path / "echo")
    wait_until(lambda: _accepts(network.machines[0], there), 30, "machine 1 answers")
    network.machines[0].start([sys.executable, "-c", ASK.format(there.address, PORT)], log)
    wait_until(lambda: count(log) > 3, 30, "answers come")
    yield log
    for machine in network.machines:
        machine.kill()


def _accepts(here: Machine, there: Machine) -> bool:
    words = [sys.executable, "-c", f"import socket; socket.create_connection(('{there.address}', {PORT}), 1)"]
    return subprocess.run(["ip", "netns", "exec", here.namespace, *words], stderr=subprocess.DEVNULL).returncode == 0


def count(log: Path) -> int:
    return len(log.read_text().splitlines())


def stays(log: Path) -> bool:
    before = count(log)
    time.sleep(0.5)
    return count(log) == before


def goes_on(log: Path) -> None:
    before = count(log)
    wait_until(lambda: count(log) > before + 2, 60, "answers come again")


@pytest.mark.parametrize(("number", "part", "mend"), [(1, "unplug", "plug"), (0, "cut_off", "join")])
def test_a_pulled_cable_or_a_cut_stops_answers_until_it_is_mended(
    network: Network, answers: Path, number: int, part: str, mend: str
) -> None:
    getattr(network.machines[number], part)()
    wait_until(lambda: stays(answers), 30, "no answers come")  # the first ones may be on their way
    getattr(network.machines[number], mend)()
    goes_on(answers)


def test_a_slow_cable_delays_and_loses_and_the_bytes_are_the_same(network: Network, answers: Path) -> None:
    goes_on(answers)
    with network.machines[1].slowed(Slowness(0.05, 0.01, 0.5, 0.3), seed=1):
        time.sleep(0.5)
        before = count(answers)
        wait_until(lambda: count(answers) > before + 1, 60, "answers come slowly")
        times = [float(line) for line in answers.read_text().splitlines()]
        assert times[-1] - times[-2] > 0.1  # there and back
    goes_on(answers)


def test_killing_a_machine_leaves_no_process(network: Network, answers: Path) -> None:
    assert network.machines[0].pids() and network.machines[0].kill() >= 1
    assert network.machines[0].pids() == [] and network.machines[1].pids() != []


def test_everything_is_removed_when_its_maker_is_killed(network: Network) -> None:
    words = [sys.executable, "-c", MAKER]
    made = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    namespace, address = made.stdout.split()
    wait_until(lambda: namespace not in machines.ip("netns", "list"), 60, "the namespace is removed")
    wait_until(lambda: address not in machines.ip("address"), 60, "the bridge is removed")
