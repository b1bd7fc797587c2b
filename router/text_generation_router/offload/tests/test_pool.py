import ast
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from text_generation_common.logs import id_of, request_id
from text_generation_router.offload.child import KEPT_BYTES
from text_generation_router.offload.errors import BusyError, JobFailedError, JobLostError, JobTimeoutError
from text_generation_router.offload.pool import PoolLimits, ProcessPool
from text_generation_router.offload.process import END_SIGNALS, ChildProcess

HANDLERS = "text_generation_router.offload.tests.handlers:make"
LONG_S = 20.0
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")


def run(test: Callable[[ProcessPool], Awaitable[Any]], children: int = 1, waiting: int = 8, **limits: Any) -> Any:
    async def with_pool() -> Any:
        pool = ProcessPool(HANDLERS, b"the setup", PoolLimits(children, waiting, **{"wait_s": LONG_S} | limits))
        pool.start()
        try:
            async with asyncio.timeout(LONG_S):
                return await test(pool)
        finally:
            await pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(with_pool())


async def pid_of(pool: ProcessPool) -> int:
    return int(await pool.run("pid", b"", LONG_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def hanging(pool: ProcessPool) -> asyncio.Future[bytes]:
    """A job that a child has, and that does not end before the child."""
    job = asyncio.ensure_future(pool.run("hang", b"", LONG_S))
    await asyncio.sleep(0)
    await until(lambda: len(pool._waiting) == 0)
    return job


def is_gone(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def test_a_child_has_no_secret_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ("API_KEY", "ADMIN_API_KEY", "HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN", "BLOCK_HASH_KEY")
    hidden += ("AWS_SECRET_ACCESS_KEY", "NGROK_AUTHTOKEN", "db_password", "OTEL_EXPORTER_OTLP_HEADERS")
    kept = ("PYTHONPATH", "TOKENIZERS_PARALLELISM", "MAX_TOTAL_TOKENS", "LANG")
    for name in (*hidden, *kept[1:]):
        monkeypatch.setenv(name, f"value-of-{name}")

    async def test(pool: ProcessPool) -> None:
        environ = ast.literal_eval((await pool.run("environ", b"", LONG_S)).decode())
        assert not [name for name in hidden if name in environ]
        assert {name: environ.get(name) for name in kept} == {name: os.environ.get(name) for name in kept}

    run(test)


def test_each_job_gets_its_own_answer():
    async def test(pool: ProcessPool) -> None:
        contents = [bytes([number]) * number for number in range(8)] + [os.urandom(3_000_000)]
        answers = await asyncio.gather(*(pool.run("reverse", content, LONG_S) for content in contents))
        assert answers == [content[::-1] for content in contents]
        assert await pool.run("setup", b"", LONG_S) == b"the setup"

    run(test, children=2, waiting=16)


def test_what_a_handler_prints_is_not_taken_for_an_answer():
    async def test(pool: ProcessPool) -> None:
        assert await pool.run("print", b"aloud", LONG_S) == b"aloud"
        assert await pool.run("reverse", b"ab", LONG_S) == b"ba"

    run(test)


def test_a_job_that_never_ends_is_ended_and_the_next_one_is_done():
    async def test(pool: ProcessPool) -> None:
        before = await pid_of(pool)
        with pytest.raises(JobTimeoutError):
            await pool.run("hang", b"", 0.1)
        assert await pid_of(pool) != before
        assert is_gone(before)

    run(test)


@linux_only
def test_a_job_that_fills_memory_fails_alone():
    async def test(pool: ProcessPool) -> None:
        with pytest.raises(JobFailedError) as caught:
            await pool.run("fill", b"80000000", LONG_S)
        assert caught.value.reason == "MemoryError"
        assert await pool.run("fill", b"20000000", LONG_S) == b""

    run(test, memory_bytes=64 * 2**20)


@linux_only
def test_a_child_that_keeps_the_memory_of_its_jobs_is_replaced():
    async def test(pool: ProcessPool) -> None:
        before = await pid_of(pool)
        await pool.run("keep", b"1000", LONG_S)
        assert await pid_of(pool) == before
        await pool.run("keep", str(2 * KEPT_BYTES).encode(), LONG_S)
        assert await pid_of(pool) != before

    run(test)


def test_an_answer_that_is_too_large_is_an_error():
    async def test(pool: ProcessPool) -> None:
        with pytest.raises(JobLostError):
            await pool.run("grow", b"1001", LONG_S)
        assert len(await pool.run("grow", b"1000", LONG_S)) == 1000

    run(test, max_answer_bytes=1000)


def test_a_handler_that_raises_gives_the_class_and_not_the_text_of_its_error():
    async def test(pool: ProcessPool) -> None:
        before = await pid_of(pool)
        with pytest.raises(JobFailedError) as caught:
            await pool.run("fail", b"a secret", LONG_S)
        assert str(caught.value) == "KeyError"
        assert await pid_of(pool) == before

    run(test)


def test_a_child_that_dies_loses_its_job_and_no_other(caplog: pytest.LogCaptureFixture):
    async def test(pool: ProcessPool) -> None:
        request_id.set("mine-1")
        dying, living = pool.run("die", b"", LONG_S), pool.run("reverse", b"ab", LONG_S)
        lost, answer = await asyncio.gather(dying, living, return_exceptions=True)
        assert isinstance(lost, JobLostError) and answer == b"ba"
        assert [id_of(record) for record in caplog.records if "died" in record.message] == ["mine-1"]

    run(test)


@pytest.mark.parametrize(("job", "is_own_fault"), [("abort", True), ("kill", False)])
def test_a_lost_job_says_whose_fault_it_was_and_another_child_comes(job: str, is_own_fault: bool):
    async def test(pool: ProcessPool) -> None:
        with pytest.raises(JobLostError) as caught:
            await pool.run(job, b"", LONG_S)
        assert caught.value.is_own_fault == is_own_fault
        await pool.all_ready()
        assert await asyncio.gather(*(pool.run("reverse", b"ab", LONG_S) for _ in range(2))) == [b"ba"] * 2

    run(test, children=2)


def test_a_job_ends_at_its_limit_of_processor_time_and_not_of_waiting():
    async def test(pool: ProcessPool) -> None:
        assert await pool.run("sleep", b"0.5", LONG_S) == b""
        with pytest.raises(JobLostError) as caught:
            await pool.run("hang", b"", LONG_S)
        assert caught.value.status == -signal.SIGPROF

    run(test, cpu_s=0.2)


async def test_children_start_with_the_first_job():
    pool = ProcessPool(HANDLERS, b"the setup", PoolLimits(1, 8, wait_s=LONG_S))
    try:
        assert await pool.run("setup", b"", LONG_S) == b"the setup"
    finally:
        await pool.close()


def test_a_child_killed_while_it_rests_costs_no_job():
    async def test(pool: ProcessPool) -> None:
        pid = await pid_of(pool)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: is_gone(pid))
        assert await pid_of(pool) != pid

    run(test)


def test_signals_that_ask_the_router_to_stop_leave_its_children_at_work():
    async def test(pool: ProcessPool) -> None:
        pid = await pid_of(pool)
        for number in END_SIGNALS:
            os.kill(pid, number)
        assert await pid_of(pool) == pid

    async def test_a_child_that_starts(_: ProcessPool) -> None:
        for number in END_SIGNALS:
            child = await ChildProcess.start(HANDLERS, 2**28, LONG_S, 2**20)
            os.kill(child.pid, number)
            try:
                await child.set_up(b"the setup")
            finally:
                await child.end()

    run(test)
    run(test_a_child_that_starts)


def test_a_job_beyond_the_bound_is_refused_at_once():
    async def test(pool: ProcessPool) -> None:
        pid = await pid_of(pool)
        running = await hanging(pool)
        waiting = [asyncio.ensure_future(pool.run("sleep", b"0", LONG_S)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await pool.run("sleep", b"0", LONG_S)
        assert not running.done()
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*waiting) == [b""] * 2
        with pytest.raises(JobLostError):
            await running

    run(test, waiting=2)


def test_a_job_that_waited_too_long_is_refused():
    async def test(pool: ProcessPool) -> None:
        first = asyncio.ensure_future(pool.run("hang", b"", LONG_S))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await pool.run("pid", b"", LONG_S)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(test, wait_s=0.5)


def test_a_cancelled_job_gives_its_place_back():
    async def test(pool: ProcessPool) -> None:
        pid = await pid_of(pool)
        running = await hanging(pool)
        for _ in range(5):
            job = asyncio.ensure_future(pool.run("sleep", b"0", LONG_S))
            await asyncio.sleep(0)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
        last = asyncio.ensure_future(pool.run("reverse", b"ab", LONG_S))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await last == b"ba"
        with pytest.raises(JobLostError):
            await running

    run(test, waiting=1)


def test_closing_ends_the_children_and_all_jobs():
    async def test(pool: ProcessPool) -> None:
        pids = [await pid_of(pool)]
        jobs = [asyncio.ensure_future(pool.run("hang", b"", LONG_S)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await pool.close()
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(error, JobLostError) for error in errors)
        assert all(map(is_gone, pids))
        with pytest.raises(BusyError):
            await pool.run("pid", b"", LONG_S)

    run(test)


async def test_a_start_after_another_or_after_the_end_starts_no_child() -> None:
    pool = ProcessPool(HANDLERS, b"the setup", PoolLimits(2, 8))
    pool.start()
    pool.start()
    assert len(asyncio.all_tasks()) == 1 + 2
    await pool.close()
    pool.start()
    assert len(asyncio.all_tasks()) == 1


async def test_jobs_are_refused_while_no_child_can_start():
    pool = ProcessPool(HANDLERS, b"broken", PoolLimits(1, 8, wait_s=0.2))
    pool.start()
    try:
        with pytest.raises(BusyError):
            await pool.run("reverse", b"", LONG_S)
    finally:
        await pool.close()


PARENT = """
import asyncio, sys
from text_generation_router.offload.pool import ProcessPool, PoolLimits

async def main():
    pool = ProcessPool(sys.argv[1], b"", PoolLimits(1, 8))
    pool.start()
    print((await pool.run("pid", b"", 60)).decode(), flush=True)
    await pool.run("hang", b"", 60)

asyncio.run(main())
"""


@linux_only
def test_a_killed_router_leaves_no_child_not_even_a_hung_one():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, HANDLERS], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
    deadline = time.monotonic() + 10
    while not is_gone(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(child)
