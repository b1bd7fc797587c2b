"""Two servers need two ports and nothing else; the next start removes the files of a killed launcher and janitor."""

import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from text_generation_benchmark.process import free_port
from text_generation_common.places import find_master_socket


def in_runtime_dir(site) -> list[str]:
    folder = site.runtime_dir / "tgi-py"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def kill_with_its_janitor(launch) -> None:
    launcher = psutil.Process(launch.process.pid)
    (janitor,) = [child for child in launcher.children() if child.cmdline() == launcher.cmdline()]
    janitor.kill()
    launch.end(signal.SIGKILL)


def test_two_servers_need_two_ports_and_nothing_else(site):
    ports: set[str] = set()
    while len(ports) < 2:
        ports.add(str(free_port()))
    launches = [site.launch_in_runtime_dir("-p", port) for port in ports]
    for launch in launches:
        launch.ready()
    names = ("shard-0", "shard-1.rendezvous", "shard.lock")
    assert in_runtime_dir(site) == sorted(f"{port}/{name}" for port in ports for name in names)
    for port in ports:
        assert find_master_socket(int(port), str(site.runtime_dir)) == f"{site.runtime_dir}/tgi-py/{port}/shard-0"
    assert [launch.end(signal.SIGTERM) for launch in launches] == [0, 0]
    assert os.listdir(site.runtime_dir) == []


def test_a_port_of_the_kernel_s_choice_is_logged_and_names_the_folder(site):
    launch = site.launch_in_runtime_dir("-p", "0").ready()
    (port,) = re.findall(r"Port (\d+) was chosen for --port 0\n", launch.stdout)
    assert f"{port}/shard-0" in in_runtime_dir(site)
    with socket.create_connection(("127.0.0.1", int(port))):
        pass
    assert launch.end(signal.SIGTERM) == 0
    assert os.listdir(site.runtime_dir) == []


def test_a_second_launch_on_one_port_is_refused_by_pid(site):
    port = str(free_port())
    first = site.launch_in_runtime_dir("-p", port).ready()
    second = site.launch_in_runtime_dir("-p", port)
    assert second.end() == 1
    assert f"in use by the launcher with pid {first.process.pid}\nhint: choose another --port" in second.stderr
    assert second.stderr.count("\n") == 2


def test_without_a_runtime_directory_the_folder_is_in_tmp(site):
    launch = site.launch_in_runtime_dir("-p", "0", XDG_RUNTIME_DIR="/no/such/folder").ready()
    (port,) = re.findall(r"Port (\d+) was chosen", launch.stdout)
    folder = Path(f"/tmp/tgi-py-{os.geteuid()}/{port}")
    assert (folder / "shard-0").is_socket()
    assert launch.end(signal.SIGTERM) == 0
    assert not folder.exists()


def test_the_janitor_removes_the_folder_of_a_killed_launcher(site):
    launch = site.launch_in_runtime_dir("-p", "0").ready()
    assert in_runtime_dir(site) != []
    launch.end(signal.SIGKILL)
    site.wait_until(lambda: os.listdir(site.runtime_dir) == [], "the folder is left")


@pytest.mark.parametrize("same_port", [True, False])
def test_the_next_start_removes_the_files_of_a_launcher_killed_with_its_janitor(site, same_port):
    port = str(free_port())
    kill_with_its_janitor(site.launch_in_runtime_dir("-p", port).ready())
    site.assert_no_children()
    assert f"{port}/shard.lock" in in_runtime_dir(site)
    next_port = port if same_port else str(free_port())
    launch = site.launch_in_runtime_dir("-p", next_port).ready()
    names = ("shard-0", "shard-1.rendezvous", "shard.lock")
    assert in_runtime_dir(site) == [f"{next_port}/{name}" for name in names]
    assert launch.end(signal.SIGTERM) == 0
    assert os.listdir(site.runtime_dir) == []


def test_a_path_that_is_too_long_is_one_line(site):
    long = site.root / ("r" * 90)
    long.mkdir()
    launch = site.launch_in_runtime_dir("-p", "0", XDG_RUNTIME_DIR=str(long))
    assert launch.end() == 1
    assert launch.stderr.startswith("error: ") and "more than 107 bytes" in launch.stderr
    assert launch.stderr.count("\n") == 2 and site.events("start") == []


def test_a_squatted_folder_is_one_line_and_nothing_starts(site):
    site.runtime_dir.mkdir()
    (site.runtime_dir / "tgi-py").symlink_to(site.root)
    launch = site.launch_in_runtime_dir("-p", "0")
    assert launch.end() == 1
    assert launch.stderr.startswith("error: ") and "is not a folder" in launch.stderr
    assert launch.stderr.count("\n") == 2 and site.events("start") == []


def test_a_directory_in_place_of_a_socket_ends_the_server_in_one_line(site):
    launch = site.launch().ready()
    os.unlink(f"{site.uds_path}-0")
    os.mkdir(f"{site.uds_path}-0")
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    assert launch.end() == 1
    assert launch.stderr.startswith("error: ") and "is in the way" in launch.stderr
    assert launch.stderr.count("\n") == 2
    site.assert_no_children()
