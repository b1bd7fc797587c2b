"""Each text of `call_texts.jsonl` gives its pieces, however it is divided into pushes."""

import random
import re
from collections.abc import Iterable, Sequence
from functools import cache

import pytest

from text_generation_router.text.calls.formats import CALL_FORMATS, REASONING_FORMATS
from text_generation_router.text.calls.found_calls import MAX_ARGUMENT_CHARS, MAX_CALLS, MAX_NAME_CHARS
from text_generation_router.text.calls.reading import Reading
from text_generation_router.text.calls.stepped_reader import SteppedReader
from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Piece, Reasoning, Text, merged

Part = tuple[str, bool]  # a text, and whether it ends with a special token

EVERY_TEXT = pytest.mark.parametrize("case", CALL_TEXTS, ids=lambda case: case.label)


@cache
def reading_of(calls: str, reasoning: str, special: frozenset[str]) -> Reading:
    return Reading(CALL_FORMATS[calls], REASONING_FORMATS[reasoning], special)


def reading(case: CallText, special: Iterable[str] = ()) -> Reading:
    return reading_of(case.format, case.reasoning_format, frozenset(special))


def markers(case: CallText) -> list[str]:
    """All texts of the formats that can be tokens."""
    texts = " ".join((*CALL_FORMATS[case.format].texts, *REASONING_FORMATS[case.reasoning_format].markers))
    return list(dict.fromkeys(re.findall(r"<[^\s<>]+>|\[/?[A-Z_]+\]", texts)))


def read(reader: SteppedReader, parts: Iterable[Part]) -> list[Piece]:
    pieces: list[Piece] = []
    for text, special in parts:
        pieces += reader.push(text, special)
    return list(merged([*pieces, *reader.finish()]))


def read_case(case: CallText, parts: Iterable[Part]) -> list[Piece]:
    return read(reading(case).reader(TOOLS, case.prompt), parts)


def all_of(pieces: Iterable[Piece], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def check(pieces: Sequence[Piece], case: CallText) -> None:
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    arguments = {piece.index: piece.text for piece in pieces if isinstance(piece, CallArguments)}
    assert [start.index for start in starts] == list(range(len(starts)))
    assert [(start.name, arguments.get(start.index, "")) for start in starts] == list(case.calls)
    assert all_of(pieces, Text) == case.content
    assert all_of(pieces, Reasoning) == case.reasoning
    assert [start.id for start in starts] == (list(case.ids) or [None] * len(starts))


@EVERY_TEXT
def test_a_text_gives_its_calls_answer_and_reasoning(case: CallText) -> None:
    check(read_case(case, [(case.text, False)]), case)


@EVERY_TEXT
def test_pieces_do_not_depend_on_pushes(case: CallText) -> None:
    whole = read_case(case, [(case.text, False)])
    assert read_case(case, ((character, False) for character in case.text)) == whole
    for at in range(len(case.text) + 1):
        assert read_case(case, [(case.text[:at], False), (case.text[at:], False)]) == whole
    noise = random.Random(case.label)
    for _ in range(20):
        cuts = sorted(noise.randrange(len(case.text) + 1) for _ in range(noise.randrange(1, 8)))
        parts = zip([0, *cuts], [*cuts, len(case.text)], strict=True)
        assert read_case(case, [(case.text[begin:end], False) for begin, end in parts]) == whole


@EVERY_TEXT
def test_markers_may_be_special_tokens(case: CallText) -> None:
    """The same pieces come of a tokenizer in which every marker is a special token. Spelled markers are text there."""
    if case.is_spelled:
        pytest.skip("has markers in strings")
    special = markers(case)
    pattern = "|".join(re.escape(marker) for marker in special)
    parts = [(part, part in special) for part in re.split(f"({pattern})", case.text)]
    pieces = read(reading(case, special).reader(TOOLS, case.prompt, keeps_special=True), parts)
    if not any(marker in case.content + case.reasoning for marker in special):
        assert pieces == read_case(case, [(case.text, False)])
    spelled = read(reading(case, special).reader(TOOLS), [(case.text, False)])
    starts = {*CALL_FORMATS[case.format].starts, *REASONING_FORMATS[case.reasoning_format].begins}
    if not CALL_FORMATS[case.format].is_bare and starts <= {*special}:
        assert spelled == [Text(case.text)]


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
def test_each_format_has_texts(name: str) -> None:
    assert len([case for case in CALL_TEXTS if case.format == name]) >= 6


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
@pytest.mark.parametrize("reasoning", sorted(REASONING_FORMATS))
def test_no_marker_begins_another(name: str, reasoning: str) -> None:
    every = {*CALL_FORMATS[name].markers, *REASONING_FORMATS[reasoning].markers}
    assert not [(a, b) for a in every for b in every if a != b and b.startswith(a)]


def test_what_is_certain_is_given_at_once() -> None:
    reader = Reading(CALL_FORMATS["hermes"], REASONING_FORMATS["think"]).reader(TOOLS)
    assert reader.push("Hello <") == (Text("Hello "),)
    assert reader.push("b>") == (Text("<b>"),)
    assert reader.push('<tool_call>{"name": "weather", "arguments": ') == ()
    assert reader.push('{"ci') == (CallStart(0, "weather"), CallArguments(0, '{"ci'))
    assert reader.push('ty"') == (CallArguments(0, 'ty"'),)


def test_special_tokens_that_are_not_markers() -> None:
    made = Reading(CALL_FORMATS["hermes"], None, frozenset({"<|im_end|>", "<tool_call>"}))
    assert made.needs_special_tokens
    assert read(made.reader(TOOLS), [("Hi<|im_end|>", True), ("<tool_call>", False)]) == [Text("Hi<tool_call>")]
    kept = made.reader(TOOLS, keeps_special=True)
    assert read(kept, [("Hi\N{REPLACEMENT CHARACTER}<|im_end|>", True)]) == [
        Text("Hi\N{REPLACEMENT CHARACTER}<|im_end|>")
    ]
    # A marker without a call is a special token as others are.
    assert read(made.reader(TOOLS), [("<tool_call>", True), ("5", False)]) == [Text("5")]
    assert read(made.reader(TOOLS, keeps_special=True), [("<tool_call>", True), ("5", False)]) == [Text("<tool_call>5")]
    assert not Reading(CALL_FORMATS["hermes"], None, frozenset({"<|im_end|>"})).needs_special_tokens


def test_a_special_token_ends_a_broken_string() -> None:
    made = Reading(CALL_FORMATS["hermes"], None, frozenset({"</tool_call>"}))
    parts = [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rome', False),
        ("</tool_call>", True),
        ("Ok", False),
    ]
    assert read(made.reader(TOOLS), parts) == [CallStart(0, "weather"), CallArguments(0, '{"city": "Rome'), Text("Ok")]


def test_without_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    made = Reading(CALL_FORMATS["hermes"], REASONING_FORMATS["think"])
    assert read(made.reader(None), [("<think>a</think>" + text, False)]) == [Reasoning("a"), Text(text)]


def test_calls_beyond_the_bound_are_text() -> None:
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    pieces = read(Reading(CALL_FORMATS["hermes"], None).reader(TOOLS), [(call * (MAX_CALLS + 2), False)])
    assert sum(isinstance(piece, CallStart) for piece in pieces) == MAX_CALLS
    assert pieces[-1] == Text(call * 2)


def test_arguments_beyond_the_bound_are_text() -> None:
    text = '<tool_call>{"name": "run.code", "arguments": {"code": "' + "x" * MAX_ARGUMENT_CHARS + '"}}</tool_call>'
    for size in (1000, 4096, len(text)):
        parts = [(text[at : at + size], False) for at in range(0, len(text), size)]
        pieces = read(Reading(CALL_FORMATS["hermes"], None).reader(TOOLS), parts)
        assert all_of(pieces, Text) == "x" * len('{"code": "') + '"}}</tool_call>'
        assert isinstance(pieces[1], CallArguments) and len(pieces[1].text) == MAX_ARGUMENT_CHARS


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("qwen3-coder", "<tool_call><function="),
        ("deepseek-v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        ("olmo3", "<function_calls>"),
    ],
)
def test_longer_names_than_the_bound_are_text(name: str, begin: str) -> None:
    text = begin + "n" * (MAX_NAME_CHARS + 1) + "<tool_call>"
    made = Reading(CALL_FORMATS[name], None)
    for size in (1, 7, 100, len(text)):
        pushes = [(text[at : at + size], False) for at in range(0, len(text), size)]
        assert read(made.reader(TOOLS), pushes) == [Text(text)]


def test_halves_of_surrogate_pairs_are_not_special_tokens() -> None:
    made = Reading(CALL_FORMATS["hermes"], None, frozenset({"<tool_call>"}))
    text = '{"name": "clock", "arguments": {}}'
    assert read(made.reader(TOOLS), [("\ud800" + text, False)]) == [Text("\N{REPLACEMENT CHARACTER}" + text)]


def test_a_value_beyond_the_bound_that_is_not_a_string_is_text() -> None:
    text = "<tool_call><function=weather><parameter=days>" + "1" * (MAX_ARGUMENT_CHARS + 100) + "</parameter>"
    for size in (1000, 4096, len(text)):
        parts = [(text[at : at + size], False) for at in range(0, len(text), size)]
        pieces = read(Reading(CALL_FORMATS["qwen3-coder"], None).reader(TOOLS), parts)
        assert pieces[:2] == [CallStart(0, "weather"), CallArguments(0, '{"days": ')]
        assert pieces[2:] == [Text("1" * (MAX_ARGUMENT_CHARS + 100) + "</parameter>")]
