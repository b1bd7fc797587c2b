"""The tokens of an answer's text among those of its reasoning, calls and markers."""

from text_generation_router.api.responses.routes import TextRows, rows_by_message
from text_generation_router.text.tokens.events import Token
from text_generation_router.text.tokens.pieces import CallStart, Reasoning, Text


def rows(*texts):
    return [(Token(i, text, -0.5, False), ()) for i, text in enumerate(texts)]


def ids(parts):
    return [[token.id for token, _ in part] for part in parts]


def test_tokens_whose_text_is_held_back_belong_to_the_text_that_they_become():
    pieces = [[Text("a")], [], [], [Text("<b>")], []]
    assert ids(rows_by_message(rows("a", "<", "b", ">", "</s>"), pieces)) == [[0, 1, 2, 3, 4]]
    assert ids(rows_by_message(rows("a", "<", "b"), [[Text("a")], [], [], [Text("<b")]])) == [[0, 1, 2]]


def test_tokens_of_markers_belong_to_no_text():
    pieces = [[Reasoning("x")], [], [], [Text("a")], [], [CallStart(0, "f")], [Text("b")]]
    assert ids(rows_by_message(rows("x", "</", "think>\n", "a", "<call", ">f", "b"), pieces)) == [[3], [6]]
    assert ids(rows_by_message(rows("x</think>a"), [[Reasoning("x"), Text("a")]])) == [[0]]


def test_a_character_has_all_tokens_of_its_bytes():
    pieces = [[Reasoning("x")], [], [], [Text("\u20ac")]]
    assert ids(rows_by_message(rows("x", "", "", "\u20ac"), pieces)) == [[1, 2, 3]]


def test_a_text_that_is_not_divided_has_all_tokens():
    found = TextRows(is_divided=False)
    first, second, third = rows("<s>", "ab", "")
    assert (found.add(first, []), found.add(second, [Text("ab")])) == ([], [first, second])
    assert (found.add(third, []), found.rest()) == ([], [third])
