"""What a grammar is told to demand is what the readers read, and what the grammar then lets the model write."""

import pytest

from text_generation_router.text.calls.formats import CALL_FORMATS, BodyKind
from text_generation_router.text.calls.reading import Reading
from text_generation_router.text.calls.written import WRITTEN_FORMS, Arguments, written_calls
from text_generation_router.text.grammars.combined import CallForm, Schema, tool_calls_grammar
from text_generation_router.text.grammars.tests.matching import matches
from text_generation_router.text.pieces import CallArguments, CallStart, merged

ARGUMENTS = {"weather": '{"city": "Rome"}', "clock": "{}"}


SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}


def text_of(parts: tuple[str | Arguments, ...]) -> str:
    return "".join(ARGUMENTS[part.tool] if isinstance(part, Arguments) else part for part in parts)


@pytest.mark.parametrize("name", WRITTEN_FORMS)
def test_written_calls_are_read_as_these_calls(name: str) -> None:
    written = written_calls(CALL_FORMATS[name], tuple(ARGUMENTS))
    assert written is not None
    calls = [text_of(call) for call in written.calls][: None if written.several else 1]
    text = "".join((*written.opening, text_of(written.separator).join(calls), *written.closing))
    reader = Reading(CALL_FORMATS[name], None).reader({tool: {} for tool in ARGUMENTS})
    pieces = merged([*reader.push(text), *reader.finish()])
    starts = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    assert starts == list(ARGUMENTS)[: len(calls)]
    assert [p.text for p in pieces if isinstance(p, CallArguments)] == [ARGUMENTS[name] for name in starts]
    assert len(pieces) == 2 * len(calls)  # and no text


@pytest.mark.parametrize("name", WRITTEN_FORMS)
def test_a_grammar_of_written_calls_demands_them(name: str) -> None:
    written = written_calls(CALL_FORMATS[name], tuple(ARGUMENTS))
    assert written is not None
    calls = [
        [Schema.of(dict(SCHEMAS[part.tool])) if isinstance(part, Arguments) else part for part in call]
        for call in written.calls
    ]
    form = CallForm(calls, written.opening, written.separator, written.closing)
    grammar = tool_calls_grammar(form, several=written.several)
    weather, clock = map(text_of, written.calls)
    opening, closing = "".join(written.opening), "".join(written.closing)
    assert matches(grammar, opening + weather + closing)
    assert matches(grammar, opening + weather + text_of(written.separator) + clock + closing) == written.several
    for wrong in (
        opening + closing,
        opening + clock.replace("{}", '{"a": 1}') + closing,
        opening + weather.replace("city", "town") + closing,
    ):
        assert not matches(grammar, wrong)


def test_markers_are_parts_of_their_own() -> None:
    for name, form in WRITTEN_FORMS.items():
        texts = [part for part in (*form.opening, *form.call, *form.closing) if isinstance(part, str)]
        known = [mark for mark in CALL_FORMATS[name].markers if len(mark) > 3]
        assert not [(text, mark) for text in texts for mark in known if mark in text and mark != text]


def test_formats_whose_arguments_are_not_json_cannot_be_demanded() -> None:
    others = {row.name for row in CALL_FORMATS.values() if written_calls(row, ["f"]) is None}
    kinds = {BodyKind.XML, BodyKind.PYTHONIC, BodyKind.PYTHONIC_LINES}
    assert others == {row.name for row in CALL_FORMATS.values() if row.body in kinds}
