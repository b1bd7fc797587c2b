"""The list of adapters that fronts share: when they have it, and when the front that asked for a change is answered."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.link import AdapterNote, LinkEvent, LinkMessage, read_adapters
from text_generation_launcher import adapter_list
from text_generation_launcher.adapter_list import AdapterList

X, Y = AdapterNote("x", "/a/x", "1" * 64), AdapterNote("y", "/a/y", "2" * 64)


class PretendedFront:
    """A front that takes each list at once, or never."""

    def __init__(self, title: str, file: Path, takes: bool = True) -> None:
        self.title, self.file, self.takes = title, file, takes
        self.listening = asyncio.Event()
        self.listening.set()
        self.adapters: AdapterList | None = None
        self.seen: list[list[str]] = []  # the names of each list
        self.answers: list[str] = []

    def send(self, message: LinkMessage) -> None:
        assert self.adapters is not None
        if message.event is LinkEvent.ADAPTER_SET:
            assert message.epoch == 7 + len(self.answers)
            self.answers.append(message.reason)
        elif self.takes:
            self.seen.append([note.name for note in read_adapters(message.address)])
            self.adapters.take(self, LinkMessage(LinkEvent.ADAPTERS_TAKEN, message.epoch))  # type: ignore[arg-type]

    async def ask(self, note: AdapterNote) -> str:
        assert self.adapters is not None
        count = len(self.answers)
        self.adapters.take(self, LinkMessage(LinkEvent.ADAPTER, 7 + count, adapter=note))  # type: ignore[arg-type]
        while len(self.answers) == count:
            await asyncio.sleep(0.001)
        return self.answers[-1]


def made(folder: Path, *fronts: PretendedFront, at_start: str | None = None) -> AdapterList:
    found: Any = list(fronts)
    adapters = AdapterList(str(folder / "list"), at_start, lambda: found)
    for front in fronts:
        front.adapters = adapters
    return adapters


def test_every_front_has_the_list_before_the_first_one_is_answered(tmp_path: Path) -> None:
    asyncio.run(change_thrice(tmp_path))


async def change_thrice(tmp_path: Path) -> None:
    one, other = (PretendedFront(name, tmp_path) for name in "ab")
    adapters = made(tmp_path, one, other, at_start=f"old=/a/old@{'0' * 64}")
    assert adapters.latest is None, "fronts have the list of the start"
    assert await one.ask(X) == ""
    assert await other.ask(Y) == ""
    assert await one.ask(AdapterNote("old")) == ""
    assert one.seen == other.seen == [["old", "x"], ["old", "x", "y"], ["x", "y"]]
    latest = adapters.latest
    assert latest is not None and (latest.epoch, read_adapters(latest.address)) == (3, (X, Y))
    again = AdapterNote("x", "/a/z", "3" * 64)
    assert await other.ask(again) == "" and read_adapters(latest.address) == (again, Y)


def test_a_front_that_does_not_take_the_list_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_list, "TAKE_S", 0.3)
    asyncio.run(change_beside_a_stuck_front(tmp_path))


async def change_beside_a_stuck_front(tmp_path: Path) -> None:
    one, other = PretendedFront("Webserver 0", tmp_path), PretendedFront("Webserver 1", tmp_path, takes=False)
    made(tmp_path, one, other)
    assert await one.ask(X) == ("the change is made, but Webserver 1 did not take it within 0.3 s: look at the log")
    other.listening.clear()  # the front has ended, and the next one reads the list when it starts
    assert await one.ask(Y) == ""


def test_a_list_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    asyncio.run(change_without_a_file(tmp_path))


async def change_without_a_file(tmp_path: Path) -> None:
    one = PretendedFront("Webserver", tmp_path)
    adapters = made(tmp_path / "gone", one)
    assert await one.ask(X) == "nothing has changed: the list of adapters cannot be written: No such file or directory"
    assert adapters.latest is None and one.seen == []
