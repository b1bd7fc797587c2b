"""Events are decoded whole, wherever the bytes were cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from text_generation.sse import EventDecoder

TEXTS = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=5)


def decode(pieces: list[bytes]) -> list[str]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)] + decoder.end()


@given(
    texts=TEXTS,
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    field=st.sampled_from(["data: ", "data:"]),
    cuts=st.lists(st.integers(0, 200)),
)
def test_cuts_change_nothing(texts: list[str], line_end: str, field: str, cuts: list[int]) -> None:
    # Without the space after the colon, a text must not begin with a space, which would be dropped.
    texts = [f"x{text}" for text in texts]
    stream = "".join(f": alive{line_end}{line_end}{field}{text}{line_end}{line_end}" for text in texts).encode()
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(borders)]
    assert decode(pieces) == texts == decode([stream[i : i + 1] for i in range(len(stream))])


def test_comments_and_other_fields_make_no_event() -> None:
    assert decode([b":\n\n", b"event: x\nid: 3\nretry: 5\n\n", b":\n\ndata: a\n\n"]) == ["a"]


def test_lines_of_one_event_are_joined() -> None:
    assert decode([b"data: a\ndata: b\n\n"]) == ["a\nb"]


def test_only_one_space_after_the_colon_is_dropped() -> None:
    assert decode([b"data:  a\n\n"]) == [" a"]


def test_an_event_without_its_blank_line_counts_and_a_cut_line_does_not() -> None:
    assert decode([b"data: a\n"]) == ["a"]
    assert decode([b"data: a\n\ndata: b"]) == ["a"]
