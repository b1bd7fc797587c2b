"""Commands to a running launcher."""

import json
import os
import re
import signal
import socket
import stat

import pytest

from text_generation_common.errors import CommandError
from text_generation_launcher.control_call import LINE_BYTES, send_command

FLAGS = ("--replicas", "2")


def states(site) -> list[str]:
    report = send_command(f"{site.uds_path}-control", {"command": "replicas"})
    return [replica["state"] for replica in report["replicas"]]


def test_replicas_are_scaled_by_a_command_and_leave_nothing_behind(site):
    launch = site.launch(*FLAGS).ready()
    site.wait_until(lambda: states(site) == ["ready", "ready"], "both are ready")
    told = site.command("scale", "3")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("3 wanted, 2 ready; 0 requests\nReplica 0  ready  unix://")
    site.wait_until(lambda: states(site) == ["ready"] * 3, "the third is ready")
    front = send_command(f"{site.uds_path}-control", {"command": "front"})
    assert front["listens"] is True and set(front) == {"listens", "demand"}
    assert len({shard["env"]["MACHINE_SHARDS"] for shard in site.starts("shard")}) == 2, "2 and then 3 shards here"
    assert site.command("scale", "1").returncode == 0
    site.wait_until(lambda: states(site) == ["ready"], "two have left")
    assert [entry["role"] for entry in site.events("stop")].count("engine") == 2
    assert "Replica 0" in site.command("replicas").stdout
    assert launch.end(signal.SIGTERM) == 0
    assert site.left_behind() == []


def test_only_the_user_can_open_the_socket_and_nonsense_is_refused(site):
    site.launch(*FLAGS).ready()
    path = f"{site.uds_path}-control"
    site.wait_until(lambda: os.path.exists(path), "no socket")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for line in (b"\n", b"[]\n", b'{"command": []}\n', b'{"command": "stop"}\n', b"\xff\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(line)
            assert json.loads(client.makefile("rb").readline())["error"] == "not a command"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.settimeout(30)
        with pytest.raises(OSError):  # the launcher reads no more and closes
            while True:
                client.sendall(bytes(LINE_BYTES))
    with pytest.raises(CommandError, match="`replicas` is True"):
        send_command(path, {"command": "scale", "replicas": True})


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (
            FLAGS,
            {
                "0": "error: 0 replicas cannot serve\nhint: ask for 1 or more",
                "65": "error: 65 replicas are more than 64",
            },
        ),
        (("--api-workers", "1"), {"2": "2 replicas are more than 1: start the server with --replicas"}),
    ],
)
def test_numbers_that_cannot_be_are_refused(site, flags, refused):
    site.launch(*flags).ready()
    for number, why in refused.items():
        told = site.command("scale", number)
        assert told.returncode == 1
        assert why in re.sub("\x1b\\[[0-9;]*m", "", told.stderr)


def test_a_server_without_replicas_has_no_control_socket(site):
    site.launch().ready()
    told = site.command("replicas")
    assert (told.returncode, "no launcher with --replicas" in told.stderr) == (1, True)


def test_fronts_are_restarted_by_a_command(site):
    site.launch(*FLAGS).ready()
    assert site.command("restart-fronts").returncode == 0
    site.wait_for_start("router", 2)


def test_gpus_are_shared_out_and_a_replica_that_cannot_start_does_not_end_the_others(site):
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,8"}
    flags = ("--replicas", "1", "--num-shard", "2")
    launch = site.launch(*flags, FAKE_SHARD="CUDA_VISIBLE_DEVICES=6,7 config", **gpus).ready()
    site.wait_until(lambda: states(site) == ["ready"], "the first is ready")
    assert {shard["env"]["CUDA_VISIBLE_DEVICES"] for shard in site.starts("shard")} == {"4,5"}
    told = site.command("scale", "3")
    assert "3 replicas are more than 2: 5 GPUs are visible, and each replica needs 2" in " ".join(told.stderr.split())
    assert site.command("scale", "2").returncode == 0
    site.wait_until(lambda: states(site) == ["ready", "failed"], "the second has failed")
    launch.wait_for("Replica 1 failed, the others serve")
    assert site.command("scale", "1").returncode == 0
    site.wait_until(lambda: states(site) == ["ready"], "the second has left")
    assert launch.end(signal.SIGTERM) == 0


def test_a_number_that_follows_the_load_is_not_set_by_a_command(site):
    site.launch("--min-replicas", "1", "--max-replicas", "2").ready()
    site.wait_until(lambda: states(site) == ["ready"], "the least number is ready")
    with pytest.raises(CommandError, match="the number of replicas follows the load"):
        send_command(f"{site.uds_path}-control", {"command": "scale", "replicas": 2})
