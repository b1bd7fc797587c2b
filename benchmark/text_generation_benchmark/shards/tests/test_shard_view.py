"""The live view: what it shows, and what keys do to it."""

import asyncio
import io
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from text_generation_benchmark.shards.cli import has_view
from text_generation_benchmark.shards.statistics import Results, Round
from text_generation_benchmark.shards.terminal import View, follow
from text_generation_benchmark.shards.view import picture
from text_generation_router.errors import ShardsError


def some_results() -> Results:
    """Batch size 1 is done, 4 is half way, 16 has not begun."""
    results = Results((1, 4, 16), 2)
    for size, seconds in ((1, 0.01), (1, 0.02), (4, 0.03)):
        results.add(Round(size, False, 100, 4, seconds, 4 * seconds))
    return results


def text_of(results: Results, shown: int, width: int = 100, height: int = 32) -> str:
    console = Console(record=True, file=io.StringIO(), width=width, height=height)
    console.print(picture("Model: m | Sequence Length: 100 | Decode Length: 5", results, shown))
    return console.export_text()


class FakeBenchmark:
    """Plays one round for each call of `go_on`; fails where told."""

    def __init__(self, rounds: list[Round], error: Exception | None = None) -> None:
        self._rounds, self._error = rounds, error
        self.go_on = asyncio.Event()
        self.was_cancelled = False

    async def measure(self, on_round: Callable[[Round], None], between_calls: Callable[[], None]) -> None:
        try:
            for done in self._rounds:
                between_calls()
                await self.go_on.wait()
                on_round(done)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self._error:
            raise self._error


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_without_rich_has_no_view_and_learns_of_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not has_view()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert has_view() and not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich", None)
    assert not has_view()
    assert "install tgi-py[benchmark]" in capsys.readouterr().err


def test_the_picture_has_the_progress_and_the_figures_of_the_batch_size() -> None:
    text = text_of(some_results(), shown=1)
    for part in ("Model: m | Sequence Length: 100", "50%", "Batch Size 4", "p99", "20.00 ms", "80.00 ms", "7500.00"):
        assert part in text
    assert "10.00 – 11.25 ms" in text and "█" in text
    assert "30.00 ms" in text_of(some_results(), shown=4)
    assert "no round has been measured yet" in text_of(some_results(), shown=16)


def test_a_small_terminal_shows_what_fits() -> None:
    assert len(text_of(some_results(), shown=1, width=40, height=10).splitlines()) <= 11


def test_the_batch_size_under_way_is_shown_until_a_key_chooses_another() -> None:
    view = View("m", some_results(), draw=lambda view: None)
    assert view.shown == 4
    shown = []
    for key in (b"\x1b[C", b"\t", b"\x1bOD", b"\x1b[Z", b"x", b"\x1b[D\x1b[D"):
        view.on_input(key)
        shown.append(view.shown)
    assert shown == [16, 1, 16, 4, 4, 16] and not view.quit.is_set()


@pytest.mark.parametrize("key", [b"q", b"\x03", b""], ids=["q", "Ctrl-C", "no terminal"])
def test_a_key_ends_the_view(key: bytes) -> None:
    view = View("m", some_results(), draw=lambda view: None)
    view.on_input(key)
    assert view.quit.is_set()


def test_nothing_is_drawn_while_a_shard_is_waited_for() -> None:
    async def run() -> None:
        drawn: list[int] = []
        view = View("m", Results((1, 4), 1), draw=lambda view: drawn.append(view.shown))
        benchmark = FakeBenchmark([Round(1, False, 1, 1, 1, 1), Round(4, False, 1, 1, 1, 1)])
        following = asyncio.create_task(follow(benchmark, view))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert drawn == [1]
        view.on_input(b"\t")
        assert drawn == [1] and view.shown == 4
        benchmark.go_on.set()
        while view.is_measuring:
            await asyncio.sleep(0)
        assert drawn == [1, 4, 4]
        view.on_input(b"\t")
        assert drawn == [1, 4, 4, 1] and not following.done()
        view.on_input(b"q")
        await following

    asyncio.run(asyncio.wait_for(run(), 10))


def test_quitting_early_ends_the_measurement() -> None:
    async def run() -> None:
        view = View("m", Results((1,), 1), draw=lambda view: None)
        benchmark = FakeBenchmark([Round(1, False, 1, 1, 1, 1)])
        following = asyncio.create_task(follow(benchmark, view))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        view.on_input(b"q")
        await following
        assert benchmark.was_cancelled

    asyncio.run(asyncio.wait_for(run(), 10))


def test_an_error_ends_the_view_and_comes_out() -> None:
    async def run() -> None:
        view = View("m", Results((1,), 1), draw=lambda view: None)
        with pytest.raises(ShardsError, match="gone"):
            await follow(FakeBenchmark([], ShardsError("gone")), view)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(run(), 10))
