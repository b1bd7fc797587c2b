import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_common.tests.examples import examples
from text_generation_router.text.tokens.detokenization import TextStream, Vocabulary


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token for each byte (ids in the order of the byte-level alphabet), then an end token and two
    words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens(["stop.And", "more"])
    return tokenizer


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.token_to_id("</s>")
VOCABULARY = Vocabulary.of(TOKENIZER)
PROMPT = TOKENIZER.encode("Hi", add_special_tokens=False).ids


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def stream_text(ids: list[int], *stop: str) -> tuple[list[str], bool, TextStream]:
    stream = TextStream(VOCABULARY, PROMPT, stop)
    pieces = []
    for token_id in ids:
        shown, _, stopped = stream.push(token_id)
        pieces.append(shown)
        if stopped:
            return pieces, True, stream
    pieces.append(stream.flush())
    return pieces, False, stream


def test_a_character_is_given_out_with_its_last_byte() -> None:
    pieces, _, stream = stream_text(ids_of("é😀!"))
    assert pieces == ["", "é", "", "", "", "😀", "!", ""]
    assert stream.text() == "é😀!"


def test_held_back_bytes_are_flushed_at_the_end() -> None:
    pieces, _, stream = stream_text(ids_of("a😀")[:-1])
    assert "".join(pieces) == stream.text() == "a�"


@given(st.lists(st.integers(0, 255), max_size=40))
@examples(300)
def test_pieces_add_up_to_the_text_whatever_the_bytes(ids: list[int]) -> None:
    pieces, _, stream = stream_text(ids)
    assert "".join(pieces) == stream.text() == TOKENIZER.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=30))
@examples(200)
def test_real_text_never_shows_half_a_character(text: str) -> None:
    pieces, _, _ = stream_text(ids_of(text))
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


def test_special_tokens_show_in_tokens_but_not_in_the_text() -> None:
    pieces, _, stream = stream_text([*ids_of("ok"), EOS])
    assert "".join(pieces) == "ok</s>"
    assert stream.text() == "ok"


@pytest.mark.parametrize("stop", ["end", "d", "the end", "é"])
def test_a_stop_string_is_found_across_token_borders(stop: str) -> None:
    text = "not the end, yet é"
    pieces, stopped, stream = stream_text(ids_of(text), "absent", stop)
    assert stopped
    assert "".join(pieces) == stream.text() == text[: text.index(stop) + len(stop)]


def test_text_after_a_stop_string_inside_a_token_is_cut() -> None:
    pieces, stopped, stream = stream_text([*ids_of("We "), TOKENIZER.token_to_id("stop.And")], "stop.")
    assert stopped and pieces[-1] == "stop." and stream.text() == "We stop."


def test_the_stop_string_that_ends_first_wins() -> None:
    _, _, stream = stream_text([TOKENIZER.token_to_id("stop.And")], "And", "st")
    assert stream.text() == "st"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    _, stopped, _ = stream_text(ids_of("no"), "Hi")
    assert not stopped
