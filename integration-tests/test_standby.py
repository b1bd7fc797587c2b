"""On CPUs a template forks each shard: kills of shards, of templates and of the launcher, seen by clients."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faults
import processes
import psutil
import pytest
from calls import at_once, generate, metric
from faults import Run
from kept_keys import (
    BREAKS,
    assert_keys_outlive_a_kill_and_no_crash,
    assert_keys_outlive_a_killed_router,
    disturbed,
)
from scale import SHORT
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import compare

LIMIT_S = 60.0
NOT_FORKED = "The template of webservers did not fork"
PROMPTS = [f"{i}: the old red fox found a lamp near the river" for i in range(4)]


def texts(server: ServerProcess) -> list[Any]:
    """The answers to PROMPTS at once; every second one is sampled."""
    calls = [
        generate(prompt, max_new_tokens=48, ignore_eos_token=True, do_sample=bool(i % 2), seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    return [
        (answer["generated_text"], [token["id"] for token in answer["details"]["tokens"]])
        for answer in at_once(server.url, *calls)
    ]


def epoch(server: ServerProcess, num_shard: int = 1) -> int:
    """Number of the epoch whose shards are all there; 0 if not."""
    shards = processes.living(processes.shards(server.pid).values())
    epochs = {processes.epoch(shard) for shard in shards}
    return epochs.pop() if len(epochs) == 1 and len(shards) == num_shard else 0


def kill(server: ServerProcess, rank: int = 0, num_shard: int = 1) -> None:
    """Kills a shard, and waits for the next epoch."""
    before = epoch(server, num_shard)
    processes.shards(server.pid)[rank].kill()
    wait_until(lambda: epoch(server, num_shard) > before, LIMIT_S, "another shard")


def template_of(server: ServerProcess) -> psutil.Process:
    [template] = processes.templates(server.pid).values()
    return template


def score(process: psutil.Process) -> int:
    """How much sooner than others the kernel ends this process for lack of memory."""
    return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with SHORT.server(1) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[Any]:
    return texts(server)


def test_a_template_is_one_thread_that_memory_ends_first_and_the_launcher_is_the_parent_of_its_shards(
    server: ServerProcess,
) -> None:
    template, [shard] = template_of(server), processes.shards(server.pid).values()
    assert template.num_threads() == 1 and template.children() == []
    assert len(template.net_connections("all")) == 1  # the launcher's: gRPC has been imported only
    assert shard.ppid() == template.ppid() == server.pid
    assert score(template) == 1000 and score(shard) == score(psutil.Process(server.pid))


def test_a_killed_shard_s_successor_has_the_template_s_weights_and_the_same_texts_and_capacity(
    server: ServerProcess, expected: list[Any]
) -> None:
    template, slots = template_of(server), metric(server.url, "tgi_batch_max_total_tokens")
    kill(server)
    assert texts(server) == expected
    assert template_of(server) == template
    assert metric(server.url, "tgi_batch_max_total_tokens") == slots
    assert "Starting epoch 2 of the shards in 0.0s" in server.log()


def test_three_kills_as_fast_as_shards_are_forked_need_no_other_template(
    server: ServerProcess, expected: list[Any]
) -> None:
    template = template_of(server)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(texts, server)
        for _ in range(3):
            kill(server)
        assert found.result() == expected
    assert template_of(server) == template


def test_keys_outlive_a_killed_shard_and_router_and_not_a_shard_that_wrote_anywhere(server: ServerProcess) -> None:
    assert_keys_outlive_a_killed_router(server, assert_keys_outlive_a_kill_and_no_crash(server, 0))


def test_a_killed_template_loses_nothing_is_told_once_and_the_next_loss_makes_another(
    server: ServerProcess, expected: list[Any]
) -> None:
    template_of(server).kill()
    wait_until(lambda: "The template of shard 0 was ended by signal 9" in server.log(), LIMIT_S, "the line")
    assert texts(server) == expected and processes.shards(server.pid)[0].is_running()
    kill(server)
    [loading] = processes.shards(server.pid).values()
    assert not loading.name().startswith(processes.FORKED)
    loading.kill()  # the death of one that loads costs another start
    assert texts(server) == expected
    kill(server)
    assert texts(server) == expected
    assert server.log().count("The template of shard 0") == 1 and template_of(server) != loading


def test_a_stopped_template_does_not_keep_its_shard_from_coming_back(
    server: ServerProcess, expected: list[Any]
) -> None:
    template = template_of(server)
    template.send_signal(signal.SIGSTOP)
    kill(server)
    assert texts(server) == expected
    assert not processes.living([template])


def kill_router(server: ServerProcess) -> None:
    router = processes.router(server.pid)
    router.kill()
    wait_until(lambda: processes.routers(server.pid) not in ([], [router]), LIMIT_S, "another router")
    wait_until(server.is_ready, LIMIT_S, "the server is ready")


def test_a_template_forks_routers_and_is_replaced_and_orphans_are_buried(
    server: ServerProcess, expected: list[Any]
) -> None:
    template = processes.router_template(server.pid)
    assert template.num_threads() == 1 and score(template) == 1000
    assert processes.router(server.pid).ppid() == server.pid
    assert score(processes.router(server.pid)) == score(psutil.Process(server.pid))
    kill_router(server)
    assert texts(server) == expected and processes.router_template(server.pid) == template
    template.kill()
    wait_until(lambda: "The template of webservers was ended by signal 9" in server.log(), LIMIT_S, "the line")
    assert texts(server) == expected
    kill_router(server)
    assert texts(server) == expected and processes.router_template(server.pid) != template
    assert server.log().count("The template of webservers") == 1
    wait_until(lambda: not zombies(server.pid), LIMIT_S, "no zombies")


def test_a_stopped_template_does_not_keep_its_router_from_coming_back(
    server: ServerProcess, expected: list[Any]
) -> None:
    template = processes.router_template(server.pid)
    template.send_signal(signal.SIGSTOP)
    kill_router(server)
    assert texts(server) == expected and not processes.living([template])
    assert NOT_FORKED in server.log()


def zombies(launcher: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher).children() if child.status() == psutil.STATUS_ZOMBIE]


def test_sigterm_ends_all(server: ServerProcess) -> None:
    """The last test with this server."""
    family = processes.family(server.pid)
    assert server.stop() == 0
    wait_until(lambda: not processes.living(family), LIMIT_S, "nothing is left")


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_template_may_die_at_any_time_and_one_that_may_not_fork_becomes_the_shard(first: int) -> None:
    """`first`: the first epoch that serves. In one before, the template dies as it loads."""
    rules = (
        f"shard.load[epoch={first - 1}]:kill",
        f"template.fork[epoch={first}]:kill@2",
        f"template.below[epoch={first + 1}]:exit",
        f"shard.warmup[epoch={first + 2}]:stop",
    )
    with SHORT.server(1, "--testing", environ={"FAILPOINTS": ";".join(rules)}) as server:
        expected = texts(server)
        template = template_of(server)
        kill(server)
        assert texts(server) == expected and not processes.living([template])
        assert processes.templates(server.pid) == {}
        assert server.log().count("the system refuses another process: the template becomes tgi-shard") == 1
        assert score(processes.shards(server.pid)[0]) == score(psutil.Process(server.pid))
        kill(server)
        wait_until(lambda: is_stopped(processes.shards(server.pid).get(0)), LIMIT_S, "the shard's Warmup")
        template_of(server).kill()  # before it knows what its shard measures
        wait_until(lambda: not processes.templates(server.pid), LIMIT_S, "the template has ended")
        processes.shards(server.pid)[0].resume()
        assert texts(server) == expected and processes.templates(server.pid) == {}


def is_stopped(process: psutil.Process | None) -> bool:
    return process is not None and process.status() == psutil.STATUS_STOPPED


@pytest.mark.slow
@pytest.mark.parametrize("num_fronts", [1, 2])
def test_where_each_template_of_webservers_dies_as_it_forks_they_start_without(num_fronts: int) -> None:
    rules, flags = "template.below[forks=webservers]:kill", ("--testing", "--api-workers", str(num_fronts))
    with SHORT.server(1, *flags, environ={"FAILPOINTS": rules}) as server:
        expected, fronts, shards = texts(server), processes.routers(server.pid), processes.shards(server.pid)
        assert len(fronts) == num_fronts and server.log().count(NOT_FORKED) >= num_fronts
        told = server.log().count(NOT_FORKED)
        fronts[0].kill()
        wait_until(lambda: server.log().count(NOT_FORKED) > told, LIMIT_S, "the next template dies")
        wait_until(lambda: len({*processes.routers(server.pid)} - {*fronts}) == 1, LIMIT_S, "another front")
        wait_until(server.is_ready, LIMIT_S, "the server is ready")
        assert texts(server) == expected and processes.shards(server.pid) == shards


@contextmanager
def limited_memory(mib: int) -> Iterator[Path]:
    """The folder of a control group, below that of this process, whose processes have this much memory together. Skips
    the test where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    root = Path("/sys/fs/cgroup")
    group = root / "memory" / own["memory"] if "memory" in own else root / own.get("", "")
    group /= f"tgi-{os.getpid()}"
    limits = {"memory.max": mib << 20, "memory.swap.max": 0, "memory.limit_in_bytes": mib << 20}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        for name in limits.keys() & {file.name for file in group.iterdir()}:
            (group / name).write_text(str(limits[name]))
        if not any((group / name).exists() for name in limits):
            pytest.skip("no control group with a limit of memory can be made: the controller is not given to it")
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), LIMIT_S, "the processes of the group have ended")
        group.rmdir()


# Takes memory until the kernel ends it: later than templates, and before all others.
HOG = "open('/proc/self/oom_score_adj', 'w').write('300')\nheld = []\nwhile True: held.append(b'x' * (4 << 20))"


@pytest.mark.slow
def test_a_full_control_group_ends_the_templates_and_no_stream_notices(tmp_path: Path) -> None:
    if score(psutil.Process()) > 0:
        pytest.skip("the kernel would end these processes early: their oom_score_adj is above 0")
    with limited_memory(900) as group:
        enter, launcher = f'echo $$ > "{group}/cgroup.procs"', tmp_path / "launcher"
        launcher.write_text(f'#!/bin/sh\n{enter}\nexec "{LAUNCHER if LAUNCHER.exists() else LAUNCHER.name}" "$@"\n')
        launcher.chmod(0o700)
        with ServerProcess("--dtype", "float32", "--json-output", *SHORT.arguments, launcher=launcher) as server:
            expected, serving = texts(server), processes.serving(server.pid)
            templates = [template_of(server), processes.router_template(server.pid)]
            with ThreadPoolExecutor(1) as pool:
                hog = pool.submit(subprocess.run, ["sh", "-c", f'{enter}; exec "$0" -S -c "$1"', sys.executable, HOG])
                while not hog.done():
                    assert texts(server) == expected
            assert hog.result().returncode == -signal.SIGKILL and not processes.living(templates)
            assert processes.serving(server.pid) == serving
            kill(server)
            assert texts(server) == expected and template_of(server).is_running()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ServerProcess]:
    with SHORT.server(2, "--testing", environ={"FAILPOINTS": BREAKS}) as server:
        yield server


def test_keys_outlive_a_killed_rank_and_one_that_ends_itself_and_not_one_that_wrote_anywhere(
    two_ranks: ServerProcess,
) -> None:
    undisturbed = assert_keys_outlive_a_kill_and_no_crash(two_ranks, 1)
    kill(two_ranks, 1, num_shard=2)
    assert epoch(two_ranks, 2) == 4, "that which breaks"
    wait_until(two_ranks.is_ready, LIMIT_S, "the server is ready")
    answers, losses, tokens = disturbed(two_ranks, lambda: None)
    assert compare(undisturbed, answers).failures() == []
    assert losses == 2 and tokens == 0, (losses, tokens)
    assert_keys_outlive_a_killed_router(two_ranks, undisturbed)


def test_a_stopped_shard_is_seen_and_no_stream_notices(two_ranks: ServerProcess) -> None:
    assert faults.stop_shard(Run(SHORT, 2, seed=1, kept=two_ranks)).failures() == []


def test_with_two_ranks_the_whole_group_is_replaced_and_nothing_is_left_behind_a_killed_launcher(
    two_ranks: ServerProcess,
) -> None:
    """The last test with this server. At last a template dies before it has forked, when the other rank's has."""
    expected, first = texts(two_ranks), list(processes.shards(two_ranks.pid).values())
    templates = processes.templates(two_ranks.pid)
    for rank in (0, 1):
        kill(two_ranks, rank, num_shard=2)
        assert texts(two_ranks) == expected
    assert not processes.living(first) and processes.templates(two_ranks.pid) == templates
    old, number = processes.shards(two_ranks.pid), epoch(two_ranks, 2)
    templates[1].suspend()
    old[0].kill()
    wait_until(lambda: processes.shards(two_ranks.pid).get(0, old[0]) != old[0], LIMIT_S, "rank 0 is forked")
    templates[1].kill()
    wait_until(lambda: epoch(two_ranks, 2) > number, LIMIT_S, "rank 1 is started")
    assert epoch(two_ranks, 2) == number + 1 and not processes.living(old.values())
    assert texts(two_ranks) == expected and processes.templates(two_ranks.pid)[0] == templates[0]
    family = processes.family(two_ranks.pid)
    os.kill(two_ranks.pid, signal.SIGKILL)
    wait_until(lambda: not processes.living(family), LIMIT_S, "nothing is left")
