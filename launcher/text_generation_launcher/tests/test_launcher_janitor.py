"""A killed launcher leaves no process and no file, because its janitor removes them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from text_generation_launcher.janitor import _is_gone


def janitor_of(launch) -> psutil.Process:
    (janitor,) = [
        child for child in psutil.Process(launch.process.pid).children() if child.cmdline() == cmdline_of(launch)
    ]
    return janitor


def cmdline_of(launch) -> list[str]:
    return psutil.Process(launch.process.pid).cmdline()


@pytest.mark.parametrize("arguments", [[], ["--num-shard", "2"]])
def test_a_killed_launcher_leaves_no_process_socket_or_file(site, arguments):
    launch = site.launch(*arguments).ready()
    janitor = janitor_of(launch)
    assert site.left_behind() != []
    launch.end(signal.SIGKILL)
    site.wait_until(lambda: site.left_behind() == [], "files are left")
    site.assert_no_children()
    site.wait_until(lambda: not site.is_alive(janitor.pid), "the janitor is left")


def test_gone_is_what_has_ended_whether_or_not_its_parent_has_asked():
    process = subprocess.Popen(["sleep", "60"])
    assert not _is_gone(process.pid)
    process.kill()
    deadline_s = time.monotonic() + 30
    while not _is_gone(process.pid):
        assert time.monotonic() < deadline_s, "a zombie is not gone"
        time.sleep(0.001)
    process.wait()
    assert _is_gone(process.pid)


def test_a_launcher_ends_after_its_janitor(tmp_path):
    code = f"""
import os
from text_generation_common.places import chosen
from text_generation_launcher.claims import claim_sockets
from text_generation_launcher.janitor import fork_janitor
place = chosen({str(tmp_path / "shard")!r})
for _ in range(20):
    with claim_sockets(place) as lock, fork_janitor(place, lock):
        pass
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("no child")
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("no child\n" * 20, "")


def test_a_launcher_killed_while_shards_load_leaves_nothing(site):
    launch = site.launch(FAKE_SHARD="loads_for_ever").wait_for("Server started")
    launch.end(signal.SIGKILL)
    site.wait_until(lambda: site.left_behind() == [], "files are left")
    site.assert_no_children()


def test_the_next_launcher_waits_for_the_janitor_and_starts(site):
    site.launch().ready().end(signal.SIGKILL)
    site.launch().ready()


def test_what_the_children_started_dies_with_the_launcher(site):
    program = site.programs / "text-generation-server"
    grandchild = "import os, subprocess\nsubprocess.Popen(['sleep', '1000'])\n"
    program.write_text(program.read_text().replace('journal("start")\n', f'journal("start")\n{grandchild}', 1))
    launch = site.launch().ready()
    shard = psutil.Process(site.started("shard")["pid"])
    (sleeper,) = [child for child in shard.children() if child.name() == "sleep"]
    launch.end(signal.SIGKILL)
    site.wait_until(
        lambda: not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE, "a grandchild is left"
    )


def test_the_janitor_holds_no_port_pipe_or_terminal(site):
    janitor = janitor_of(site.launch().ready())
    assert janitor.net_connections("all") == []
    targets = {os.readlink(f"/proc/{janitor.pid}/fd/{name}") for name in os.listdir(f"/proc/{janitor.pid}/fd")}
    pipes = {target for target in targets if target.startswith("pipe:")}
    assert len(pipes) == 1
    assert targets - pipes == {os.devnull, f"{site.uds_path}.lock"}


def test_signals_for_the_launcher_do_not_end_the_janitor(site):
    launch = site.launch().ready()
    janitor = janitor_of(launch)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        janitor.send_signal(number)
    launch.end(signal.SIGKILL)
    site.wait_until(lambda: site.left_behind() == [], "files are left: the janitor was gone")


def test_the_server_outlives_its_janitor(site):
    launch = site.launch().ready()
    janitor_of(launch).kill()
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    site.wait_until_heard("ready", 2)
    assert launch.end(signal.SIGTERM) == 0
    assert site.left_behind() == []


def test_files_of_a_neighbour_are_left_alone(site):
    neighbour = Path(f"{site.uds_path}-2-1.rendezvous")
    neighbour.touch()
    site.launch().ready().end(signal.SIGKILL)
    site.wait_until(lambda: site.left_behind() == [neighbour.name], "too much or too little is left")
