"""Measures how long large bodies block the router's event loop, and how much memory they take. To be run by hand:

    .venv/bin/python integration-tests/lag.py [--at-once 3] [--repeat 3] [--only WORD] [LAUNCHER ARGUMENTS]

Each body is sent to every route that reads it, while another process calls /live every 2 ms. Prints a line for each
body: the longest and the 99th percentile of /live's response times, the statuses of the answers, and the largest growth
of the memory of the router and its children."""

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections import Counter
from multiprocessing.synchronize import Event

import hostile
import httpx
from calls import client_of
from scale import SHORT
from server_process import ServerProcess
from victim import MIB, router_bytes

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
REST_S = 3.0


def watch_live(port: int, ready: Event, until: Event, answers: "multiprocessing.Queue[list[float]]") -> None:
    """Calls /live on one connection until `until` is set, and puts the seconds that each answer took into `answers`."""
    taken: list[float] = []
    request = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while not until.is_set():
            started = time.perf_counter()
            connection.sendall(request)
            while not connection.recv(4096).endswith(b"\r\n\r\n"):
                pass
            taken.append(time.perf_counter() - started)
            ready.set()
            time.sleep(0.002)
    answers.put(taken)


async def attack(server: ServerProcess, body: hostile.Body, at_once: int, repeat: int) -> tuple[Counter[str], int]:
    statuses: Counter[str] = Counter()
    peak = 0

    async def send(client: httpx.AsyncClient, route: str) -> None:
        for _ in range(repeat):
            try:
                answer = await client.post(route, content=body.content, headers={"content-type": body.content_type})
                statuses[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                statuses[type(error).__name__] += 1

    async with client_of(server.url) as client:
        sending = asyncio.gather(*(send(client, route) for route in ROUTES for _ in range(at_once)))
        while not sending.done():
            peak = max(peak, router_bytes(server))
            await asyncio.sleep(0.02)
        await sending
    return statuses, peak


def measure(server: ServerProcess, body: hostile.Body, at_once: int, repeat: int) -> str:
    before = router_bytes(server)
    ready, until, answers = multiprocessing.Event(), multiprocessing.Event(), multiprocessing.Queue()
    watcher = multiprocessing.Process(target=watch_live, args=(server.port, ready, until, answers))
    watcher.start()
    ready.wait()
    statuses, peak = asyncio.run(attack(server, body, at_once, repeat))
    time.sleep(0.5)
    until.set()
    taken = sorted(answers.get())
    watcher.join()
    time.sleep(REST_S)
    after = router_bytes(server)
    worst, p99 = 1000 * taken[-1], 1000 * taken[-1 - len(taken) // 100]
    outcome = " ".join(f"{count}x{status}" for status, count in sorted(statuses.items()))
    grown = f"{(peak - before) / MIB:+6.0f} MiB, {(after - before) / MIB:+4.0f} afterwards"
    return f"{worst:7.1f} ms worst {p99:7.1f} ms p99  {grown}  {outcome}  {body.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--at-once", type=int, default=1, help="copies of each body that are sent at a time, on each route"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="only bodies with this text in their names")
    options, arguments = parser.parse_known_args()
    nothing = hostile.Body("(nothing)", b"{}", True)
    with SHORT.server(1, *arguments) as server:
        for body in (nothing, *hostile.large_bodies()):
            if options.only in body.name or body is nothing:
                print(measure(server, body, options.at_once, options.repeat), flush=True)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
