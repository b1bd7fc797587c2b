"""Keys and values after the death of a shard with --standby on: taken over, or computed again, by how it has died."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import processes
import psutil
import pytest
from calls import metric
from scale import SHORT
from server_process import ServerProcess
from streams import StreamAnswer, compare

FEW = replace(SHORT, num_streams=8, num_late=0, new_tokens=48)
GARBAGE = b"\x7f\x41" * 4096


def kill(shard: psutil.Process) -> None:
    shard.kill()


def scribble_and_crash(shard: psutil.Process) -> None:
    """Overwrites all keys and values, and has the shard end as after a wrong address, before it can read them."""
    shard.suspend()
    [path] = [link for link in Path(f"/proc/{shard.pid}/fd").iterdir() if "memfd:tgi-keys" in os.readlink(link)]
    with path.open("r+b", buffering=0) as memory:
        size = os.fstat(memory.fileno()).st_size
        assert size > 0
        for at in range(0, size, len(GARBAGE)):
            os.pwrite(memory.fileno(), GARBAGE, at)
    shard.send_signal(signal.SIGSEGV)
    shard.resume()


def disturbed(server: ServerProcess, harm: Callable[[], object]) -> tuple[list[StreamAnswer], int, int]:
    """The texts while `harm` is done to the server, and how many losses and tokens computed again came of it."""
    names = ("tgi_shard_losses", "tgi_recomputed_tokens")
    before = [metric(server.url, name) for name in names]
    answers, _ = FEW.beside(server.url, harm)
    losses, tokens = (int(metric(server.url, name) - old) for name, old in zip(names, before, strict=True))
    return answers, losses, tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_keys_outlive_a_killed_shard_and_not_one_that_wrote_anywhere(ranks: int) -> None:
    def shard() -> psutil.Process:
        return processes.shards(server.pid)[ranks - 1]

    with FEW.server(ranks, "--standby", "on") as server:
        expected, losses, none = disturbed(server, lambda: None)
        assert losses == none == 0
        for harm, is_kept in ((kill, True), (scribble_and_crash, False)):
            answers, losses, tokens = disturbed(server, lambda: harm(shard()))  # noqa: B023
            assert compare(expected, answers).failures() == []
            assert losses == 1 and (tokens == 0) == is_kept, (harm, tokens)
        assert server.log().count("the books of the token slots are wrong") == 0
        assert metric(server.url, "tgi_books_errors") == 0
