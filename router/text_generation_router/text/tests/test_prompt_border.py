"""The border between prompt and generated text, byte by byte, for every kind of tokenizer."""

import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.tests.examples import examples
from text_generation_router.text.tests.tokenizers_by_hand import HAND_MADE, HandMade
from text_generation_router.text.tokens.detokenization import Piece, TextStream, Vocabulary

VOCABULARIES = {made.name: Vocabulary.of(made.tokenizer) for made in HAND_MADE}
CHARACTERS = st.sampled_from([*"🦊🎉é�a \n", "the", " end", "</s>"])
TEXTS = st.lists(CHARACTERS, max_size=12).map("".join)


@cache
def is_begun(data: bytes) -> bool:
    """Whether `data` is the beginning of a UTF-8 character. Tries all continuation bytes that make a difference."""
    for length in range(1, 5 - len(data)):
        for rest in itertools.product((0x80, 0x90, 0xA0, 0xBF), repeat=length):
            try:
                if len((data + bytes(rest)).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                pass
    return False


def complete(data: bytes) -> bytes:
    """`data` without the bytes of an incomplete last character."""
    for length in (1, 2, 3):
        if len(data) >= length and is_begun(data[-length:]):
            return data[:-length]
    return data


def utf8(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def expected(made: HandMade, prompt: list[int], output: list[int]) -> tuple[str, str]:
    """The expected text (with special tokens, without special tokens). All bytes between two special tokens are decoded
    as one text."""
    last_special = max((at for at, i in enumerate(prompt) if i in made.special), default=-1)
    context = made.bytes_of_run(prompt[last_special + 1 :])
    shown, plain, run = "", "", b""
    for token_id in [*output, None]:
        if token_id is not None and token_id not in made.special:
            run += made.bytes_of[token_id]
            continue
        text = utf8(context + run)[len(utf8(complete(context))) :] if run else ""
        shown, plain = shown + text + made.special.get(token_id, ""), plain + text
        context, run = b"" if run or token_id is not None else context, b""
    return shown, plain


def follow(made: HandMade, prompt: list[int], output: list[int], *stop: str) -> tuple[list[Piece], TextStream]:
    """Pushes `output` into a stream until a stop string or the end of `output`. Returns the pieces and the stream."""
    stream, pieces = TextStream(VOCABULARIES[made.name], prompt, stop), []
    for token_id in output:
        pieces.append(stream.push(token_id))
        if pieces[-1].stopped:
            return pieces, stream
    text = stream.flush()
    return [*pieces, Piece(text, text, False)], stream


def ids(made: HandMade) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([*made.bytes_of, *made.special]), max_size=12)


@st.composite
def prompts(draw: st.DrawFn, made: HandMade) -> list[int]:
    """Draws prompts: tokens of a text, cut at both ends or shortened to the last one or two, or arbitrary tokens. At
    least one token is not special, because the first token of a text may lose its space, which another test covers."""
    tokens = draw(st.one_of(TEXTS.map(made.ids), ids(made)))
    kept = draw(st.sampled_from([None, 1, 2]))
    tokens = tokens[: draw(st.integers(0, len(tokens)))]
    tokens = tokens if kept is None else tokens[-kept:]
    if all(i in made.special for i in tokens):
        tokens = [*tokens, made.ids("the")[-1]]
    return tokens


@pytest.mark.parametrize("made", HAND_MADE, ids=lambda made: made.name)
@given(data=st.data())
@examples(300)
def test_pieces_and_text_are_what_the_bytes_say(made: HandMade, data: st.DataObject) -> None:
    prompt, output = data.draw(prompts(made)), data.draw(st.one_of(ids(made), TEXTS.map(made.ids)))
    pieces, stream = follow(made, prompt, output)
    shown, plain = expected(made, prompt, output)
    assert "".join(piece.shown for piece in pieces) == shown
    assert "".join(piece.plain for piece in pieces) == stream.text() == plain


@pytest.mark.parametrize("made", HAND_MADE, ids=lambda made: made.name)
@given(data=st.data())
@examples(100)
def test_a_character_comes_as_soon_as_it_is_complete(made: HandMade, data: st.DataObject) -> None:
    prompt, output = data.draw(prompts(made)), data.draw(ids(made))
    output = [i for i in output if i not in made.special]
    context = made.bytes_of_run([i for i in prompt if i not in made.special]) if prompt[-1] not in made.special else b""
    stream, so_far = TextStream(VOCABULARIES[made.name], prompt, ()), ""
    for count, token_id in enumerate(output, 1):
        so_far += stream.push(token_id).shown
        whole = complete(context + made.bytes_of_run(output[:count]))
        assert so_far == utf8(whole)[len(utf8(complete(context))) :]


@pytest.mark.parametrize("made", HAND_MADE, ids=lambda made: made.name)
@given(data=st.data())
@examples(200)
def test_stop_strings_match_generated_text_only(made: HandMade, data: st.DataObject) -> None:
    prompt, output = data.draw(prompts(made)), data.draw(ids(made))
    stop = data.draw(st.sampled_from(["the", "end", "�", "🦊", "e", "</s>", "🦊🦊", " "]))
    pieces, stream = follow(made, prompt, output, stop)
    shown, _ = expected(made, prompt, output)
    # The text of the bytes flushed at the end is not searched for stop strings.
    pushed = shown[: len(shown) - len(pieces[-1].shown)] if not pieces[-1].stopped else shown
    at = pushed.find(stop)
    assert (at >= 0) == pieces[-1].stopped
    assert "".join(piece.shown for piece in pieces) == (shown if at < 0 else shown[: at + len(stop)])
    assert "".join(piece.plain for piece in pieces) == stream.text()


@pytest.mark.parametrize("made", HAND_MADE, ids=lambda made: made.name)
@given(text=TEXTS, generated=TEXTS)
@examples(100)
def test_whole_texts_decode_as_in_the_tokenizers_library(made: HandMade, text: str, generated: str) -> None:
    """Whole texts are decoded as the tokenizers library decodes them, which takes prompt and output together."""
    prompt = [i for i in made.ids("a" + text) if i in made.bytes_of]
    output = [i for i in made.ids(generated) if i in made.bytes_of]
    pieces, _ = follow(made, prompt, output)
    joined = "".join(piece.shown for piece in pieces)
    assert made.tokenizer.decode(prompt) + joined == made.tokenizer.decode(prompt + output)


def test_the_end_of_the_prompt_is_not_streamed() -> None:
    byte_level, llama_2, *_ = HAND_MADE
    the = [byte_level.tokenizer.token_to_id("Ġthe")]
    for prompt in ("Fix this text: caf�", "�����", "🦊🦊"):
        pieces, stream = follow(byte_level, byte_level.ids(prompt), the)
        assert [piece.shown for piece in pieces] == [" the", ""] and stream.text() == " the"
    newline_the = [llama_2.tokenizer.token_to_id(token) for token in ("<0x0A>", "▁the")]
    for prompt in ("hi 🦊🦊", "I love it 🎉🎉"):
        pieces, stream = follow(llama_2, llama_2.ids(prompt), newline_the)
        assert [piece.shown for piece in pieces] == ["\n", " the", ""] and stream.text() == "\n the"


def test_a_stop_string_at_the_end_of_the_prompt_does_not_stop() -> None:
    byte_level = HAND_MADE[0]
    pieces, _ = follow(byte_level, byte_level.ids("the end�"), [byte_level.tokenizer.token_to_id("Ġthe")], "end")
    assert not any(piece.stopped for piece in pieces)


def test_a_character_that_the_prompt_begins_is_given_out_once_and_whole() -> None:
    for made in HAND_MADE:
        if made.name == "unigram":
            continue  # no token of this tokenizer holds part of a character
        fox = [i for i in made.ids("🦊") if made.bytes_of[i] != b" "]
        for cut in range(1, len(fox)):
            pieces, stream = follow(made, fox[:cut], fox[cut:])
            assert "".join(piece.shown for piece in pieces) == stream.text() == "🦊"


def test_the_first_word_of_a_text_without_a_prompt_loses_its_space() -> None:
    for made in HAND_MADE[1:]:
        begin, the = made.tokenizer.token_to_id("<s>"), made.tokenizer.token_to_id("▁the")
        pieces, stream = follow(made, [begin], [the, the])
        assert "".join(piece.shown for piece in pieces) == stream.text() == "the the"
        assert stream.text() == made.tokenizer.decode([begin, the, the])
