"""Clients that do not read or that leave, and a router or launcher that is killed: measures memory, slots and files
that each leaves behind.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import processes
from calls import metric, metrics
from scale import Scale
from server_process import ServerProcess, wait_until
from streams import asks, run_streams

MIB = 2**20
GROWTH_LIMIT = 16 * MIB
GONE_LIMIT_S = 1.0
LEFT_OVER_LIMIT_S = 5.0
READERS = 64
# Time that slots of stalled streams may be held beyond the write deadline. The last connections are full a little later
# than NEARLY_ALL bytes are buffered.
MARGIN_S = 10.0
READERS_LIMIT_S = 300.0
NEARLY_ALL = 0.95
HELD = ("tgi_batch_current_size", "tgi_queue_size", "tgi_slots_used")


@dataclass(frozen=True, slots=True)
class NeverRead:
    timeout_s: int
    full_s: float  # seconds from sending the requests until the connections' buffers were full
    freed_s: float  # seconds from full buffers until no slot was held
    growth: int  # bytes by which the router's memory grew

    def failures(self) -> list[str]:
        found = []
        if self.freed_s > self.timeout_s + MARGIN_S:
            found.append(f"slots were held for {self.freed_s:.1f} s, the deadline is {self.timeout_s} s")
        if self.growth >= GROWTH_LIMIT:
            found.append(f"the router grew by {self.growth / MIB:.1f} MiB")
        return found


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    unsent: int  # bytes in all connections' buffers
    resident: int  # the router's memory, bytes


@dataclass(frozen=True, slots=True)
class Gone:
    clients: int
    freed_s: float

    def failures(self) -> list[str]:
        late = self.freed_s > GONE_LIMIT_S
        return [f"the slots of {self.clients} clients were free {self.freed_s:.2f} s after they left"] if late else []


@dataclass(frozen=True, slots=True)
class RouterKilled:
    num_shard: int
    back_s: float
    left_over: Sequence[str]

    def failures(self) -> list[str]:
        return [f"left over by the router: {name}" for name in self.left_over]


@dataclass(frozen=True, slots=True)
class LauncherKilled:
    gone_s: float
    left_over: Sequence[str]

    def failures(self) -> list[str]:
        return [f"left over by the launcher: {name}" for name in self.left_over]


def never_read(scale: Scale) -> NeverRead:
    timeout_s = scale.write_timeout_s
    # Large events, so that the buffers are full before the texts end.
    flags = ("--stream-write-timeout", str(timeout_s), "--max-top-n-tokens", "20", "--max-total-tokens", "2048")
    with scale.server(1, *flags) as server:
        run_streams(
            server.url, asks(READERS, 8), READERS
        )  # warm up: the memory of ordinary work does not count as growth
        router = processes.router(server.pid)
        before = processes.resident(router)
        parameters = {"max_new_tokens": 1900, "ignore_eos_token": True, "top_n_tokens": 20}
        with connections(server, READERS, parameters, receive_buffer=4096):
            started_s = time.monotonic()
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            samples: list[Sample] = []
            while held(server):
                now_s = time.monotonic() - started_s
                samples.append(Sample(now_s, unsent_bytes(server.port), processes.resident(router)))
                if now_s > READERS_LIMIT_S:
                    raise RuntimeError(f"clients that never read hold their slots after {READERS_LIMIT_S} s")
                time.sleep(0.05)
            freed_s = time.monotonic() - started_s
    full_s = when_full(samples)
    return NeverRead(timeout_s, full_s, freed_s - full_s, max(sample.resident for sample in samples) - before)


def when_full(samples: Sequence[Sample]) -> float:
    """Time at which NEARLY_ALL of the largest number of unsent bytes was reached. After the buffers are full the kernel
    still compacts them for a while, so the last bytes do not count.
    """
    most = max(sample.unsent for sample in samples)
    return next(sample.at_s for sample in samples if sample.unsent >= NEARLY_ALL * most)


def all_leave_at_once(scale: Scale) -> Gone:
    with scale.server(1, "--max-concurrent-requests", "512") as server:
        parameters = {"max_new_tokens": 400, "ignore_eos_token": True}
        with connections(server, scale.num_leaving, parameters):
            wait_until(
                lambda: metric(server.url, "tgi_batch_current_size") == scale.num_leaving,
                120,
                "all streams are running",
            )
        return Gone(scale.num_leaving, wait_until(lambda: held(server) == 0, 60, "the slots are free"))


def kill_router(scale: Scale, num_shard: int) -> RouterKilled:
    with scale.server(num_shard) as server:
        old = processes.router(server.pid)
        theirs = [old, *old.children(recursive=True)]
        with connections(server, 8, {"max_new_tokens": 400, "ignore_eos_token": True}):
            wait_until(lambda: held(server) > 0, 30, "the streams begin")
            old.kill()
            back_s = wait_until(server.is_ready, 60, "the server is ready again")
        left_over = [str(process) for process in processes.living(theirs)]
        wait_until(lambda: held(server) == 0, 30, "the streams of the old router are forgotten")
        return RouterKilled(num_shard, back_s, left_over)


def kill_launcher(scale: Scale, num_shard: int) -> LauncherKilled:
    memory_before = processes.shared_memory()
    with scale.server(num_shard) as server:
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
            return LauncherKilled(time.monotonic() - started_s, left_over())


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
