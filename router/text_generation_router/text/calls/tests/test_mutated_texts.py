"""Readers raise nothing, lose no text and do linear work, whatever a model writes."""

import random
import re
from collections.abc import Iterator

import pytest
from hypothesis import settings

from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.calls.stepped_reader import SteppedReader
from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText
from text_generation_router.text.calls.tests.test_readers import Part, markers, read, reading
from text_generation_router.text.tokens.pieces import CallStart, Piece

# No marker and no syntax has a Georgian letter, so each that goes in has to come out.
LETTERS = "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ"
# 1,000 in `make test`, 3,000 in `make test-slow`, 75,000 in `make fuzz`.
NUM_TEXTS = 25 * settings().max_examples


def mutated(case: CallText, noise: random.Random) -> str:
    """The text with letters put into it, and parts of it removed, doubled, moved, or taken from another text."""
    parts = re.findall(r"\w+|\s+|[^\w\s]+?", case.text)
    other = re.findall(r"\w+|\s+|[^\w\s]+?", noise.choice(CALL_TEXTS).text)
    for _ in range(noise.randrange(6)):
        at, end = sorted(noise.randrange(len(parts) + 1) for _ in range(2))
        match noise.randrange(5):
            case 0:
                del parts[at : min(end, at + 5)]
            case 1:
                parts[at:at] = parts[at : min(end, at + 20)]
            case 2:
                parts[at:at] = other[: noise.randrange(30)]
            case 3:
                parts.insert(at, noise.choice("{}[]\"'\\<>(),:=;\n\t 0-"))
            case 4:
                noise.shuffle(parts[at : at + 4])
    for _ in range(4):
        parts.insert(noise.randrange(len(parts) + 1), noise.choice(LETTERS))
    return "".join(parts)


def letters(text: str) -> list[str]:
    return sorted(character for character in text if character in LETTERS)


def written(piece: Piece) -> str:
    return piece.name + (piece.id or "") if isinstance(piece, CallStart) else piece.text


def all_written(pieces: list[Piece], reader: SteppedReader) -> str:
    """What came out. A counted id contains its call's name, which is not counted twice."""
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    twice = {start.name for start in starts if start.id and start.name in start.id}
    kept = (piece for piece in pieces if not (isinstance(piece, CallStart) and piece.name in twice and piece.id))
    ids = "".join(start.id or "" for start in starts if start.name in twice)
    return "".join(map(written, kept)) + ids + "".join(reader.left_out)


def parts_of(case: CallText, text: str, special: list[str]) -> list[Part]:
    """The text's parts, each with whether it is a special token."""
    if not special:
        return [(text, False)]
    return [(part, part in special) for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text)]


def in_small_pushes(parts: list[Part], noise: random.Random) -> Iterator[Part]:
    for text, special in parts:
        size = len(text) if special else noise.randrange(1, 12)
        for at in range(0, len(text), size or 1):
            yield text[at : at + size], special


def test_changed_texts_raise_nothing_and_lose_no_text() -> None:
    """Every second text has its markers as special tokens."""
    noise = random.Random(18)
    for number in range(NUM_TEXTS):
        case = noise.choice(CALL_TEXTS)
        text = mutated(case, noise)
        special = markers(case) if number % 2 else []
        parts = parts_of(case, text, special)
        made = reading(case, special)
        whole, divided = (made.reader(TOOLS, case.prompt, keeps_special=True) for _ in range(2))
        pieces = read(whole, parts)
        assert letters(all_written(pieces, whole)) == letters(text), (case.label, text, pieces)
        assert read(divided, in_small_pushes(parts, noise)) == pieces, (case.label, text)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_work_is_linear(name: str) -> None:
    """Texts that bring readers back to the same place again and again, given in single characters."""
    call = CALL_FORMATS[name]
    case = next(case for case in CALL_TEXTS if case.format == name and "two calls" in case.title)
    for text in (
        case.text,
        *call.starts,
        (call.starts or ("",))[0] + '{"name": "',
        "<",
        "<tool_call>{",
        "\n",
        "[[",
        "{{",
    ):
        long = text * 100
        one = reading(case).reader(TOOLS, case.prompt)
        for character in long:
            one.push(character)
        one.finish()
        assert one.work <= 64 * len(long), (text, one.work / len(long))


def test_work_on_one_long_value_is_linear() -> None:
    for case in CALL_TEXTS:
        if case.calls and "cut off in a string" in case.title:
            one = reading(case).reader(TOOLS, case.prompt)
            one.push(case.text)
            before = one.work
            for _ in range(20_000):
                one.push("x")
            assert one.work - before <= 3 * 20_000
