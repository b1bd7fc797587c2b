"""A text that a limit cuts off, at any place, gives no beginning of a call and none of a marker as text."""

import random
import re
from collections.abc import Iterable, Sequence

import pytest

from text_generation_router.text.calls.formats import CALL_FORMATS, REASONING_FORMATS
from text_generation_router.text.calls.reading import Reading
from text_generation_router.text.calls.tests.call_texts import TOOLS, CallText
from text_generation_router.text.calls.tests.test_readers import EVERY_TEXT, Part, all_of, markers, reading
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Piece, Reasoning, Text, merged

MAX_CHARS = 2  # a longer beginning of a marker is not prose


def read_cut(made: Reading, case: CallText, parts: Iterable[Part]) -> Sequence[Piece]:
    reader = made.reader(TOOLS, case.prompt, keeps_special=True)
    pieces = [piece for text, special in parts for piece in reader.push(text, special)]
    return merged([*pieces, *reader.finish(is_cut=True)])


def openings(case: CallText) -> tuple[str, ...]:
    return (*CALL_FORMATS[case.format].starts, *REASONING_FORMATS[case.reasoning_format].begins)


def check_cut(pieces: Sequence[Piece], case: CallText, cut: str) -> None:
    """What is given is how the whole text's answer begins, but for a marker's first characters."""
    content, reasoning = all_of(pieces, Text), all_of(pieces, Reasoning)
    assert is_beginning(content, case.content), (cut, pieces)
    assert is_beginning(reasoning, case.reasoning), (cut, pieces)
    assert [piece.name for piece in pieces if isinstance(piece, CallStart)] == [
        name for name, _ in case.calls[: sum(isinstance(piece, CallStart) for piece in pieces)]
    ]
    for marker in openings(case):
        assert marker not in content or marker in case.content, (cut, content)
        for size in range(MAX_CHARS + 1, len(marker)):
            assert not content.endswith(marker[:size]) or content in case.content, (cut, content)


def is_beginning(given: str, whole: str) -> bool:
    """White space at the end belongs to a marker or to text, which only the text behind it says."""
    return any(whole.startswith(given[: len(given) - size].rstrip()) for size in range(MAX_CHARS + 1))


@EVERY_TEXT
def test_a_text_that_is_cut_anywhere_gives_no_beginning_of_a_call_or_a_marker(case: CallText) -> None:
    made, rng = reading(case), random.Random(case.label)
    for end in range(len(case.text)):
        cut = case.text[:end]
        pieces = read_cut(made, case, [(cut, False)])
        check_cut(pieces, case, cut)
        at = rng.randrange(end + 1)
        assert read_cut(made, case, [(cut[:at], False), *((char, False) for char in cut[at:])]) == pieces


@EVERY_TEXT
def test_so_does_a_text_with_special_tokens(case: CallText) -> None:
    special = [] if case.is_spelled else markers(case)
    made = reading(case, special)
    parts = re.split(f"({'|'.join(map(re.escape, special)) or '(?!)'})", case.text)
    for number, part in enumerate(parts):
        before = [(text, text in special) for text in parts[:number]]
        for end in (0, len(part)) if part in special else range(len(part)):
            cut = [*before, (part[:end], bool(end) and part in special)]
            check_cut(read_cut(made, case, cut), case, str(cut))


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("end", ["<", "[", "{", "a <", "[ {", "f(x[", "<b", '{"'])
def test_prose_loses_no_character(name: str, end: str) -> None:
    """Neither at the start of an answer nor behind a text or its reasoning."""
    made = Reading(CALL_FORMATS[name], REASONING_FORMATS["think"])
    for before in ("", "It is so: ", *(["<think>Hm.</think>So "] if name != "harmony" else [])):
        cut = read_cut(made, CallText(name, "", ""), [(before + end, False)])
        assert all_of(cut, Text) == (before + end).removeprefix("<think>Hm.</think>")


@pytest.mark.parametrize(("name", "text"), [("llama3", '{"name": "clo'), ("llama4", "[clo"), ("hermes", "<tool_call>")])
def test_a_text_that_ends_by_itself_and_looks_like_a_call_stays_text(name: str, text: str) -> None:
    made = Reading(CALL_FORMATS[name], None)
    assert read_cut(made, CallText(name, "", ""), [(text, False)]) == ()
    reader = made.reader(TOOLS)
    assert merged([*reader.push(text), *reader.finish()]) == (Text(text),)


@pytest.mark.parametrize(
    ("name", "text"), [("llama3", '{"name": "Rome'), ("llama3", '{"parameters": {"a": [1, 2]'), ("llama4", "[1, 2, c")]
)
def test_an_answer_in_json_that_is_cut_stays_text(name: str, text: str) -> None:
    assert read_cut(Reading(CALL_FORMATS[name], None), CallText(name, "", ""), [(text, False)]) == (Text(text),)


def test_a_call_that_has_begun_keeps_its_arguments() -> None:
    made = Reading(CALL_FORMATS["qwen3-coder"], None)
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1"
    cut = read_cut(made, CallText("qwen3-coder", "", ""), [(text, False)])
    assert cut == (CallStart(0, "weather"), CallArguments(0, '{"city": "Rome", "days": \n1'))
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nRome</param"
    cut = read_cut(made, CallText("qwen3-coder", "", ""), [(text, False)])
    assert cut == (CallStart(0, "weather"), CallArguments(0, '{"city": "Rome'))
