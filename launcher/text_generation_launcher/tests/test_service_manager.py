"""Reports to a service manager: when they come, to which socket, and that children do not have its variables."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from text_generation_common.errors import ArgumentValidation
from text_generation_common.tasks import cancelled
from text_generation_launcher.service_manager import VARIABLES, ServiceManager

DEADLINE_S = 30.0


@contextmanager
def manager_at(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.settimeout(DEADLINE_S)
        end.bind(address)
        yield end


def received(end: socket.socket) -> str:
    return end.recv(4096).decode()


@pytest.mark.parametrize("is_abstract", [False, True], ids=["path", "abstract"])
def test_a_line_reaches_the_socket_of_the_manager(tmp_path, is_abstract):
    name = f"tgi-{os.getpid()}-{tmp_path.name}" if is_abstract else str(tmp_path / "notify")
    with manager_at(f"\0{name}" if is_abstract else name) as end:
        assert ServiceManager({"NOTIFY_SOCKET": f"@{name}" if is_abstract else name}).send("READY=1")
        assert received(end) == "READY=1"


def test_a_socket_that_is_missing_gone_or_full_stops_nothing(tmp_path):
    path = str(tmp_path / "notify")
    assert not ServiceManager({}).send("READY=1")
    manager = ServiceManager({"NOTIFY_SOCKET": path})
    assert not manager.send("READY=1")
    with manager_at(path) as end:
        while manager.send("WATCHDOG=1"):
            pass
        received(end)
        assert manager.send("READY=1")


@pytest.mark.parametrize(
    ("variables", "reports"),
    [
        ({}, ["READY=1"]),
        ({"WATCHDOG_USEC": "30000"}, ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]),
        ({"WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}, ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]),
        ({"WATCHDOG_USEC": "30000", "WATCHDOG_PID": "1"}, ["READY=1"]),
    ],
)
def test_ready_is_reported_once_and_life_as_often_as_the_manager_asks(tmp_path, variables, reports):
    path, is_ready = str(tmp_path / "notify"), False
    manager = ServiceManager({"NOTIFY_SOCKET": path} | variables)

    async def follow(end: socket.socket) -> list[str]:
        nonlocal is_ready
        reporting = asyncio.create_task(manager.report(lambda: is_ready))
        for _ in range(3):
            await asyncio.sleep(0)
        assert manager.send("nothing before")
        is_ready = True
        told = [await asyncio.to_thread(received, end) for _ in range(len(reports) + 1)]
        if "WATCHDOG=1" not in reports:
            await reporting
        await cancelled(reporting)
        return told

    with manager_at(path) as end:
        assert asyncio.run(follow(end)) == ["nothing before", *reports]


def test_a_variable_that_is_not_usable_is_refused_by_name():
    with pytest.raises(ArgumentValidation, match="WATCHDOG_USEC has the value 'soon'"):
        ServiceManager({"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "soon"})


def test_a_launcher_reports_readiness_life_and_its_end_and_its_children_cannot(site):
    path = str(site.root / "notify")
    with manager_at(path) as end:
        launch = site.launch(NOTIFY_SOCKET=path, WATCHDOG_USEC="300000")
        assert received(end) == "READY=1"
        assert site.started("router")  # the router was there before
        assert received(end) == "WATCHDOG=1"
        assert launch.end(signal.SIGTERM) == 0
        end.setblocking(False)
        told = [received(end)]
        while told[-1] != "STOPPING=1":
            told.append(received(end))
        assert set(told[:-1]) <= {"WATCHDOG=1"}
    assert not any(name in entry["env"] for entry in site.events("start") for name in VARIABLES)
