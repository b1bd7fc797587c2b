"""On CPUs a template forks each shard: kills of shards, of templates and of the launcher, seen by clients."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from server_process import ServerProcess, wait_until
from streams import compare

LIMIT_S = 60.0
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
    assert "The template of webservers did not fork" in server.log()


def zombies(launcher: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher).children() if child.status() == psutil.STATUS_ZOMBIE]


def test_sigterm_ends_all(server: ServerProcess) -> None:
    """The last test with this server."""
    family = processes.family(server.pid)
    assert server.stop() == 0
    wait_until(lambda: not processes.living(family), LIMIT_S, "nothing is left")


def test_a_template_that_dies_as_it_forks_costs_a_start_and_one_that_may_not_fork_becomes_the_shard() -> None:
    rules = "template.fork[epoch=1]:kill@2;template.below[epoch=2]:exit"
    with SHORT.server(1, "--testing", environ={"FAILPOINTS": rules}) as server:
        expected = texts(server)
        first = template_of(server)
        kill(server)
        assert texts(server) == expected and not processes.living([first])
        assert processes.templates(server.pid) == {}
        assert server.log().count("the system refuses another process: the template becomes tgi-shard") == 1
        assert score(processes.shards(server.pid)[0]) == score(psutil.Process(server.pid))
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
    assert losses == 1 and tokens == 0, tokens
    assert_keys_outlive_a_killed_router(two_ranks, undisturbed)


def test_a_stopped_shard_is_seen_and_no_stream_notices(two_ranks: ServerProcess) -> None:
    assert faults.stop_shard(Run(SHORT, 2, seed=1, kept=two_ranks)).failures() == []


def test_with_two_ranks_the_whole_group_is_replaced_and_nothing_is_left_behind_a_killed_launcher(
    two_ranks: ServerProcess,
) -> None:
    """The last test with this server."""
    expected, first = texts(two_ranks), list(processes.shards(two_ranks.pid).values())
    templates = processes.templates(two_ranks.pid)
    for rank in (0, 1):
        kill(two_ranks, rank, num_shard=2)
        assert texts(two_ranks) == expected
    assert not processes.living(first) and processes.templates(two_ranks.pid) == templates
    templates[1].kill()
    kill(two_ranks, 0, num_shard=2)
    assert texts(two_ranks) == expected and processes.templates(two_ranks.pid)[0] == templates[0]
    family = processes.family(two_ranks.pid)
    os.kill(two_ranks.pid, signal.SIGKILL)
    wait_until(lambda: not processes.living(family), LIMIT_S, "nothing is left")
