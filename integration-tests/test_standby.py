"""With --standby on a template forks each shard: kills of shards, of templates and of the launcher, seen by clients."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import processes
import psutil
import pytest
from calls import at_once, generate, metric
from scale import SHORT
from server_process import ServerProcess, wait_until

LIMIT_S = 60.0
PROMPTS = [f"{i}: the old red fox found a lamp near the river" for i in range(4)]
FLAGS = ("--standby", "on")


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


def epoch(server: ServerProcess) -> int:
    """Number of the epoch whose shards are all there; 0 if not."""
    shards = processes.shards(server.pid)
    epochs = {processes.epoch(shard) for shard in processes.living(shards.values())}
    return epochs.pop() if len(epochs) == 1 and len(shards) == len(processes.templates(server.pid)) else 0


def kill(server: ServerProcess, rank: int = 0) -> None:
    """Kills a shard, and waits for the next epoch."""
    before = epoch(server)
    processes.shards(server.pid)[rank].kill()
    wait_until(lambda: epoch(server) > before, LIMIT_S, "another shard")


def wait_until_ready(server: ServerProcess) -> None:
    wait_until(server.is_ready, LIMIT_S, "the server is ready")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with SHORT.server(1, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[Any]:
    return texts(server)


def test_a_template_is_one_thread_without_grpc_and_its_shards_are_children_of_the_launcher(
    server: ServerProcess,
) -> None:
    [template], [shard] = processes.templates(server.pid).values(), processes.shards(server.pid).values()
    assert template.num_threads() == 1 and template.children() == []
    assert not any("grpc" in mapped.path or "cygrpc" in mapped.path for mapped in template.memory_maps())
    assert shard.ppid() == template.ppid() == server.pid


def test_a_killed_shard_s_successor_has_the_template_s_weights_and_the_same_texts_and_capacity(
    server: ServerProcess, expected: list[Any]
) -> None:
    [template] = processes.templates(server.pid).values()
    slots = metric(server.url, "tgi_batch_max_total_tokens")
    kill(server)
    assert texts(server) == expected
    assert list(processes.templates(server.pid).values()) == [template]
    assert metric(server.url, "tgi_batch_max_total_tokens") == slots
    assert "Starting epoch 2 of the shards in 0.0s" in server.log()


def test_three_kills_in_a_row_need_no_other_template(server: ServerProcess, expected: list[Any]) -> None:
    [template] = processes.templates(server.pid).values()
    for _ in range(3):
        kill(server)
    assert texts(server) == expected
    assert list(processes.templates(server.pid).values()) == [template]


def test_a_killed_template_loses_nothing_is_told_once_and_the_next_loss_makes_another(
    server: ServerProcess, expected: list[Any]
) -> None:
    [template], before = processes.templates(server.pid).values(), epoch(server)
    template.kill()
    wait_until(lambda: "The template of shard 0 was ended by signal 9" in server.log(), LIMIT_S, "the line")
    assert texts(server) == expected and processes.shards(server.pid)[0].is_running()
    processes.shards(server.pid)[0].kill()
    wait_until(lambda: epoch(server) > before, LIMIT_S, "another shard")
    assert texts(server) == expected
    kill(server)
    assert texts(server) == expected
    assert server.log().count("The template of shard 0") == 1


def test_a_stopped_template_does_not_keep_its_shard_from_coming_back(
    server: ServerProcess, expected: list[Any]
) -> None:
    [template] = processes.templates(server.pid).values()
    template.send_signal(signal.SIGSTOP)
    kill(server)
    assert texts(server) == expected
    assert not processes.living([template])


def test_orphans_of_a_killed_router_are_buried(server: ServerProcess, expected: list[Any]) -> None:
    processes.router(server.pid).kill()
    wait_until_ready(server)
    assert texts(server) == expected
    wait_until(lambda: not zombies(server.pid), LIMIT_S, "no zombies")


def zombies(launcher: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher).children() if child.status() == psutil.STATUS_ZOMBIE]


def test_sigterm_ends_all(server: ServerProcess) -> None:
    """The last test with this server."""
    family = processes.family(server.pid)
    assert server.stop() == 0
    wait_until(lambda: not processes.living(family), LIMIT_S, "nothing is left")


def test_a_template_that_is_killed_while_it_forks_costs_a_start_and_no_stream() -> None:
    environ = {"FAILPOINTS": "template.fork:kill@2"}
    with SHORT.server(1, *FLAGS, "--testing", environ=environ) as server:
        expected = texts(server)
        [template] = processes.templates(server.pid).values()
        kill(server)
        assert texts(server) == expected and not processes.living([template])


def test_with_two_ranks_the_whole_group_is_replaced_and_nothing_is_left_behind_a_killed_launcher() -> None:
    with SHORT.server(2, *FLAGS) as server:
        expected, first = texts(server), list(processes.shards(server.pid).values())
        templates = processes.templates(server.pid)
        for rank in (0, 1):
            kill(server, rank)
            assert texts(server) == expected
        assert not processes.living(first) and processes.templates(server.pid) == templates
        family = processes.family(server.pid)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not processes.living(family), LIMIT_S, "nothing is left")
