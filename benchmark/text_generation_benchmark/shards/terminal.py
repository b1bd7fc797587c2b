"""The live view: keys in, pictures out, while the benchmark runs and until the user has seen enough.

Drawing takes milliseconds in which this process hears no answer of a shard, so it happens between calls only.
"""

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.layout import Layout
from rich.live import Live

from text_generation_benchmark.shards.rounds import ShardBenchmark
from text_generation_benchmark.shards.statistics import Results, Round
from text_generation_benchmark.shards.view import picture

KEY = re.compile(rb"\x1b[\[O][A-Z]|.", re.DOTALL)
MOVES = {b"\t": 1, b"\x1b[C": 1, b"\x1bOC": 1, b"\x1b[Z": -1, b"\x1b[D": -1, b"\x1bOD": -1}
QUIT = (b"q", b"\x03", b"\x04")


class View:
    """`quit` is set once the user wants to leave; `draw` is called only while no shard is waited for."""

    def __init__(self, title: str, results: Results, draw: Callable[["View"], None]) -> None:
        self.quit = asyncio.Event()
        self.is_measuring = True
        self._title = title
        self._results = results
        self._draw = draw
        self._tab: int | None = None  # None: that of the batch size under way
        self._is_stale = True

    def picture(self) -> Layout:
        return picture(self._title, self._results, self.shown)

    @property
    def shown(self) -> int:
        """The batch size whose figures are on the screen."""
        return self._results.current if self._tab is None else self._results.batch_sizes[self._tab]

    def on_input(self, data: bytes) -> None:
        """Keys as the terminal sends them. No bytes: the terminal is gone."""
        keys = KEY.findall(data)
        if not keys or any(key in QUIT for key in keys):
            self.quit.set()
        sizes = self._results.batch_sizes
        for move in (MOVES[key] for key in keys if key in MOVES):
            self._tab = (sizes.index(self.shown) + move) % len(sizes)
        self.on_change()

    def on_change(self) -> None:
        self._is_stale = True
        if not self.is_measuring:
            self.refresh()

    def on_round(self, done: Round) -> None:
        self._results.add(done)
        self._is_stale = True

    def refresh(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self._draw(self)


async def watch(benchmark: ShardBenchmark, title: str, results: Results) -> None:
    """Returns when the user quits, be the benchmark at its end or not. Raises what `measure` raises."""
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        view = View(title, results, lambda view: live.update(view.picture(), refresh=True))
        with _terminal(view):
            await follow(benchmark, view)


async def follow(benchmark: ShardBenchmark, view: View) -> None:
    measuring = asyncio.create_task(benchmark.measure(view.on_round, view.refresh))
    quitting = asyncio.create_task(view.quit.wait())
    try:
        await asyncio.wait([measuring, quitting], return_when=asyncio.FIRST_COMPLETED)
        if measuring.done():
            measuring.result()
            view.is_measuring = False
            view.refresh()
            await quitting
    finally:
        measuring.cancel()
        quitting.cancel()
        await asyncio.gather(measuring, quitting, return_exceptions=True)


@contextmanager
def _terminal(view: View) -> Iterator[None]:
    """Keys come one by one and without an echo; signals that end the process end the view first."""
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, lambda: view.on_input(_read(keyboard)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, view.quit.set)
    loop.add_signal_handler(signal.SIGWINCH, view.on_change)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
            loop.remove_signal_handler(number)
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _read(keyboard: int) -> bytes:
    try:
        return os.read(keyboard, 64)
    except OSError:  # a terminal that was closed
        return b""
