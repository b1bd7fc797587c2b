"""The metrics of several processes on one page."""

import asyncio
import os
import stat
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from text_generation_router.metrics.joint import STALE_S, JointMetrics, joined_with_others, read_page
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.page import OwnFamilies, render_in_turns


class Worker:
    """A process with one metric of each kind."""

    def __init__(self, folder, name) -> None:
        registry = CollectorRegistry()
        self.requests = Counter("tgi_requests", "Requests", ["err"], registry=registry)
        self.running = Gauge("tgi_running", "Running", registry=registry)
        self.seconds = Histogram("tgi_seconds", "Seconds", buckets=(1, 2), registry=registry)
        self.info = Gauge("tgi_info", "Facts", ["model"], registry=registry)
        self.info.labels(model='a "b"').set(1)
        self.file = folder / f"shard-metrics-{name}"
        self.joint = JointMetrics(registry, self.file)

    def work(self, requests: int, running: int) -> None:
        self.requests.labels(err="none").inc(requests)
        self.running.set(running)
        self.seconds.observe(1.5)

    def grow_old(self) -> None:
        """Makes its file as old as that of a process that died long ago."""
        long_ago = time.time() - 2 * STALE_S
        os.utime(self.file, (long_ago, long_ago))


def render(source) -> str:
    return asyncio.run(render_in_turns(source))


def test_any_process_shows_the_sums_of_all(tmp_path):
    first, second = Worker(tmp_path, "front0"), Worker(tmp_path, "engine")
    first.work(3, 1)
    second.work(4, 2)
    asyncio.run(first.joint.write())
    page = render(second.joint)
    assert 'tgi_requests{err="none"} 7\n' in page
    assert "tgi_running 3\n" in page
    assert 'tgi_seconds_bucket{le="1"} 0\n' in page and 'tgi_seconds_bucket{le="2"} 2\n' in page
    assert "tgi_seconds_count 2\n" in page and "tgi_seconds_sum 3\n" in page
    assert 'tgi_info{model="a \\"b\\""} 1\n' in page
    assert render(first.joint) == page


def test_counters_of_a_dead_process_stay_and_its_gauges_go(tmp_path):
    dead, living = Worker(tmp_path, "front0"), Worker(tmp_path, "front1")
    dead.work(3, 5)
    living.work(1, 1)
    asyncio.run(dead.joint.write())
    dead.grow_old()
    page = render(living.joint)
    assert 'tgi_requests{err="none"} 4\n' in page and "tgi_running 1\n" in page


def test_the_next_process_of_a_name_goes_on_from_the_counts_of_the_last(tmp_path):
    dead = Worker(tmp_path, "front0")
    dead.work(3, 5)
    asyncio.run(dead.joint.write())
    later = Worker(tmp_path, "front0")
    later.work(2, 1)
    page = render(later.joint)
    assert 'tgi_requests{err="none"} 5\n' in page and "tgi_running 1\n" in page
    assert render(later.joint) == page


def test_files_are_private_and_files_of_others_are_left_out(tmp_path):
    worker = Worker(tmp_path, "front0")
    worker.work(3, 1)
    (tmp_path / "shard-metrics-broken").write_text("{")
    (tmp_path / "shard-metrics-other").write_text('[{"name": 1}]')
    (tmp_path / "shard-0").write_text("[]")
    assert 'tgi_requests{err="none"} 3\n' in render(worker.joint)
    assert stat.S_IMODE(worker.file.stat().st_mode) == 0o600


def test_a_server_s_own_page_is_the_same_through_a_file(tmp_path):
    metrics = Metrics()
    metrics.set_limits(10, 20)
    metrics.request_success.inc()
    metrics.time_between_tokens.observe(0.5)
    assert render(JointMetrics(metrics.registry, tmp_path / "shard-metrics-front0")) == render(
        OwnFamilies(metrics.registry)
    )


def test_other_tasks_run_between_the_families_that_are_written_and_shown(tmp_path):
    worker = Worker(tmp_path, "front0")

    async def turns_while(work) -> int:
        turns, task = 0, asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    families = 4
    assert asyncio.run(turns_while(worker.joint.write())) > families
    assert asyncio.run(turns_while(render_in_turns(worker.joint))) > 2 * families


async def test_the_last_values_are_written_at_the_end(tmp_path):
    metrics, file = Metrics(), tmp_path / "shard-metrics-front0"
    async with joined_with_others(metrics, str(file)):
        while not file.exists():
            await asyncio.sleep(0)
        metrics.request_success.inc()
    page = read_page(file)
    assert page is not None and sum(page["tgi_request_success"].samples.values()) == 1
