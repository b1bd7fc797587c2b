import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from text_generation_common.grammars import COMPILER_STACK_BYTES
from text_generation_router.errors import GrammarError, OverloadedError
from text_generation_router.offload.errors import JobFailedError, JobLostError, JobTimeoutError
from text_generation_router.scheduling.request import Share
from text_generation_router.text.grammars import checking, checking_child
from text_generation_router.text.grammars import checking as deaths
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, MadeGrammar
from text_generation_router.text.grammars.checking import DeadlyTexts, GrammarChecker, KeptGrammars, children_of
from text_generation_router.text.grammars.checking_child import NICENESS
from text_generation_router.text.grammars.forms import CallsForm, ChatForm, WantedGrammar
from text_generation_router.text.grammars.tests.evil_grammars import deadly, rule_chain
from text_generation_router.text.grammars.tests.random_grammars import draw

ASKED = AskedGrammar("regex", GrammarKind.REGEX, "a+")
DEMO = Path(__file__).parents[5] / "server/text_generation_server/demo_model"
CANNOT = "`regex`: the grammar cannot be compiled: "
KILLED, CRASHED, SPENT = (JobLostError(-number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGPROF))
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="limits of children are Linux's")


class Fakes:
    """Children that are not there. They count the jobs, may let them wait, and raise `failures` first."""

    def __init__(self, *failures: Exception, waits: bool = False) -> None:
        self.begun: list[str] = []
        self.failures = list(failures)
        self.may_end, self.are_ready = asyncio.Event(), asyncio.Event()
        self.are_ready.set()
        if not waits:
            self.may_end.set()

    async def run(self, name: str, content: bytes, timeout_s: float) -> bytes:
        wanted = WantedGrammar.of_json(content)
        text = wanted.asked.text if wanted.asked is not None else "calls"
        self.begun.append(text)
        await self.may_end.wait()
        if self.failures:
            raise self.failures.pop(0)
        return orjson.dumps(MadeGrammar("", "bad") if text == "bad" else MadeGrammar(f"checked {text}"))

    async def all_ready(self) -> None:
        await self.are_ready.wait()


async def turns() -> None:
    """Enough turns of the event loop for all that can be done without an answer of a child."""
    for _ in range(50):
        await asyncio.sleep(0)


def checking_with(fakes: Fakes) -> Callable[..., Awaitable[str]]:
    checker = GrammarChecker(fakes, max_waiting=3)

    async def grammar(owner: str = "", **changed: Any) -> str:
        return (await checker.grammar(WantedGrammar(replace(ASKED, **changed)), Share(owner=owner))).grammar

    return grammar


async def refusal(grammar: Callable[..., Awaitable[str]], **changed: Any) -> str:
    with pytest.raises(GrammarError) as refused:
        await grammar(**changed)
    assert refused.value.param == changed.get("field", ASKED.field)
    return refused.value.text.removeprefix("Input validation error: ")


async def test_equal_grammars_are_checked_once_also_at_the_same_time():
    fakes = Fakes()
    grammar = checking_with(fakes)
    first = await asyncio.gather(*(grammar() for n in range(9)))
    assert {*first, await grammar("other", field="guided_regex")} == {"checked a+"}
    assert fakes.begun == ["a+"]


async def test_a_tenant_does_not_wait_behind_anothers_for_the_same_grammar_and_is_charged_for_its_own():
    fakes = Fakes(waits=True)
    grammar = checking_with(fakes)
    crowd = [asyncio.ensure_future(grammar("crowd", text=f"crowd {n}")) for n in range(4)]
    await turns()
    other = asyncio.ensure_future(grammar("other", text="crowd 3"))
    await turns()
    assert fakes.begun == ["crowd 0", "crowd 3"]
    fakes.may_end.set()
    assert await other == "checked crowd 3"
    await asyncio.gather(*crowd)
    assert sorted(fakes.begun) == [f"crowd {n}" for n in range(4)]  # what is known then is not checked again


async def test_a_refusal_names_the_field_of_each_request():
    fakes = Fakes()
    grammar = checking_with(fakes)
    fields = ("regex", "structured_outputs.regex", "grammar")
    assert [await refusal(grammar, field=field, text="bad") for field in fields] == [
        "`regex`: bad",
        "`structured_outputs.regex`: bad",
        "grammar is not valid: bad",
    ]
    assert fakes.begun == ["bad"]


async def test_what_differs_is_checked_apart():
    calls = CallsForm("hermes", {"f": None}, [], is_required=True, several=True)
    others = [ASKED, replace(ASKED, text="b"), replace(ASKED, kind=GrammarKind.RULES)]
    wanted = [
        WantedGrammar(asked)
        for asked in (*others, replace(ASKED, needs_properties=True), replace(ASKED, is_loose=True))
    ]
    wanted += [WantedGrammar(None, ChatForm(None, calls, ids)) for ids in ({}, {"<tool_call>": 7})]
    fakes = Fakes()
    checker = GrammarChecker(fakes, 4)
    for each in wanted * 2:
        await checker.grammar(each, Share())
    assert len(fakes.begun) == len(wanted)


def test_what_is_wanted_reaches_a_child_as_it_is():
    schemas = {"b": {"type": "object"}, "a": None}
    calls = CallsForm("qwen3-coder", schemas, ["b"], is_required=False, several=True)
    wanted = WantedGrammar(replace(ASKED, field="", is_loose=True), ChatForm(None, calls, {"</tool_call>": 5}))
    assert WantedGrammar.of_json(wanted.to_json()) == wanted


async def test_a_text_that_is_not_unicode_or_too_deep_is_refused():
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    calls = CallsForm("hermes", {"f": deep}, [], is_required=True, several=True)
    checker = GrammarChecker(Fakes(), 4)
    for wanted in (WantedGrammar(replace(ASKED, text="\ud800")), WantedGrammar(None, ChatForm(None, calls, {}))):
        with pytest.raises(GrammarError, match=f"`{wanted.field}`: it is not valid Unicode, or has more than 64"):
            await checker.grammar(wanted, Share())


async def test_a_caller_that_leaves_does_not_end_the_check_of_another():
    fakes = Fakes(waits=True)
    grammar = checking_with(fakes)
    first, second = (asyncio.ensure_future(grammar()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    fakes.may_end.set()
    assert await second == "checked a+"


async def test_an_owner_has_one_child_and_a_tenant_few_places():
    fakes = Fakes(waits=True)
    grammar = checking_with(fakes)
    busy = [asyncio.ensure_future(grammar("crowd", text=f"crowd {n}")) for n in range(4)]
    await turns()
    with pytest.raises(OverloadedError):
        await grammar("crowd", text="one too many")
    other = asyncio.ensure_future(grammar("other", text="other"))
    await turns()
    assert fakes.begun == ["crowd 0", "other"]
    fakes.may_end.set()
    await asyncio.gather(*busy, other)


async def test_an_owner_whose_text_killed_a_child_has_no_other_one_before_there_is_a_new_one():
    fakes = Fakes(CRASHED)
    fakes.are_ready.clear()
    grammar = checking_with(fakes)
    deadly, next_one = (asyncio.ensure_future(grammar("a", text=text)) for text in ("deadly", "next"))
    await turns()
    assert await grammar("b", text="other") == "checked other"
    assert fakes.begun == ["deadly", "other"]
    fakes.are_ready.set()
    with pytest.raises(GrammarError):
        await deadly
    assert await next_one == "checked next"


@pytest.mark.parametrize(
    ("failure", "words"),
    [(CRASHED, "the process that compiles it fails"), (SPENT, "it takes more than 1 s: send a smaller one")],
    ids=["crashed", "spent"],
)
async def test_a_text_at_which_two_children_died_is_refused_at_once(failure, words):
    fakes = Fakes(failure, failure)
    grammar = checking_with(fakes)
    for _ in range(2):
        assert await refusal(grammar) == CANNOT + words
    refused = CANNOT + "it has ended two processes that compiled it"
    assert await refusal(grammar) == refused
    assert fakes.begun == ["a+"] * 2
    assert await grammar(text="b") == "checked b"


async def test_a_child_that_was_killed_is_not_the_texts_fault_but_the_text_is_tried_once_more_only():
    fakes = Fakes(KILLED, KILLED, KILLED, KILLED, KILLED)
    grammar = checking_with(fakes)
    for _ in range(2):
        assert await refusal(grammar) == CANNOT + "the process that compiles it fails"
    assert await grammar() == "checked a+"
    assert fakes.begun == ["a+"] * 6


async def test_other_failures_have_their_own_words_and_are_tried_anew():
    fakes = Fakes(JobFailedError("MemoryError"), JobFailedError("TypeError"), JobTimeoutError())
    grammar = checking_with(fakes)
    assert await refusal(grammar) == CANNOT + "it takes more than 128 MiB: send a smaller one"
    assert await refusal(grammar) == CANNOT + "the process that compiles it fails"
    with pytest.raises(OverloadedError):
        await grammar()
    assert await grammar() == "checked a+"


def test_deaths_are_forgotten_after_a_while_and_bounded_in_number(monkeypatch):
    monkeypatch.setattr(deaths, "MAX_TEXTS", 3)
    now = [0.0]
    texts = DeadlyTexts(lambda: now[0])
    for digest in (b"a", b"a", b"b"):
        texts.note(digest)
    assert texts.is_refused(b"a") and not texts.is_refused(b"b")
    now[0] = 599.0
    assert texts.is_refused(b"a")
    texts.note(b"b")
    now[0] = 601.0
    assert texts.is_refused(b"b") and not texts.is_refused(b"a")
    texts.note(b"a")
    assert not texts.is_refused(b"a")  # the earlier deaths are forgotten
    for digest in (b"c", b"d"):
        texts.note(digest)
    assert len(texts) == 3 and not texts.is_refused(b"b")


def test_kept_grammars_are_bounded_in_number_and_bytes(monkeypatch):
    monkeypatch.setattr(checking, "MAX_KEPT", 3)
    monkeypatch.setattr(checking, "MAX_KEPT_BYTES", 10)
    kept = KeptGrammars()
    for name in "abc":
        kept.keep(name.encode(), MadeGrammar("xx"))
    assert kept.get(b"a")  # which is now the last that was used
    kept.keep(b"d", MadeGrammar("xx"))
    assert [bool(kept.get(name)) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    kept.keep(b"e", MadeGrammar("x" * 9))
    assert [bool(kept.get(name)) for name in (b"a", b"c", b"d", b"e")] == [False, False, False, True]
    kept.keep(b"f", MadeGrammar("x" * 11))
    assert kept.get(b"f") is None and kept.get(b"e") is None


def test_a_panic_of_the_compiler_is_a_refusal(monkeypatch):
    class PanicError(BaseException):
        """As pyo3's PanicException, which is not an Exception."""

    def panic(*_: object) -> None:
        raise PanicError

    monkeypatch.setattr(checking_child, "verify", panic)
    made = checking_child.made(WantedGrammar(ASKED), checking_child.byte_tokenizer())
    assert made.refusal == "the grammar cannot be compiled: the compiler fails at it"


def with_children(test: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def run() -> None:
        children = children_of(DEMO, 2048, (0,))
        try:
            await test(GrammarChecker(children, 64))
        finally:
            await children.close()

    asyncio.run(run())


@linux_only
def test_a_grammar_that_kills_its_child_is_refused_and_costs_no_other_owner_anything():
    gbnf = "root ::= a0\n" + rule_chain(4500, "a{0} ::= a{1}", 'a{0} ::= "x"').partition("\n")[2]
    every = [*deadly(), AskedGrammar("f", GrammarKind.RULES, gbnf)]

    async def test(checker: GrammarChecker) -> None:
        async def others() -> list[str]:
            return [
                await checker.grammar(WantedGrammar(replace(ASKED, text=f"{n}")), Share("other")) for n in range(40)
            ]

        waiting = asyncio.create_task(others())
        for asked in every:
            with pytest.raises(GrammarError, match=r"cannot be compiled: (the process|it takes more than 1 s)"):
                await checker.grammar(WantedGrammar(asked), Share("attacker"))
        assert len(await waiting) == 40

    with_children(test)


@linux_only
def test_random_grammars_are_taken_or_refused(caplog):
    """`make fuzz-grammars` has more of them."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")

    async def test(checker: GrammarChecker) -> None:
        rng = random.Random(seed)
        ends: list[bool] = []
        for _ in range(300):
            try:
                await checker.grammar(draw(rng).wanted, Share())
            except GrammarError:
                ends.append(False)
            else:
                ends.append(True)
        assert {*ends} == {True, False}

    with_children(test)
    assert [record.message for record in caplog.records if "check raised" in record.message] == []


@linux_only
def test_a_child_stands_back_for_tokens_and_has_half_a_shards_stack():
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    expected = (f"Max stack size {COMPILER_STACK_BYTES // 2}", min(19, usual + NICENESS))

    def facts(pid: int) -> tuple[str, int]:
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        stack = next(line.split() for line in limits if line.startswith("Max stack size"))
        return " ".join(stack[:4]), os.getpriority(os.PRIO_PROCESS, pid)

    async def test(checker: GrammarChecker) -> None:
        await checker.grammar(WantedGrammar(ASKED), Share())
        children = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
        ours = [pid for pid in children if b"checking_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        async with asyncio.timeout(60):
            while not ours or {*map(facts, ours)} != {expected}:  # a child that still starts has them soon
                await asyncio.sleep(0.01)

    with_children(test)


IN_A_SHARDS_THREAD = """
import sys, threading
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking_child import check
threading.stack_size(int(sys.argv[1]))
thread = threading.Thread(target=check, args=(AskedGrammar("f", GrammarKind.RULES, sys.stdin.read()),))
thread.start()
thread.join()
"""


@linux_only
def test_a_shards_thread_has_stack_to_spare_for_every_chain_that_a_child_takes():
    """The grammar that one child refuses, because its stack is too small, compiles in the shard."""
    rules = rule_chain(4500, "a{0}: a{1}", 'a{0}: "x"')
    assert rules in [asked.text for asked in deadly()]
    program = (sys.executable, "-c", IN_A_SHARDS_THREAD, str(COMPILER_STACK_BYTES))
    subprocess.run(program, input=rules, text=True, check=True)
