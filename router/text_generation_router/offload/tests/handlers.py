"""Handlers that the tests' child processes run."""

import os
import signal
import time
from collections.abc import Mapping

from text_generation_router.offload.child import Handler


def make(setup: bytes) -> Mapping[str, Handler]:
    if setup == b"broken":
        raise ValueError("no such setup")
    kept: list[bytes] = []

    def keep(content: bytes) -> bytes:
        kept.append(b"x" * int(content))
        return b""

    return {
        "setup": lambda _: setup,
        "reverse": lambda content: content[::-1],
        "environ": lambda _: repr(dict(os.environ)).encode(),
        "pid": lambda _: str(os.getpid()).encode(),
        "sleep": _sleep,
        "hang": _hang,
        "fill": lambda content: bytes(int(content))[:0],
        "grow": lambda content: b"x" * int(content),
        "keep": keep,
        "abort": lambda _: _raise(signal.SIGABRT),
        "kill": lambda _: _raise(signal.SIGKILL),
        "die": lambda _: os._exit(3),
        "fail": _fail,
        "print": _print,
    }


def _raise(number: signal.Signals) -> bytes:
    os.kill(os.getpid(), number)
    return b""


def _sleep(content: bytes) -> bytes:
    time.sleep(float(content))
    return b""


def _hang(_: bytes) -> bytes:
    while True:
        pass


def _fail(content: bytes) -> bytes:
    raise KeyError(content.decode())


def _print(content: bytes) -> bytes:
    print(content)
    return content
