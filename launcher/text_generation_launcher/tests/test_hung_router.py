"""A router that is stopped or stuck is replaced. A router that was stopped briefly, or does not serve yet, is kept."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from text_generation_common.tests.slowness import MAX_TRIES, Seconds, assert_within
from text_generation_launcher.kept_process import STOPPED_S

# Most seconds from SIGSTOP to the next router, as the README promises.
REPLACED_S = 5.0

SEE_LOG = "hint: look at its last lines in the log above\n"


def routers(site) -> list[int]:
    return [entry["pid"] for entry in site.starts("router")]


def shards(site) -> list[int]:
    return [entry["pid"] for entry in site.starts("shard")]


def test_a_stopped_router_is_replaced_and_the_shards_are_kept(site):
    def replaced() -> Seconds:
        site.journal.unlink(missing_ok=True)
        launch = site.launch().ready()
        (first,) = routers(site)
        os.kill(first, signal.SIGSTOP)
        taken = Seconds.of(lambda: site.wait_for_start("router", 2))
        assert not site.is_alive(first)
        site.wait_until(
            lambda: site.heard() == [("ready", 1), ("ready", 1)], "the second router is not notified of the shards"
        )
        assert len(shards(site)) == 1 and site.is_alive(shards(site)[0])
        (line,) = [line for line in launch.stdout.splitlines() if "The webserver hangs" in line]
        assert "ERROR" in line and "its process has been stopped for" in line
        assert "Webserver was ended by signal 9" in launch.stdout
        assert launch.end(signal.SIGTERM) == 0
        return taken

    assert_within(replaced, clock=REPLACED_S)


def test_a_router_that_answers_no_ping_is_replaced(site):
    launch = site.launch(FAKE_ROUTER="START=1 deaf").ready()
    site.wait_for_start("router", 2)
    assert "The webserver hangs (its event loop has not answered for 8." in launch.stdout


def assert_goes_on(site, harm: Callable[[int, int], float]) -> None:
    """A router goes on after `harm`, which gets the process ids of the launcher and of the router, and returns for how
    many seconds the launcher could see the router stopped. If it is STOPPED_S or more, because the tests' own process
    was late, all begins anew."""
    for _ in range(MAX_TRIES):
        launch = site.launch().ready()
        (router,) = routers(site)
        is_brief = harm(launch.process.pid, router) < STOPPED_S
        time.sleep(1.0)
        if is_brief:
            assert routers(site) == [router] and site.is_alive(router)
            assert "hangs" not in launch.stdout
            assert launch.end(signal.SIGTERM) == 0
            return
        launch.end(signal.SIGTERM)
        site.assert_no_children()
        site.journal.unlink()
    raise AssertionError("the tests' own process was late each time")


def continue_after(seconds: float, router: int) -> None:
    time.sleep(seconds)
    with suppress(ProcessLookupError):  # the router was stopped for too long
        os.kill(router, signal.SIGCONT)


def test_a_router_that_is_stopped_for_two_seconds_goes_on(site):
    def stop_twice(launcher: int, router: int) -> float:
        stopped_s = 0.0
        for _ in range(2):
            began_s = time.monotonic()
            os.kill(router, signal.SIGSTOP)
            continue_after(2.0, router)
            stopped_s = time.monotonic() - began_s
            if stopped_s >= STOPPED_S:
                break
            time.sleep(1.0)
        return stopped_s

    assert_goes_on(site, stop_twice)


def test_a_router_that_does_not_serve_yet_may_stand_still(site):
    launch = site.launch(FAKE_SHARD="loads_for_ever").wait_for("a plain line")
    (router,) = routers(site)
    os.kill(router, signal.SIGSTOP)
    time.sleep(REPLACED_S)
    assert routers(site) == [router] and psutil.Process(router).status() == psutil.STATUS_STOPPED
    launch.end(signal.SIGTERM)


def test_a_launcher_that_was_stopped_itself_does_not_blame_the_router(site):
    def stop_both(launcher: int, router: int) -> float:
        os.kill(launcher, signal.SIGSTOP)
        os.kill(router, signal.SIGSTOP)
        time.sleep(3.0)
        began_s = time.monotonic()
        os.kill(launcher, signal.SIGCONT)
        continue_after(0.5, router)
        return time.monotonic() - began_s

    assert_goes_on(site, stop_both)


@pytest.mark.parametrize(
    ("sent", "number", "told"),
    [(signal.SIGSTOP, 9, "The webserver hangs"), (signal.SIGSEGV, 11, "Webserver was ended by signal 11")],
)
def test_a_router_that_is_stopped_or_crashes_while_it_drains_ends_the_server_as_failed(site, sent, number, told):
    launch = site.launch(FAKE_ROUTER="drain").ready()
    launch.process.send_signal(signal.SIGTERM)
    site.wait_until(lambda: site.events("stop") != [], "the router has not got the signal")
    os.kill(routers(site)[0], sent)
    assert launch.end() == 1
    assert launch.stderr == f"error: the webserver was ended by signal {number}\n{SEE_LOG}"
    assert told in launch.stdout
    site.assert_no_children()
    assert site.left_behind() == []
