"""Grammars that are meant to cost much take little time and memory to take or to refuse."""

import json
import subprocess
import sys

import pytest

from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_router.text.grammars.asked import MAX_BYTES, AskedGrammar, GrammarKind
from text_generation_router.text.grammars.tests import evil_grammars
from text_generation_router.text.grammars.tests.evil_grammars import grammars
from text_generation_router.text.grammars.tests.matching import check

# Seconds of work that fail the test: several times what the slowest grammar took where it was measured, 0.25 s.
MAX_S, MAX_MIB = 2.0, 64


def test_no_grammar_takes_long_or_much_memory():
    lines = []

    def take() -> Seconds:
        command = [sys.executable, "-m", evil_grammars.__name__]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        lines[:] = [json.loads(line) for line in told.stdout.splitlines()]
        print(slowest := max(lines, key=lambda line: line["seconds"]))
        return Seconds(0.0, slowest["seconds"])

    assert_within(take, cpu=MAX_S)
    assert len(lines) == len(list(grammars())) >= 50
    assert [line for line in lines if line["mib"] > MAX_MIB] == []
    assert {bool(line["refusal"]) for line in lines} == {True, False}


def test_the_grammars_are_no_larger_than_a_request_may_send():
    too_large = [asked.text[:60] for asked in grammars() if len(asked.text.encode()) > MAX_BYTES]
    assert too_large == []


@pytest.mark.parametrize(
    "rules",
    ['start: "a" start', 'start: x{1000000}\nx: "a"', "root ::= " + "|[a-z]" * 9000],
    ids=lambda text: text[:20],
)
def test_a_grammar_that_fails_at_its_first_byte_is_refused(rules):
    assert check(AskedGrammar("f", GrammarKind.RULES, rules)).refusal == "it is too large or complex"
