import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from text_generation_router.errors import GrammarError, OverloadedError
from text_generation_router.scheduling.share import Share
from text_generation_router.text.grammars import checking
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking import NICENESS, Checked, GrammarChecker, KeptGrammars

ASKED = AskedGrammar("regex", GrammarKind.REGEX, "a+")


class Checks:
    """Counts the checks, and lets them wait."""

    def __init__(self, waits: bool = False) -> None:
        self.done: list[str] = []
        self.may_end = threading.Event()
        if not waits:
            self.may_end.set()

    def __call__(self, asked: AskedGrammar) -> Checked:
        self.may_end.wait(20)
        self.done.append(asked.text)
        return Checked("", "bad") if asked.text == "bad" else Checked(f"checked {asked.text}")


def test_equal_grammars_are_checked_once_also_at_the_same_time():
    checks = Checks()

    async def run():
        checker = GrammarChecker(4, checks)
        first = await asyncio.gather(*(checker.grammar(ASKED, Share(owner=f"{n}")) for n in range(9)))
        return {*first, await checker.grammar(replace(ASKED, field="guided_regex"), Share())}

    assert asyncio.run(run()) == {Checked("checked a+")}
    assert checks.done == ["a+"]


def test_a_refusal_names_the_field_of_each_request():
    checks = Checks()

    async def refusal(checker, field):
        with pytest.raises(GrammarError) as refused:
            await checker.grammar(replace(ASKED, field=field, text="bad"), Share())
        return refused.value.text, refused.value.param

    async def run():
        checker = GrammarChecker(4, checks)
        return [await refusal(checker, field) for field in ("regex", "structured_outputs.regex", "grammar")]

    assert asyncio.run(run()) == [
        ("Input validation error: `regex`: bad", "regex"),
        ("Input validation error: `structured_outputs.regex`: bad", "structured_outputs.regex"),
        ("Input validation error: grammar is not valid: bad", "grammar"),
    ]
    assert checks.done == ["bad"]


def test_what_differs_is_checked_apart():
    checks = Checks()
    others = [ASKED, replace(ASKED, text="b"), replace(ASKED, kind=GrammarKind.RULES)]
    others.append(replace(ASKED, needs_properties=True))

    async def run():
        checker = GrammarChecker(4, checks)
        for asked in others:
            await checker.grammar(asked, Share())

    asyncio.run(run())
    assert len(checks.done) == len(others)


def test_a_caller_that_leaves_does_not_end_the_check_of_another():
    checks = Checks(waits=True)

    async def run():
        checker = GrammarChecker(4, checks)
        first, second = (asyncio.ensure_future(checker.grammar(ASKED, Share())) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        checks.may_end.set()
        return await second

    assert asyncio.run(run()) == Checked("checked a+")


def test_a_check_that_takes_too_long_is_refused_and_tried_anew_later(monkeypatch):
    monkeypatch.setattr(checking, "CHECK_S", 0.01)
    checks = Checks(waits=True)

    async def run():
        checker = GrammarChecker(4, checks)
        with pytest.raises(GrammarError, match=r"`regex`: the regular expression takes more than 0\.01 s to check"):
            await checker.grammar(ASKED, Share())
        checks.may_end.set()
        monkeypatch.setattr(checking, "CHECK_S", 20.0)
        return await checker.grammar(ASKED, Share())

    assert asyncio.run(run()) == Checked("checked a+")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


def test_an_owner_has_one_thread_and_a_tenant_few_places():
    began, may_end = [], threading.Event()

    def check(asked: AskedGrammar) -> Checked:
        began.append((asked.text, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        may_end.wait(20)
        return Checked("x")

    async def run():
        checker = GrammarChecker(3, check)

        def ask(text, owner):
            return asyncio.ensure_future(checker.grammar(replace(ASKED, text=text), Share(owner=owner)))

        busy = [ask(f"crowd {n}", "crowd") for n in range(4)]
        await until(lambda: began)
        with pytest.raises(OverloadedError):
            await ask("one too many", "crowd")
        other = ask("other", "other")
        await until(lambda: len(began) > 1)
        may_end.set()
        await asyncio.gather(*busy, other)

    asyncio.run(run())
    assert [text for text, _ in began[:2]] == ["crowd 0", "other"] and len(began) == 5
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert {niceness for _, niceness in began} == {max(usual, NICENESS)}


def test_kept_grammars_are_bounded_in_number_and_bytes(monkeypatch):
    monkeypatch.setattr(checking, "MAX_KEPT", 3)
    monkeypatch.setattr(checking, "MAX_KEPT_BYTES", 10)
    kept = KeptGrammars()
    for name in "abc":
        kept.keep(name.encode(), Checked("xx"))
    assert kept.get(b"a")  # which is now the last that was used
    kept.keep(b"d", Checked("xx"))
    assert [bool(kept.get(name)) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    kept.keep(b"e", Checked("x" * 9))
    assert [bool(kept.get(name)) for name in (b"a", b"c", b"d", b"e")] == [False, False, False, True]
    kept.keep(b"f", Checked("x" * 11))
    assert kept.get(b"f") is None and kept.get(b"e") is None
