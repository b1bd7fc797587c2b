"""The launcher as a process with fake children: order of starts and stops, failed starts, signals, logs, files left
behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from text_generation_benchmark.process import free_port
from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_common.weights.tokenizer_files import identity_of
from text_generation_launcher.process import PARENT_ENDED

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


def port_of(site) -> str:
    argv = site.started("router")["argv"]
    return argv[argv.index("--port") + 1]


def test_children_start_in_order_and_stop_router_first(site):
    launch = site.launch().ready()
    assert launch.end(signal.SIGTERM) == 0
    first, *others = [entry["role"] for entry in site.events("start")]
    assert (first, sorted(others)) == ("download", ["router", "shard"])
    assert [entry["role"] for entry in site.events("stop")] == ["router", "shard"]
    assert launch.stderr == ""


def test_fronts_stop_before_their_engine_and_the_engine_before_its_shards(site):
    launch = site.launch("--api-workers", "2").ready()
    site.wait_until_heard("ready", 1)
    site.wait_for_start("router", 2)
    assert launch.end(signal.SIGTERM) == 0
    first, *others = [entry["role"] for entry in site.events("start")]
    assert (first, sorted(others)) == ("download", ["engine", "router", "router", "shard"])
    assert [entry["role"] for entry in site.events("stop")] == ["router", "router", "engine", "shard"]
    assert launch.stderr == ""


def test_a_front_and_an_engine_that_die_are_replaced_and_no_rank_is(site):
    flags = ("--api-workers", "2", "--num-shard", "2")
    site.launch(*flags, FAKE_ENGINE="START=1 die_later", FAKE_ROUTER="START=1 die_later").ready()
    site.wait_for_start("engine", 2)
    site.wait_for_start("router", 3)
    assert len(site.starts("shard")) == 2


@pytest.mark.parametrize("is_whole", [False, True])
def test_milestones_come_in_tgi_s_order_and_few_lines(site, is_whole):
    """A model whose files are whole starts no child that would look at them."""
    if is_whole:
        site.make_whole()
    launch = site.launch().ready()
    assert bool(site.starts("download")) != is_whole
    milestones = [
        f"Starting check and download process for {site.model}",
        "Files are already present on the host. Skipping download.",
        f"Successfully downloaded weights for {site.model}",
        "Default `max_batch_prefill_tokens` to 2048",
        "Starting shard",
        "Server started",
        "Shard ready in ",
        "Starting Webserver",
        "Connected",
    ]
    places = [launch.stdout.index(text) for text in milestones]
    assert places == sorted(places)
    own = [line for line in launch.stdout.splitlines() if " text_generation_launcher: " in line]
    assert len(own) <= 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_end_signal_is_an_orderly_end(site, number):
    launch = site.launch().ready()
    assert launch.end(number) == 0
    assert len(site.events("stop")) == 2
    assert "webserver terminated" in launch.stdout


def test_the_router_is_notified_of_the_shards_when_every_rank_is_ready(site):
    site.launch("--num-shard", "2").ready()
    assert site.heard() == [("ready", 1)]
    shards = site.starts("shard")
    assert sorted(entry["env"]["RANK"] for entry in shards) == ["0", "1"]
    assert all("--sharded" in entry["argv"] and entry["env"]["WORLD_SIZE"] == "2" for entry in shards)


def test_the_router_waits_while_a_rank_loads(site):
    launch = site.launch("--num-shard", "2", FAKE_SHARD="RANK=1 loads_for_ever").wait_for("a plain line")
    launch.wait_for("Server started rank=0").wait_for("Server started rank=1")
    time.sleep(0.5)  # long enough for several answers of Health
    assert site.heard() == []
    assert launch.end(signal.SIGTERM) == 0


def shown_of(launch, file: str) -> list[str]:
    """What /proc shows of the launcher and of its janitor, which has forked from it."""
    children = Path(f"/proc/{launch.process.pid}/task/{launch.process.pid}/children").read_text().split()
    janitors = [pid for pid in children if "text_generation_launcher.cli" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(janitors) == 1
    return [Path(f"/proc/{pid}/{file}").read_bytes().decode() for pid in (launch.process.pid, *janitors)]


def test_keys_stand_on_no_command_line_and_in_no_shard_s_environment(site):
    launch = site.launch_by_command("--api-key", "secret-1", "--api-key=secret-2", HF_TOKEN="secret-3").ready()
    assert site.started("router")["env"]["API_KEY"] == "secret-1 secret-2"
    for entry in site.events("start"):
        assert "secret" not in " ".join(entry["argv"])
        assert entry["role"] in ("router", "download") or "secret" not in str(entry["env"])
    assert launch.stdout.count("A key was on the command line") == 1 and "secret" not in launch.stdout
    assert all("secret" not in line and "********" in line for line in shown_of(launch, "cmdline"))
    ours, janitor_s = shown_of(launch, "environ")
    assert "secret-3" in ours and "secret" not in janitor_s


def test_a_name_on_the_command_line_is_one_address_and_not_every_one(site):
    site.launch("--hostname", "localhost").ready()
    socket.create_connection(("127.0.0.1", int(port_of(site)))).close()
    with pytest.raises(ConnectionRefusedError):  # 127.0.0.2 is another address of the same machine
        socket.create_connection(("127.0.0.2", int(port_of(site))))


def test_a_server_leaves_no_files_and_no_processes(site):
    site.launch().ready().end(signal.SIGTERM)
    assert site.left_behind() == []


@pytest.mark.parametrize(("role", "text"), [("DOWNLOAD", "Starting check"), ("SHARD", "Starting shard")])
def test_a_signal_while_starting_is_an_orderly_end(site, role, text):
    launch = site.launch(**{f"FAKE_{role}": "hang"}).wait_for(text)
    site.wait_for_start(role.lower())
    assert launch.end(signal.SIGTERM) == 0
    assert site.heard() == []
    assert site.left_behind() == []


@pytest.mark.parametrize(("flaw", "error", "told"), TABLES["flaws"])
def test_a_first_death_that_another_start_cannot_mend_ends_the_server(site, flaw, error, told):
    launch = site.launch(**flaw)
    assert launch.end() == 1
    assert launch.stderr == f"error: {error}\nhint: look at its last lines in the log above\n"
    assert told in launch.stdout


@pytest.mark.parametrize(
    ("role", "kind"), [("DOWNLOAD", "DownloadError"), ("SHARD", "ShardCannotStart"), ("ROUTER", "WebserverFailed")]
)
def test_a_child_s_error_is_the_launcher_s_only_error(site, role, kind):
    flaw = {f"FAKE_{role}": "told"}
    launch = site.launch(**flaw)
    assert launch.end() == 1
    assert launch.stderr == "error: the disk is full\nhint: delete something\n"
    assert "disk" not in launch.stdout and "last lines" not in launch.stdout
    assert role != "DOWNLOAD" or len(launch.stdout.splitlines()) == 1  # three lines in all

    launch = site.launch("--json-output", **flaw)
    assert launch.end() == 1
    told = json.loads(launch.stderr)
    assert (told["message"], told["hint"], told["kind"]) == ("the disk is full", "delete something", kind)
    assert all(json.loads(line) for line in launch.stdout.splitlines()) and "disk" not in launch.stdout


BAD_FILES = {
    "tokenizer.json": ('{"version": "1.0", "model": {"type": "X"}}', "cannot be read as a tokenizer"),
    "chat_template.jinja": ("{% if %}", "the model's chat template is not valid Jinja"),
    "chat_template.json": ('{"chat_template": "{{ a | nofilter }}"}', "the model's chat template is not valid Jinja"),
}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_tokenizer_or_template_ends_the_start_beside_the_download(site, name, is_whole):
    if is_whole:  # nothing is downloaded: the shards wait for the check
        site.make_whole()
    content, told = BAD_FILES[name]
    (site.model / name).write_text(content)
    launch = site.launch(FAKE_DOWNLOAD="hang")
    assert launch.end() == 1
    error, hint = launch.stderr.splitlines()
    assert error.startswith("error: ") and told in error and hint.startswith("hint: ")
    assert "Terminating" not in launch.stdout and {entry["role"] for entry in site.events("start")} <= {"download"}


def test_a_bad_tokenizer_that_is_downloaded_ends_the_start_beside_the_shards(site):
    tokenizer = site.model / "tokenizer.json"
    tokenizer.rename(f"{tokenizer}.partial")
    (site.model / "tokenizer.model").touch()
    Path(f"{tokenizer}.partial").write_text(BAD_FILES[tokenizer.name][0])
    launch = site.launch(FAKE_DOWNLOADED=str(tokenizer), FAKE_SHARD="loads_for_ever")
    assert launch.end() == 1
    assert "cannot be read as a tokenizer" in launch.stderr and len(launch.stderr.splitlines()) == 2
    assert site.starts("router") == []


def test_a_check_that_runs_out_of_its_limits_is_told_and_leaves_nothing(site):
    blow_up = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 3000}
    tokenizer = json.loads((site.model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [blow_up] * 3}
    (site.model / "tokenizer.json").write_text(json.dumps(tokenizer))
    launch = site.launch()
    assert launch.end() == 1
    assert "more memory than a file of its size may take" in launch.stderr.splitlines()[0]
    site.assert_no_children()


def test_a_tokenizer_that_was_checked_is_named_to_every_router_and_front(site):
    for flags, number in (((), 1), (("--api-workers", "1"), 2)):
        site.launch(*flags).ready().end(signal.SIGTERM)
        argv = site.starts("router")[number - 1]["argv"]
        assert argv[argv.index("--probed-tokenizer") + 1] == identity_of(site.model / "tokenizer.json")


def test_the_error_of_a_rank_is_the_only_one_although_another_rank_ends_first(site):
    launch = site.launch("--num-shard", "2", FAKE_SHARD="told_late")
    assert launch.end() == 1
    assert launch.stderr == "error: the disk is full\nhint: delete something\n"
    assert "disk" not in launch.stdout and "last lines" not in launch.stdout and len(site.starts("shard")) == 2


def test_the_error_of_a_child_that_is_started_again_is_logged(site):
    launch = site.launch(FAKE_SHARD="TGI_EPOCH=2 told").ready()
    os.kill(site.started("shard")["pid"], signal.SIGKILL)
    site.wait_until_heard("ready", 3)
    assert "its last lines:\nError: the disk is full: delete something" in launch.stdout


@pytest.mark.parametrize(
    ("flags", "role", "modes"),
    [
        ((), "download", {"FAKE_DOWNLOAD": "hang"}),
        ((), "shard", {"FAKE_SHARD": "hang", "FAKE_ROUTER": "hang"}),
        # This shard ignores SIGTERM, as one does that warms up.
        ((), "shard", {"FAKE_SHARD": "stubborn", "FAKE_ROUTER": "hang"}),
        ((), "router", {"FAKE_ROUTER": "hang"}),
        (("--replicas", "2"), "engine", {"FAKE_ENGINE": "hang"}),
        ((), None, {}),
    ],
)
def test_ctrl_c_ends_a_server_within_two_seconds_and_with_130_before_it_has_served(site, flags, role, modes):
    """A child that ignores SIGTERM is not given the time that it has after the server has served."""

    def start_and_end() -> Seconds:
        launch = site.launch(*flags, **modes)
        if role is None:
            launch.ready()
        else:
            site.wait_for_start(role)
        if role == "engine":
            launch.wait_for("Connected")  # a front listens, but no engine
        taken = Seconds.of(lambda: launch.end(signal.SIGINT))
        assert (launch.process.returncode, launch.stderr) == (0 if role is None else 130, "")
        site.assert_no_children()
        assert site.left_behind() == []
        site.journal.unlink()
        return taken

    assert_within(start_and_end, clock=2.0)


def test_ctrl_c_while_modules_are_loaded_ends_the_launcher_without_a_word(tmp_path):
    (tmp_path / "typer.py").write_text("print('loading', flush=True); import time; time.sleep(60)")
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from text_generation_launcher.entry import main; main()"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=-1, stderr=-2, text=True) as launcher:
        assert launcher.stdout.readline() == "loading\n"
        launcher.send_signal(signal.SIGINT)
        assert (launcher.stdout.read(), launcher.wait()) == ("", -signal.SIGINT)


def test_shards_that_cannot_share_the_heads_are_refused_before_a_child_starts(site):
    launch = site.launch("--num-shard", "3")
    assert launch.end() == 1
    assert "--num-shard 3 cannot divide the 4 attention heads" in launch.stderr and "1, 2, 4" in launch.stderr
    assert site.events("start") == [] and len(launch.stderr.splitlines()) == 2


@pytest.mark.parametrize(("was_there", "started"), [(False, ["download"]), (True, [])])
def test_a_model_of_the_hub_is_checked_as_soon_as_its_config_is_there(site, was_there, started):
    cache, partial = site.root / "hub", site.root / "hub.partial"
    repository = (cache if was_there else partial) / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(site.model, repository / "snapshots" / "abc")
    flags = ["--model-id", "owner/name", "--huggingface-hub-cache", str(cache), "--num-shard", "3"]
    launch = site.launch(*flags, FAKE_DOWNLOADED=str(cache))
    assert launch.end() == 1
    assert "--num-shard 3 cannot divide the 4 attention heads" in launch.stderr
    assert [entry["role"] for entry in site.events("start")] == started


def test_the_last_twenty_lines_of_a_dead_child_are_shown(site):
    launch = site.launch(FAKE_SHARD="config")
    launch.end()
    shown = launch.stdout.split("its last lines:\n")[1].splitlines()
    assert shown[:20] == [f"complaint {number}" for number in range(10, 30)]


def test_a_stubborn_child_is_killed_after_the_grace_period(site):
    launch = site.launch("-g", "0", FAKE_ROUTER="stubborn").ready()
    assert launch.end(signal.SIGTERM) == 0
    assert "webserver killed" in launch.stdout
    assert [entry["role"] for entry in site.events("stop")] == ["shard"]


def test_a_second_signal_ends_everything_at_once(site):
    launch = site.launch("-g", "3600", FAKE_ROUTER="stubborn").ready()
    launch.process.send_signal(signal.SIGTERM)
    launch.wait_for("Terminating webserver")
    assert launch.end(signal.SIGTERM) == 0
    assert site.events("stop") == []
    site.assert_no_children()
    assert site.left_behind() == []


def test_a_parents_end_which_the_kernel_reports_for_each_of_its_threads_is_an_orderly_end(site):
    launch = site.launch(FAKE_ROUTER="drain").ready()
    for _ in range(3):
        launch.process.send_signal(PARENT_ENDED)
        site.wait_until(lambda: [entry for entry in site.events("stop") if entry["role"] == "router"], "no drain")
    Path(f"{site.journal}.drained").touch()
    assert launch.end() == 0
    assert "webserver terminated" in launch.stdout and "killed" not in launch.stdout


def test_files_of_dead_shards_do_not_hinder_the_next_server(site):
    """A launcher that was killed together with its janitor leaves the sockets and rendezvous files of its shards."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{site.uds_path}-0")
    Path(f"{site.uds_path}-3.rendezvous").touch()
    other = Path(f"{site.uds_path}-other-3.rendezvous")
    other.touch()
    site.launch().wait_for("Server started").ready()
    assert sorted(site.left_behind()) == ["shard-0", "shard-1.rendezvous", other.name, "shard.lock"]


def test_children_get_no_signal_that_is_sent_to_the_launcher_s_process_group(site):
    site.launch().ready()
    groups = {os.getpgid(entry["pid"]) for entry in site.events("start") if entry["role"] != "download"}
    assert os.getpgid(0) not in groups
    assert len(groups) == 2


def test_a_second_launch_on_the_same_sockets_is_refused_by_pid(site):
    first = site.launch().ready()
    second = site.launch()
    assert second.end() == 1
    assert second.stderr == (
        f"error: socket path {site.uds_path} is in use by the launcher with pid {first.process.pid}\n"
        "hint: choose another --shard-uds-path\n"
    )
    assert len(site.events("start")) == 3


def test_a_second_launch_on_the_same_port_is_refused(site):
    site.launch().ready()
    port = port_of(site)
    second = site.launch("--shard-uds-path", f"{site.uds_path}-other", "-p", port)
    assert second.end() == 1
    assert second.stderr == f"error: port {port} is in use on 127.0.0.1\nhint: choose another --port\n"


def test_a_port_is_taken_before_anything_listens_on_it(site):
    port = str(free_port())
    site.launch("-p", port, FAKE_SHARD="hang").wait_for("Starting shard")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
    second = site.launch("--shard-uds-path", f"{site.uds_path}-other", "-p", port)
    assert second.end() == 1
    assert f"port {port} is in use" in second.stderr


def test_the_same_port_serves_again_at_once_after_connections(site):
    port = str(free_port())
    first = site.launch("-p", port).ready()
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        assert connection.recv(1) == b""  # The server closes first, so its port stays in TIME_WAIT.
    first.end(signal.SIGTERM)
    site.launch("-p", port).ready()


def test_failpoints_alone_are_one_warning(site):
    launch = site.launch(FAILPOINTS="shard.step:kill").ready()
    (line,) = [line for line in launch.stdout.splitlines() if "FAILPOINTS" in line]
    assert "WARNING" in line and "--testing" in line
    assert all("FAILPOINTS" not in entry["env"] for entry in site.events("start"))


def test_json_output_is_one_object_a_line(site):
    launch = site.launch("--json-output").ready()
    lines = [json.loads(line) for line in launch.stdout.splitlines()]
    assert {"text_generation_launcher", "fake.download", "fake.shard", "fake.router"} <= {
        line["target"] for line in lines
    }
    started = next(line for line in lines if line["message"] == "Server started")
    assert (started["rank"], started["timestamp"]) == (0, "2026-01-02T03:04:05.678901Z")


def test_text_output_keeps_a_child_s_time_target_and_fields(site):
    launch = site.launch().ready()
    assert "2026-01-02T03:04:05.678901Z     INFO fake.shard: Server started rank=0\n" in launch.stdout
    launch.wait_for("INFO router: a plain line\n")


def test_nothing_starts_when_a_flag_is_refused(site):
    launch = site.launch("--speculate", "2")
    assert launch.end() == 1
    assert launch.stderr == "error: --speculate is not supported yet\nhint: start without it\n"
    assert site.events("start") == []


@pytest.mark.parametrize(
    ("program", "kind"),
    [("text-generation-server", "DownloadError"), ("text-generation-router", "WebserverCannotStart")],
)
def test_a_missing_program_is_named_before_anything_starts(site, program, kind):
    (site.programs / program).unlink()
    launch = site.launch("--json-output", PATH="/nonexistent")
    assert launch.end() == 1
    told = json.loads(launch.stderr)
    assert (told["message"], told["hint"], told["kind"]) == (f"{program} not found in PATH", "install tgi-py", kind)
    assert site.events("start") == []


def test_a_program_that_cannot_run_is_reported_in_one_line(site):
    (site.programs / "text-generation-router").write_text("#!/nonexistent/python\n")
    launch = site.launch()
    assert launch.end() == 1
    assert launch.stderr.startswith("error: cannot run ")
    site.assert_no_children()
    assert site.left_behind() == []
