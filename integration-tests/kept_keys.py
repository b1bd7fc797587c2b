"""Keys and values after the death of a shard with --standby on: taken over, or computed again, by how it has died. And
after that of a router, whose shards tell the next one."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import processes
import psutil
import pytest
from calls import metric
from scale import SHORT
from server_process import ServerProcess, wait_until
from streams import StreamAnswer, compare

FEW = replace(SHORT, num_streams=8, num_late=0, new_tokens=120)
# In the fourth epoch rank 1 ends itself inside a collective, with status 70. In the fifth, rank 0 is killed in its
# Warmup, once it has given its keys and values a name that the router does not know yet.
BREAKS = "shard.step[epoch=4,rank=1]:raise@20;shard.named[epoch=5,rank=0]:kill"
NEVER_KEPT = "keys and values of a dead shard are computed again: this kernel"
NOT_SETTLED = "ended between the calls to its shards"  # seldom: a step had reached one of two ranks
GARBAGE = b"\x7f\x41" * 2048 + b"\xff" * 4096  # large numbers, and NaN


def kill(shard: psutil.Process) -> None:
    shard.kill()


def scribble_and_crash(shard: psutil.Process) -> None:
    """Overwrites all keys and values, and has the shard end as after a wrong address, before it can read them."""
    shard.suspend()
    # The signal reaches a thread that computes later than this line.
    wait_until(lambda: set(thread_states(shard.pid)) == {"T"}, 10, "all threads of the shard stop")
    [path] = [link for link in Path(f"/proc/{shard.pid}/fd").iterdir() if "memfd:tgi-keys" in os.readlink(link)]
    with path.open("r+b", buffering=0) as memory:
        size = os.fstat(memory.fileno()).st_size
        assert size > 0
        for at in range(0, size, len(GARBAGE)):
            os.pwrite(memory.fileno(), GARBAGE, at)
    shard.send_signal(signal.SIGSEGV)
    shard.resume()


def thread_states(pid: int) -> list[str]:
    """The letter for each thread's state in /proc."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return [task.read_text().rpartition(") ")[2][0] for task in tasks]


def disturbed(server: ServerProcess, harm: Callable[[], object]) -> tuple[list[StreamAnswer], int, int]:
    """The texts while `harm` is done to the server, and how many losses and tokens computed again came of it."""
    names = ("tgi_shard_losses", "tgi_recomputed_tokens")
    before = [metric(server.url, name) for name in names]
    answers, _ = FEW.beside(server.url, harm)
    losses, tokens = (int(metric(server.url, name) - old) for name, old in zip(names, before, strict=True))
    return answers, losses, tokens


def assert_keys_outlive_a_kill_and_no_crash(server: ServerProcess, rank: int) -> list[StreamAnswer]:
    """Returns the answers without a loss."""
    if NEVER_KEPT in server.log():
        pytest.skip("the kernel makes no huge pages of shared memory")
    expected, losses, none = disturbed(server, lambda: None)
    assert losses == none == 0
    for harm, is_kept in ((kill, True), (scribble_and_crash, False)):
        # The process is looked for before the streams begin: to look at all of a busy machine takes as long as they do.
        answers, losses, tokens = disturbed(server, partial(harm, processes.shards(server.pid)[rank]))
        failures = compare(expected, answers).failures()
        assert failures == [], (harm, losses, tokens, failures)
        assert losses == 1 and (tokens == 0) == is_kept, (harm, tokens)
    assert_books_are_right(server)
    return expected


def assert_keys_outlive_a_killed_router(server: ServerProcess, expected: list[StreamAnswer]) -> None:
    """`expected`: the answers without a loss."""
    shards = [*processes.shards(server.pid).values()]
    FEW.beside(server.url, processes.router(server.pid).kill)
    wait_until(server.is_ready, 60, "another router")
    answers, _ = FEW.beside(server.url, lambda: None)
    assert compare(expected, answers).failures() == []
    if NOT_SETTLED not in server.log():
        assert [*processes.shards(server.pid).values()] == shards
        assert f" tokens of {len(answers)} requests of an engine before this one are cached" in server.log()
        assert metric(server.url, "tgi_prefilled_tokens") == len(answers), "the last token of each prompt"
    assert_books_are_right(server)


def assert_books_are_right(server: ServerProcess) -> None:
    assert server.log().count("the books of the token slots are wrong") == 0
    assert metric(server.url, "tgi_books_errors") == 0
