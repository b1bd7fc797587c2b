"""Sends hostile bodies, and cases generated from the OpenAPI document, to a server, and checks the answers."""

import re
import select
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from threading import Lock
from typing import Any

import hostile
import httpx
import processes
import schemathesis
from hostile import Body
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from server_process import ServerProcess

CELLS = "requests|answers|5xx, tracebacks, no answer|restarts"
CONCURRENCY = 16
ANSWER_S = 120.0
SEED = 7
TRACEBACK = re.compile(rb'Traceback \(most recent|File "[^"]+", line \d+')
# Bytes of the largest body that must be answered. The server may answer a larger body and close before the body was
# sent, which a client sees as a broken connection.
MUST_BE_ANSWERED = 64 * 1024


@dataclass(frozen=True, slots=True)
class Attacked:
    sent: int
    statuses: dict[int, int]
    cut_off: int  # large bodies whose connection was closed before the answer could be read
    findings: list[str]  # descriptions of wrong answers
    restarted: bool

    def cells(self) -> list[object]:
        statuses = ", ".join(f"{count} × {status}" for status, count in self.statuses.items())
        return [self.sent, statuses, len(self.findings), "yes" if self.restarted else "no"]

    def failures(self) -> list[str]:
        shown = [f"{len(self.findings)} bad answers, such as {self.findings[:3]}"] if self.findings else []
        return shown + (["the shard or the router is another process now"] if self.restarted else [])


class Findings:
    """Collects answers and the errors found in them."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._pids = processes.serving(server.pid)
        self._statuses: Counter[int] = Counter()
        self._cut_off = 0
        self._found: list[str] = []

    def answer(self, what: str, status: int, content: bytes) -> None:
        self._statuses[status] += 1
        # Status 504 is right if the generated `timeout` is too short for a token.
        if status >= 500 and b'"deadline"' not in content:
            self._found.append(f"{what}: {status} {content[:200]!r}")
        if TRACEBACK.search(content):
            self._found.append(f"{what}: a traceback in the body")

    def refusal(self, what: str, status: int, content: bytes) -> None:
        """Checks that a request was refused (in a stream: by an error event under status 200), and that the error does
        not quote its body."""
        if not (400 <= status < 500 or (status == 200 and content.startswith(b'data: {"error"'))):
            self._found.append(f"{what}: not refused, {status}")
        if hostile.CANARY.encode() in content:
            self._found.append(f"{what}: the refusal quotes the body")

    def wrong(self, what: str) -> None:
        self._found.append(what)

    def broken(self, what: str, size: int, error: OSError | HTTPException) -> None:
        if size > MUST_BE_ANSWERED and not isinstance(error, ConnectionRefusedError | TimeoutError):
            self._cut_off += 1
        else:
            self._found.append(f"{what}: no answer, {type(error).__name__}")

    def result(self) -> Attacked:
        sent = sum(self._statuses.values()) + self._cut_off
        restarted = processes.serving(self._server.pid) != self._pids or not self._server.is_ready()
        return Attacked(sent, dict(sorted(self._statuses.items())), self._cut_off, self._found, restarted)


@dataclass(frozen=True, slots=True)
class ThrownAnswer:
    status_code: int
    content: bytes


class ThrowingConnection:
    """Sends one body after the other. For thousands of bodies a client of httpx would take longer than the server."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)

    def close(self) -> None:
        self._connection.close()

    def post(self, route: str, body: Body) -> ThrownAnswer:
        """Raises OSError or HTTPException if no answer comes."""
        if self._connection.sock is not None and select.select([self._connection.sock], [], [], 0)[0]:
            self.close()  # as the server has done
        try:
            # The server may answer, and close, before it has read a large body.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._connection.request("POST", route, body.content, {"content-type": body.content_type})
            with self._connection.getresponse() as response:
                return ThrownAnswer(response.status, response.read())
        except BaseException:
            self.close()
            raise


def throw(
    server: ServerProcess, shots: Iterable[tuple[str, Body]], check: Callable[[Findings, str, str, Body, Any], None]
) -> Attacked:
    """Sends each body to its route, and has each answer checked: findings, what was sent, route, body, answer."""
    findings, shots, turn = Findings(server), iter(shots), Lock()

    def take() -> tuple[str, Body] | None:
        with turn:
            return next(shots, None)

    def send() -> None:
        with closing(ThrowingConnection(server.port)) as connection:
            while (shot := take()) is not None:
                route, body = shot
                what = f"{route}, {body.name}"
                try:
                    answer = connection.post(route, body)
                except (OSError, HTTPException) as error:
                    with turn:
                        findings.broken(what, len(body.content), error)
                else:
                    with turn:
                        findings.answer(what, answer.status_code, answer.content)
                        check(findings, what, route, body, answer)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for sender in [pool.submit(send) for _ in range(CONCURRENCY)]:
            sender.result()
    return findings.result()


def throw_bodies(server: ServerProcess, bodies: Iterable[Body], on_every_route: bool) -> Attacked:
    """Sends each body to POST routes: to all of them, or to one, the next one for each body."""
    routes = [path for path, methods in document(server)["paths"].items() if "post" in methods]
    made = enumerate(bodies)
    shots = ((r, body) for i, body in made for r in (routes if on_every_route else [routes[i % len(routes)]]))

    def check(findings: Findings, what: str, route: str, body: Body, answer: ThrownAnswer) -> None:
        if body.refused:
            findings.refusal(what, answer.status_code, answer.content)

    return throw(server, shots, check)


def fuzz(server: ServerProcess, examples: int) -> Attacked:
    """Sends `examples` cases of each operation of the OpenAPI document: half are valid by the document, half invalid.
    The cases are the same in every run."""
    findings = Findings(server)
    schema: Any = schemathesis.openapi.from_url(f"{server.url}/api-doc/openapi.json")
    for operation in schema.get_all_operations():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _fuzz(operation.ok(), mode, examples // 2, findings)
    return findings.result()


def _fuzz(operation: Any, mode: GenerationMode, examples: int, findings: Findings) -> None:
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(case=operation.as_strategy(mode))
    def send(case: Any) -> None:
        response = case.call(timeout=60)
        findings.answer(f"{operation.label} ({mode.value})", response.status_code, response.content)

    if mode == GenerationMode.POSITIVE or operation.body:  # a GET without parameters has no invalid case
        send()


def document(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/api-doc/openapi.json", timeout=30).raise_for_status().json()
