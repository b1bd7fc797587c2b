"""Faults of a server on one machine, each with what is done and what must hold: a function for each of them, which
starts a server, and a row of FAULTS. Several faults are done while many streams run, whose texts must be those of a run
without faults."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import logs
import processes
import psutil
from asks import Ask, asks
from calls import client_of, events_of, metric, metrics, tokenizer
from outcome import Outcome
from scale import MANY_SLOTS, Scale
from server_process import ServerProcess, wait_until
from streams import StreamAnswer, answers_beside, compare, run_streams, undisturbed_answers

from text_generation_benchmark.process import ChildServer
from text_generation_common.tests.slowness import Seconds, is_within, slowness

MIB = 2**20
UNREADY_LIMIT_S, FAR_APART_S = 6.0, 0.1
STARTED = "Starting epoch"  # a line of the launcher's log, for each group of shards after the first
# Number of the step in which the first exception is raised; all streams should run by then. The next exceptions come
# STEPS_BETWEEN_RAISES steps apart, so that the streams make tokens in between.
FIRST_RAISE, STEPS_BETWEEN_RAISES = 40, 8
REPLACED_LIMIT_S = 5.0
# A stuck event loop may recover by itself, so the launcher waits longer for it than for a stopped process. Seconds.
STUCK_LIMIT_S = 12.0
LOAD_PER_CORE = 4
GROWTH_LIMIT = 16 * MIB
GONE_LIMIT_S, LEFT_OVER_LIMIT_S = 1.0, 5.0
READERS, READERS_LIMIT_S = 64, 300.0
# Time that slots of stalled streams may be held beyond the write deadline. The last connections are full a little later
# than NEARLY_ALL bytes are buffered.
MARGIN_S, NEARLY_ALL = 10.0, 0.95
HELD = ("tgi_batch_current_size", "tgi_queue_size", "tgi_slots_used")
# A word whose token is in no other prompt and no text: its token triggers the injected death of what computes it.
POISON, NUM_NEIGHBOURS, MAX_DEATHS, POISON_LIMIT_S = "@", 32, 5, 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """What a fault is given. `expected`: the streams of a run without faults, with as many shards. `kept`: a server
    that runs already, for faults that leave it whole."""

    scale: Scale
    num_shard: int = 1
    seed: int = 1
    expected: Sequence[StreamAnswer] = ()
    kept: ServerProcess | None = None

    def server(self, *flags: str, failpoints: str = "") -> AbstractContextManager[ServerProcess]:
        if self.kept is not None:
            return nullcontext(self.kept)
        testing = ("--testing",) if failpoints else ()
        environ = {"FAILPOINTS": failpoints} if failpoints else None
        return self.scale.server(self.num_shard, *testing, *flags, environ=environ)


def stop_shard(run: Run) -> Outcome:
    slow = slowness()
    with run.server() as server:
        expected, before = run.expected or undisturbed_answers(server.url, run.scale.asks()), restarts(server)
        victim = processes.shards(server.pid)[random.Random(run.seed).randrange(run.num_shard)]
        started = server.log().count(STARTED)

        async def stop() -> float:
            if not server.is_ready():
                raise RuntimeError("the server is not ready before anything was done to it")
            victim.send_signal(signal.SIGSTOP)
            unready_s = await until_ready_says(server, 503, lambda: server.log().count(STARTED) > started)
            await until_ready_says(server, 200)
            return unready_s

        answers, unready_s = run.scale.beside(server.url, stop)
        count = restarts(server) - before
    wrong = {
        f"/ready answered 503 only after {unready_s:.1f} s": not is_within(unready_s, UNREADY_LIMIT_S, slow),
        f"{count} restarts for one stop": count != 1,
    }
    figures = {"`/ready` 503 after s": unready_s, "restarts": count}
    return Outcome(compare(expected, answers), figures, wrong)


def raise_rules(scale: Scale, num_shard: int) -> str:
    asked, first, apart = scale.exceptions[num_shard], min(FIRST_RAISE, scale.new_tokens // 3), STEPS_BETWEEN_RAISES
    if num_shard == 1:
        return f"shard.step[epoch=1]:raise@{','.join(str(first + i * apart) for i in range(asked))}"
    passes = [first, *[apart] * (asked - 1)]
    where = f"rank={num_shard - 1}"
    return ";".join(f"shard.step[epoch={epoch},{where}]:raise@{at}" for epoch, at in enumerate(passes, start=1))


def raise_in_steps(run: Run) -> Outcome:
    """Injects exceptions into forward steps. A single shard must survive all of them without a restart of its process.
    With several shards, each exception makes the server restart the shards, which begins a new epoch."""
    scale, asked = run.scale, run.scale.exceptions[run.num_shard]
    with run.server(failpoints=raise_rules(scale, run.num_shard)) as server:
        answers, _ = run_streams(server.url, scale.asks()[: scale.num_streams], scale.num_streams)
        raised = len([fault for fault in logs.injected(server.log()) if fault.action == "raise"])
        count = restarts(server)
    expected = 0 if run.num_shard == 1 else asked
    wrong = {
        f"{raised} exceptions of {asked}": raised != asked,
        f"{count} restarts instead of {expected}": count != expected,
    }
    comparison = compare(run.expected[: scale.num_streams], answers)
    return Outcome(comparison, {"exceptions": raised, "restarts": count}, wrong)


LASTING = {"inputs": "Once", "parameters": {"max_new_tokens": 1900, "ignore_eos_token": True}}


def terminate(run: Run) -> Outcome:
    """Sends SIGTERM to a server with default flags while all early streams run. The late streams are not requested."""
    scale = run.scale
    with run.server() as server:

        async def end() -> float:
            # A further stream: a server whose streams have all ended is gone before /ready is asked.
            async with client_of(server.url) as client, client.stream("POST", "/generate_stream", json=LASTING) as held:
                await anext(events_of(held))
                os.kill(server.pid, signal.SIGTERM)
                return await until_ready_says(server, 503)

        answers, unready_s = scale.beside(server.url, end, scale.num_streams * 8, early_only=True)
        status = server.stop()
    figures = {"exit status": status, "`/ready` 503 after s": unready_s}
    comparison = compare(run.expected[: scale.num_streams], answers)
    return Outcome(comparison, figures, {f"exit status {status}": status != 0})


async def until_ready_says(
    server: ServerProcess, wanted: int, is_past: Callable[[], bool] = lambda: False, limit_s: float = 60
) -> float:
    """Seconds until /ready answers 503 or 200. Until then it must answer the other. `is_past`: whether it may have
    answered so between two looks that are far apart, as on a busy machine."""
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        started_s = heard_s = time.monotonic()
        while heard_s - started_s < limit_s:
            try:
                status = (await client.get("/ready")).status_code
            except httpx.TransportError as error:
                raise RuntimeError(f"/ready is not answered: {type(error).__name__}") from error
            before_s, heard_s = heard_s, time.monotonic()
            if status == wanted or (heard_s - before_s > FAR_APART_S and is_past()):
                return heard_s - started_s
            if status not in (200, 503):
                raise RuntimeError(f"/ready says {status}")
            await asyncio.sleep(0.02)
    raise RuntimeError(f"/ready is not {wanted} within {limit_s} s")


def restarts(server: ChildServer) -> int:
    """Number of restarts of the shard group since the server started; -1 while there is no shard."""
    with suppress(psutil.NoSuchProcess):  # a shard has ended meanwhile
        return max(map(processes.epoch, processes.shards(server.pid).values()), default=0) - 1
    return -1


# A rule of FAILPOINTS: until a shard is killed, steps are so slow that a client on a busy machine sees texts half done.
SLOWER = "shard.decode[epoch=1]:delay=0.01@every 1"


def streams_though_a_shard_is_killed(
    server: ServerProcess, asked: Sequence[Ask], rank: int = 0, engine: ChildServer | None = None
) -> tuple[list[StreamAnswer], float]:
    """The answers to plain streams, of which none notices that a shard is killed when a quarter of their tokens are
    there, and when that was. `engine`: has the shards, if the server has none. SLOWER keeps the streams from ending
    before."""
    engine = engine or server
    shard = processes.shards(engine.pid)[rank]

    def kill() -> float:
        shard.kill()
        return time.time()

    expected, _ = run_streams(server.url, asked, len(asked))
    tokens = sum(ask.new_tokens for ask in asked) // 4
    answers, killed_s = answers_beside(server.url, asked, len(asked), tokens, kill)
    assert compare(expected, answers).failures() == []
    wait_until(lambda: restarts(engine) == 1, 60, "another shard")
    return answers, killed_s


def poison_rule(point: str = "shard.chunk") -> str:
    """A rule of FAILPOINTS: the process dies of the token of POISON."""
    (token,) = tokenizer().encode(POISON, add_special_tokens=False).ids
    return f"{point}[token={token}]:kill@every 1"


def poison(run: Run, alone: int = 2) -> Outcome:
    """A request that kills a shard each time its prompt is computed: among others, then `alone` more, each as the only
    request on the server."""
    with run.server(failpoints=poison_rule()) as server:
        outcome = poison_beside(server.url, lambda: [server.log()], run, alone, named="3 times on nothing else")
    deaths = outcome.figures["deaths of each request"]
    return replace(outcome, wrong={**outcome.wrong, f"{deaths} deaths by requests": max(deaths) > MAX_DEATHS})


def poison_beside(
    url: str,
    read_logs: Callable[[], list[str]],
    run: Run,
    alone: int = 0,
    named: str = "on nothing else",
    times: int = 1,
) -> Outcome:
    """Poisoned requests, the first `times` of them among NUM_NEIGHBOURS others each, at replicas that were started with
    `poison_rule`. Each must end with an error that names the cause, and no two replicas may be down at a time."""
    (token,) = tokenizer().encode(POISON, add_special_tokens=False).ids
    expected = run.expected[:NUM_NEIGHBOURS]
    if any(token in answer.ids for answer in expected):
        raise RuntimeError(f"a neighbour's text has {POISON!r}")
    errors: list[str] = []
    counts = [0]

    async def ask() -> None:
        async with client_of(url) as client:
            client.timeout = httpx.Timeout(POISON_LIMIT_S)
            body = {"inputs": f"Say {POISON}", "parameters": {"max_new_tokens": 4}}
            response = await client.post("/generate", json=body)
            errors.append(str(response.json().get("error", f"{response.status_code}, no error")))
        counts.append(sum(fault.action == "kill" for log in read_logs() for fault in logs.injected(log)))

    asked, answers = run.scale.asks()[:NUM_NEIGHBOURS], []
    for _ in range(times):
        answers += answers_beside(url, asked, NUM_NEIGHBOURS, NUM_NEIGHBOURS, ask)[0]
    for _ in range(alone):
        asyncio.run(ask())
    deaths = [after - before for before, after in pairwise(counts)]
    down = logs.max_at_once([span for log in read_logs() for span in logs.down(log)])
    return poisoned(deaths, down, errors, compare([*expected] * times, answers), named)


def poisoned(deaths: Sequence[int], down: int, errors: Sequence[str], comparison: Any, named: str) -> Outcome:
    wrong = {"a request killed nothing": 0 in deaths, f"{down} replicas down at a time": down > 1}
    wrong |= {f"a request ended with {error!r}": named not in error for error in errors}
    figures = {"deaths of each request": list(deaths), "most down at a time": down}
    return Outcome(comparison, figures, wrong)


def replace_stopped(run: Run) -> Outcome:
    """Sends SIGSTOP to a router that serves eight streams."""
    slow = slowness()
    with run.server() as server:
        old, shards = processes.router(server.pid), set(processes.shards(server.pid).values())
        with connections(server, 8, {"max_new_tokens": 400, "ignore_eos_token": True}):
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            old.send_signal(signal.SIGSTOP)
            stopped_s = time.time()
            wait_until(lambda: _has_other_router(server, old.pid), 60, "another router is started")
            replaced_s = time.time() - stopped_s
        return _replaced(server, shards, stopped_s, replaced_s, REPLACED_LIMIT_S, slow)


def replace_stuck(run: Run) -> Outcome:
    """Blocks the router's event loop by an injected fault, while the router serves eight streams."""
    slow = slowness()
    with run.server(failpoints="router.rpc:delay=600@40") as server:
        old, shards = processes.router(server.pid), set(processes.shards(server.pid).values())
        with connections(server, 8, {"max_new_tokens": 200, "ignore_eos_token": True}):
            wait_until(lambda: _has_other_router(server, old.pid), 60, "another router is started")
            replaced_at_s = time.time()
        wait_until(server.is_ready, 60, "the server is ready again")
        stuck_at_s = next(fault.at_s for fault in logs.injected(server.log()) if fault.point == "router.rpc")
        return _replaced(server, shards, stuck_at_s, replaced_at_s - stuck_at_s, STUCK_LIMIT_S, slow)


def _replaced(
    server: ServerProcess, shards: set[psutil.Process], since_s: float, replaced_s: float, limit_s: float, slow: Seconds
) -> Outcome:
    wait_until(server.is_ready, 60, "the server is ready again")
    figures = {"replaced after s": replaced_s, "serving again after s": time.time() - since_s}
    wrong = {
        f"replaced after {replaced_s:.1f} s, the limit is {limit_s} s": not is_within(replaced_s, limit_s, slow),
        "the shards were started again": shards != set(processes.shards(server.pid).values()),
    }
    return Outcome(None, figures, wrong)


def _has_other_router(server: ServerProcess, old: int) -> bool:
    try:
        return processes.router(server.pid).pid != old
    except LookupError:
        return False


def leave_alone(run: Run, victim: str, seconds: float) -> Outcome:
    """As `leave_server_alone`, with a server of its own."""
    with run.server() as server:
        return leave_server_alone(server, run, victim, seconds)


def leave_server_alone(server: ServerProcess, run: Run, victim: str, seconds: float) -> Outcome:
    """Harms the router, the launcher or the whole machine while all early streams run, which must not make the launcher
    replace the router."""
    router = processes.router(server.pid)

    async def harm() -> None:
        if victim == "machine":
            with busy_processes(LOAD_PER_CORE * (os.cpu_count() or 1)):
                await asyncio.sleep(seconds)
            return
        stopped = router if victim == "router" else psutil.Process(server.pid)
        stopped.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        stopped.send_signal(signal.SIGCONT)
        if victim == "launcher":
            await asyncio.sleep(5.0)  # time in which the launcher could replace the router by mistake

    comparison = run.scale.compared_beside(server.url, run.expected, harm)
    return Outcome(comparison, {}, {"the router was replaced": processes.router(server.pid) != router})


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def kill_router(run: Run) -> Outcome:
    with run.server() as server:
        old = processes.router(server.pid)
        theirs = [old, *old.children(recursive=True)]
        with connections(server, 8, {"max_new_tokens": 400, "ignore_eos_token": True}):
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            old.kill()
            back_s = wait_until(server.is_ready, 60, "the server is ready again")
        left_over = [str(process) for process in processes.living(theirs)]
        wait_until(lambda: held(server) == 0, 30, "the streams of the old router are forgotten")
    return _leaves({"serving again after s": back_s}, left_over)


def kill_launcher(run: Run) -> Outcome:
    memory_before = processes.shared_memory()
    with run.server() as server:
        sockets = Path(server.uds_path)
        theirs = processes.family(server.pid)
        with connections(server, 8, {"max_new_tokens": 400, "ignore_eos_token": True}):
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            os.kill(server.pid, signal.SIGKILL)
            started_s = time.monotonic()

            def left_over() -> list[str]:
                files = [path.name for path in sockets.parent.glob(f"{sockets.name}*")]
                memory = [f"/dev/shm/{name}" for name in processes.shared_memory() - memory_before]
                return [str(process) for process in processes.living(theirs)] + files + memory

            while left_over() and time.monotonic() - started_s < LEFT_OVER_LIMIT_S:
                time.sleep(0.05)
            return _leaves({"all gone after s": time.monotonic() - started_s}, left_over())


def _leaves(figures: dict[str, Any], left_over: Sequence[str]) -> Outcome:
    return Outcome(None, figures | {"left over": left_over}, {f"left over: {name}": True for name in left_over})


def stalling(scale: Scale) -> tuple[str, ...]:
    """Flags for streams with large events, so that the buffers are full before the texts end."""
    timeout = ("--stream-write-timeout", str(scale.write_timeout_s))
    return (*timeout, "--max-top-n-tokens", "20", "--max-total-tokens", "2048")


def never_read(run: Run) -> Outcome:
    timeout_s, slow = run.scale.write_timeout_s, slowness()
    with run.server(*stalling(run.scale), *MANY_SLOTS) as server:
        # Warm up: the memory of ordinary work does not count as growth.
        run_streams(server.url, asks(READERS, 8), READERS)
        router = processes.router(server.pid)
        before = processes.resident(router)
        parameters = {"max_new_tokens": 1900, "ignore_eos_token": True, "top_n_tokens": 20}
        samples: list[tuple[float, int, int]] = []  # seconds, bytes in all connections' buffers, the router's memory
        with connections(server, READERS, parameters, receive_buffer=4096):
            started_s = time.monotonic()
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            while held(server):
                samples.append((time.monotonic() - started_s, unsent_bytes(server.port), processes.resident(router)))
                if samples[-1][0] > READERS_LIMIT_S:
                    raise RuntimeError(f"clients that never read hold their slots after {READERS_LIMIT_S} s")
                time.sleep(0.05)
            end_s = time.monotonic() - started_s
    # After the buffers are full the kernel still compacts them for a while, so the last bytes do not count.
    most = max(unsent for _, unsent, _ in samples)
    full_s = next(at_s for at_s, unsent, _ in samples if unsent >= NEARLY_ALL * most)
    freed_s, growth = end_s - full_s, max(resident for _, _, resident in samples) - before
    figures = {"buffers full after s": full_s, "slots free after s": freed_s, "deadline s": timeout_s}
    is_late = not is_within(freed_s, timeout_s + MARGIN_S, slow)
    wrong = {
        f"slots were held for {freed_s:.1f} s, the deadline is {timeout_s} s": is_late,
        f"the router grew by {growth / MIB:.1f} MiB": growth >= GROWTH_LIMIT,
    }
    return Outcome(None, figures | {"router grew by MiB": growth / MIB}, wrong)


def all_leave_at_once(run: Run) -> Outcome:
    count, slow = run.scale.num_leaving, slowness()
    with run.server("--max-concurrent-requests", "512", *MANY_SLOTS) as server:
        with connections(server, count, {"max_new_tokens": 400, "ignore_eos_token": True}):
            running = "tgi_batch_current_size"
            wait_until(lambda: metric(server.url, running) == count, 120, "all streams are running")
        freed_s = wait_until(lambda: held(server) == 0, 60, "the slots are free")
    is_late = not is_within(freed_s, GONE_LIMIT_S, slow)
    wrong = {f"the slots of {count} clients were free {freed_s:.2f} s after they left": is_late}
    return Outcome(None, {"clients": count, "slots free after s": freed_s}, wrong)


@contextmanager
def connections(
    server: ServerProcess, count: int, parameters: dict[str, object], receive_buffer: int | None = None
) -> Iterator[None]:
    """Opens `count` clients that have each asked for a stream and read nothing. All close at the end of the context."""
    body = json.dumps({"inputs": "Once upon a time", "parameters": parameters}).encode()
    head = "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            if receive_buffer is not None:  # must be set before connecting, because TCP agrees on its window then
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            client.connect(("127.0.0.1", server.port))
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield


def held(server: ServerProcess) -> float:
    """Sum of running requests, waiting requests and held slots: 0 when the server is idle."""
    return sum(metrics(server.url, *HELD))


def unsent_bytes(port: int) -> int:
    """Bytes in the kernel's send buffers of all the server's connections on `port`. Linux only."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].split(":")[0], 16) for row in rows if int(row[1].split(":")[1], 16) == port)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    inject: Callable[[Run], Outcome]
    shards: tuple[int, ...] = (1,)  # numbers of shards with which `make chaos` injects it
    has_streams: bool = True  # whether it needs the streams of a run without faults


FAULTS = (
    Fault("a shard stopped (SIGSTOP)", stop_shard, (1, 2)),
    Fault("exceptions in steps", raise_in_steps, (1, 2)),
    Fault("SIGTERM, default flags", terminate),
    Fault("a request that kills its shards", poison),
    Fault("router stopped (SIGSTOP)", replace_stopped, has_streams=False),
    Fault("router's event loop stuck", replace_stuck, has_streams=False),
    Fault("router stopped for 2 s", partial(leave_alone, victim="router", seconds=2.0)),
    Fault("launcher stopped for 10 s", partial(leave_alone, victim="launcher", seconds=10.0)),
    Fault(f"{LOAD_PER_CORE} busy processes a core for 60 s", partial(leave_alone, victim="machine", seconds=60.0)),
    Fault("router killed", kill_router, (1, 2), has_streams=False),
    Fault("launcher killed", kill_launcher, (2,), has_streams=False),
    Fault("64 clients never read", never_read, has_streams=False),
    Fault("clients leave at once", all_leave_at_once, has_streams=False),
)
