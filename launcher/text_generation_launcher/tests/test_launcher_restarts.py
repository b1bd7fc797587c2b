"""Shards and routers that die or hang while the launcher lives: which processes are notified and started again."""

import os
import signal

import psutil
import pytest


def last_lines_shown(launch) -> list[str]:
    return launch.stdout.rsplit("its last lines:\n", 1)[1].splitlines()[:20]


def test_a_killed_shard_is_started_again_in_a_new_epoch(site):
    launch = site.launch().ready()
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    site.wait_until_heard("ready", 2)
    assert site.heard() == [("ready", 1), ("lost", 1), ("ready", 2)]
    assert site.events("heard")[1]["message"]["reason"] == "Shard 0 was ended by signal 9"
    assert [entry["env"]["TGI_EPOCH"] for entry in site.starts("shard")] == ["1", "2"]
    assert "Shard 0 was ended by signal 9; its last lines:" in launch.stdout
    assert len(site.starts("router")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_any_rank_ends_the_group(site, rank):
    site.launch("--num-shard", "2").ready()
    first = site.starts("shard")
    killed = next(entry for entry in first if entry["env"]["RANK"] == str(rank))
    os.kill(killed["pid"], signal.SIGKILL)
    site.wait_until_heard("ready", 2)
    assert not any(site.is_alive(entry["pid"]) for entry in first)
    assert [
        entry["role"] for entry in site.events("stop")
    ] == []  # The other rank is killed too: it may hang in a collective.
    assert sorted(site.left_behind()) == ["shard-0", "shard-1", "shard-2.rendezvous", "shard.lock"]


def test_a_stopped_shard_is_named_and_replaced(site):
    site.launch("--num-shard", "2").ready()
    stopped = next(entry for entry in site.starts("shard") if entry["env"]["RANK"] == "1")
    os.kill(stopped["pid"], signal.SIGSTOP)
    site.wait_until_heard("ready", 2)
    assert site.heard() == [("ready", 1), ("lost", 1), ("ready", 2)]
    reason = site.events("heard")[1]["message"]["reason"]
    assert reason == "Shard 1 hangs: Health was not answered 2 times in a row"
    assert not site.is_alive(stopped["pid"])


def test_the_router_s_request_to_restart_counts_once_and_only_for_living_shards(site):
    launch = site.launch(FAKE_ROUTER="asks").ready()
    site.wait_until_heard("ready", 2)
    assert site.heard() == [("ready", 1), ("lost", 1), ("ready", 2)]
    assert "The webserver asks for new shards: wrong answers" in launch.stdout


def test_five_failed_starts_end_the_server_with_the_culprit_s_last_lines(site):
    launch = site.launch(FAKE_SHARD="fail")
    assert launch.end() == 1
    assert launch.stderr == (
        "error: the shards failed too often, at last: Shard 0 exited with status 3\n"
        "hint: look at its last lines in the log above\n"
    )
    assert len(site.starts("shard")) == 5
    assert last_lines_shown(launch) == [f"complaint {number}" for number in range(10, 30)]
    site.assert_no_children()
    assert site.left_behind() == []


@pytest.mark.parametrize("router", ["confirm", "blames"])
def test_deaths_do_not_add_up_when_steps_are_confirmed_or_requests_blamed_between_them(site, router):
    launch = site.launch("-g", "1", FAKE_SHARD="die_later", FAKE_ROUTER=router)
    site.wait_for_start("shard", 6)
    assert launch.process.poll() is None
    waits = [line.rpartition(" in ")[2] for line in launch.stdout.splitlines() if "Starting epoch" in line]
    assert set(waits) == {"0.5s"}


def test_a_configuration_error_at_the_first_start_ends_the_server_at_once(site):
    launch = site.launch(FAKE_SHARD="config")
    assert launch.end() == 1
    assert launch.stderr.startswith("error: Shard 0 exited with status 78\nhint: ") and len(site.starts("shard")) == 1


def test_a_lack_of_memory_that_aborts_the_first_shard_ends_the_server_at_once(site):
    launch = site.launch(FAKE_SHARD="no_memory")
    assert launch.end() == 1
    assert launch.stderr.startswith("error: Shard 0 was ended by signal 6\nhint: ") and len(site.starts("shard")) == 1
    assert last_lines_shown(launch)[0] == "memory allocation of 4096 bytes failed"


def test_a_configuration_error_after_a_good_start_is_tried_again(site):
    site.launch(FAKE_SHARD="TGI_EPOCH=2 config").ready()
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    site.wait_until_heard("ready", 3)


CANNOT_RUN = "#!/nonexistent/python\n"


def test_a_shard_program_that_cannot_run_at_the_first_start_ends_the_server_at_once(site):
    program = site.programs / "text-generation-server"
    breaks_itself = f"open({str(program)!r}, 'w').write({CANNOT_RUN!r})"
    program.write_text(program.read_text().replace("sys.exit(0)", f"{breaks_itself}; sys.exit(0)", 1))
    launch = site.launch()
    assert launch.end() == 1
    assert launch.stderr.startswith("error: cannot run ") and launch.stderr.count("\n") == 2
    assert launch.stdout.count("Starting shard") == 1


def test_a_shard_program_that_cannot_run_after_a_good_start_is_tried_again(site):
    program = site.programs / "text-generation-server"
    works = program.read_text()
    launch = site.launch().ready()
    program.write_text(CANNOT_RUN)
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    launch.wait_for("Shard cannot start: cannot run ")
    program.write_text(works)
    site.wait_until(lambda: [event for event, _ in site.heard()].count("ready") == 2, "no shard was started again")


@pytest.mark.parametrize("num_shard", [1, 2])
def test_a_killed_router_is_started_again_on_the_same_port_with_the_same_shards(site, num_shard):
    launch = site.launch("--num-shard", str(num_shard)).ready()
    first = site.started("router")
    os.kill(first["pid"], signal.SIGKILL)
    second = site.wait_for_start("router", 2)
    site.wait_until(lambda: site.heard() == [("ready", 1)] * 2, "the second router is not notified of the shard")
    assert port_of(first) == port_of(second)
    site.wait_until(lambda: port_of(second) in listening_ports(second["pid"]), "the second router does not listen")
    assert len(site.starts("shard")) == num_shard
    assert "Webserver was ended by signal 9; its last lines:\na plain line\n" in launch.stdout


def test_a_router_that_sends_invalid_messages_is_replaced(site):
    launch = site.launch(FAKE_ROUTER="babbles").ready()
    site.wait_for_start("router", 2)
    assert "The webserver sent a line that is not a message" in launch.stdout


def test_a_shard_that_dies_while_the_router_drains_is_replaced(site):
    launch = site.launch(FAKE_ROUTER="drain").ready()
    launch.process.send_signal(signal.SIGTERM)
    site.wait_until(lambda: any(entry["role"] == "router" for entry in site.events("stop")), "the router got no signal")
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    launch.wait_for("Starting epoch 2")
    site.wait_until(lambda: launch.stdout.count("Shard ready") == 2, "no second epoch")
    (site.root / "journal.drained").touch()
    assert launch.end() == 0
    assert site.left_behind() == []


def test_restarting_leaves_no_descriptor_behind(site):
    launch = site.launch(FAKE_ROUTER="confirm").ready()
    launcher = psutil.Process(launch.process.pid)
    before = launcher.num_fds()
    for number in (1, 2, 3):
        os.kill(site.starts("shard")[-1]["pid"], signal.SIGKILL)
        site.wait_until_heard("ready", number + 1)
    # Closed gRPC channels release their descriptors a little later.
    site.wait_until(lambda: launcher.num_fds() <= before, "descriptors are left")


def port_of(router: dict) -> int:
    return int(router["argv"][router["argv"].index("--port") + 1])


def listening_ports(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
