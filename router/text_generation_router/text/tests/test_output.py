"""One request's output as text: its events and its finish."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from text_generation_common.sampling import Sampling
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.text.tokens.detokenization import Vocabulary
from text_generation_router.text.tokens.events import FinishReason, TokenEvent
from text_generation_router.text.tokens.output import TextOutput, TextRules

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
E_ACUTE = [ALPHABET.index(char) for char in "Ã©"]  # the two bytes of é, as byte-level tokenizers write them
A, B = ALPHABET.index("a"), ALPHABET.index("b")
EOS = len(ALPHABET)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Vocabulary.of(tokenizer)


def make_output(vocabulary: Vocabulary, *stop: str, **sampling: Any) -> TextOutput:
    return TextOutput(vocabulary, GenerationRequest((1, 2, 3), 9, Sampling(**sampling)), TextRules(stop))


def push(output: TextOutput, *token_ids: int, reason: FinishReason | None = None) -> list[TokenEvent]:
    """Pushes the tokens. `reason`: why the engine ends the request with the last token."""
    last = len(token_ids) - 1
    return [output.push(token_id, -1.0, (), reason if i == last else None, 7.0) for i, token_id in enumerate(token_ids)]


def test_the_last_event_of_an_expired_output_has_no_token_and_the_whole_text(vocabulary):
    output = make_output(vocabulary, do_sample=True, seed=5)
    output.begin(3.0, 2)
    first, second = push(output, A, B)
    last = output.end(FinishReason.DEADLINE, 12.0)
    assert first.token is not None and second.token is not None and last.token is None
    assert (first.finish, second.finish, last.top_tokens) == (None, None, ())
    assert last.finish is not None
    assert (last.finish.reason, last.finish.generated_text) == (FinishReason.DEADLINE, "ab")
    assert (last.finish.generated_tokens, last.finish.cached_tokens, last.finish.seed) == (2, 2, 5)
    assert (last.finish.queue_s, last.finish.inference_s) == (3.0, 12.0)


def test_half_a_character_that_was_held_back_is_not_lost(vocabulary):
    output = make_output(vocabulary)
    events = push(output, A, *E_ACUTE, E_ACUTE[0])
    last = output.end(FinishReason.DEADLINE, 1.0)
    assert "".join(event.token.text for event in events) == "aé"
    assert last.text == "\ufffd" and last.finish.generated_text == "aé\ufffd"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.DEADLINE])
def test_the_events_texts_add_up_to_the_text_at_every_end(vocabulary, reason):
    output = make_output(vocabulary)
    if reason is FinishReason.DEADLINE:
        events = [*push(output, A, *E_ACUTE, E_ACUTE[0]), output.end(FinishReason.DEADLINE, 1.0)]
    elif reason is FinishReason.EOS_TOKEN:
        events = push(output, A, *E_ACUTE, E_ACUTE[0], EOS, reason=reason)
    else:
        events = push(output, A, *E_ACUTE, E_ACUTE[0], reason=reason)
    finish = events[-1].finish
    assert finish is not None and finish.reason is reason
    assert "".join(event.text for event in events) == finish.generated_text == "aé\ufffd"


def test_a_special_token_that_ends_the_text_shows_what_was_held_back_and_itself(vocabulary):
    _, last = push(make_output(vocabulary), E_ACUTE[0], EOS, reason=FinishReason.EOS_TOKEN)
    assert (last.token.text, last.text, last.token.special) == ("\ufffd</s>", "\ufffd", True)


@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_a_stop_string_ends_the_text_and_gives_way_to_the_reason_of_the_engine(vocabulary, reason):
    output = make_output(vocabulary, "aa")
    first, last = push(output, A, A, reason=reason)
    assert first.finish is None and last.finish is not None
    assert last.finish.reason is (reason or FinishReason.STOP_SEQUENCE)
    assert (last.finish.generated_text, output.num_tokens, last.finish.seed) == ("aa", 2, None)


@pytest.mark.parametrize("least", [0, 1, 2, 3, 4, 5])
def test_no_stop_string_ends_the_text_within_the_least_number_of_tokens(vocabulary, least):
    """Among six tokens the second, third and sixth complete a stop string."""
    output = make_output(vocabulary, "aa", "ba", min_new_tokens=least)
    events = push(output, A, A, A, B, B, A)
    ended = [event.finish is not None for event in events].index(True)
    assert ended + 1 == min(end for end in (2, 3, 6) if end > least)
    finish = events[ended].finish
    assert finish.generated_text == "aaabba"[: ended + 1] and finish.reason is FinishReason.STOP_SEQUENCE


def test_a_stop_string_may_begin_within_the_least_number_of_tokens(vocabulary):
    first, last = push(make_output(vocabulary, "ab", min_new_tokens=1), A, B)
    assert first.finish is None and last.finish is not None and last.finish.generated_text == "ab"


def cutting(vocabulary: Vocabulary, *stop: str, skips_special: bool = True, least: int = 0) -> TextOutput:
    """An output without the stop string or end token that ends it."""
    request = GenerationRequest((1, 2, 3), 9, Sampling(min_new_tokens=least))
    return TextOutput(vocabulary, request, TextRules(stop, keeps_stop=False, skips_special=skips_special))


@pytest.mark.parametrize(("least", "text"), [(0, "b"), (2, "b"), (3, "ba"), (4, "baaa"), (6, "baaa")])
def test_a_stop_string_that_is_cut_off_ends_nothing_within_the_least_number_of_tokens(vocabulary, least, text):
    """Among seven tokens the third, fourth and last complete a stop string."""
    events = push(cutting(vocabulary, "aa", "bab", least=least), B, A, A, A, B, A, B)
    ended = [event.finish is not None for event in events].index(True)
    assert events[ended].finish.generated_text == "".join(event.text for event in events[: ended + 1]) == text


@pytest.mark.parametrize("stop", [(), ("ab!",)])
@pytest.mark.parametrize("skips_special", [True, False])
@pytest.mark.parametrize("end", [B, EOS])
def test_an_end_token_is_cut_off_as_a_stop_string_is(vocabulary, stop, skips_special, end):
    output = cutting(vocabulary, *stop, skips_special=skips_special)
    events = push(output, B, A, end, reason=FinishReason.EOS_TOKEN)
    finish = events[-1].finish
    assert finish.generated_text == "".join(event.text for event in events) == "ba"
    assert finish.generated_tokens == 3 and events[-1].token.id == end
    kept = TextOutput(vocabulary, GenerationRequest((1,), 9), TextRules(stop, skips_special=skips_special))
    text = push(kept, B, A, end, reason=FinishReason.EOS_TOKEN)[-1].finish.generated_text
    assert text == ("bab" if end == B else "ba" if skips_special else "ba</s>")


def test_top_tokens_have_their_texts(vocabulary):
    event = make_output(vocabulary).push(A, -1.0, [(A, -1.0), (EOS, -2.0)], None, 1.0)
    assert [(token.id, token.text, token.logprob, token.special) for token in event.top_tokens] == [
        (A, "a", -1.0, False),
        (EOS, "</s>", -2.0, True),
    ]


@pytest.mark.parametrize("is_text", [False, True])
def test_the_token_that_completes_a_grammar_is_not_cut_off(vocabulary, is_text):
    output = cutting(vocabulary, "zz")
    output.push(A, -1.0, (), None, 1.0)
    last = output.push(B, -1.0, (), FinishReason.EOS_TOKEN, 1.0, is_text)
    assert (last.finish.reason, last.finish.generated_text) == (FinishReason.EOS_TOKEN, "ab" if is_text else "a")


MARKER, OTHER = EOS + 1, EOS + 2


@pytest.fixture(scope="module")
def marked_vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("</s>", "<call>", "<other>")])
    return Vocabulary.of(tokenizer)


def divided(vocabulary: Vocabulary, *token_ids: int, stop: tuple[str, ...] = (), skips_special: bool = True):
    rules = TextRules(stop, keeps_stop=False, skips_special=skips_special, markers=frozenset({"<call>"}))
    output = TextOutput(vocabulary, GenerationRequest((1, 2, 3), 9), rules)
    events = push(output, *token_ids, reason=FinishReason.LENGTH)
    assert "".join(part.text for event in events for part in event.parts) == events[-1].finish.generated_text
    return [tuple(part) for event in events for part in event.parts]


def test_a_marker_is_a_part_of_its_own_and_other_special_tokens_are_skipped(marked_vocabulary):
    assert divided(marked_vocabulary, A, E_ACUTE[0], MARKER, OTHER, B) == [
        ("a", False),
        ("\ufffd", False),
        ("<call>", True),
        ("b", False),
    ]


def test_a_spelled_marker_is_not_special_and_all_special_tokens_can_be_kept(marked_vocabulary):
    spelled = [ALPHABET.index(char) for char in "<call>"]
    parts = divided(marked_vocabulary, *spelled, MARKER, OTHER, skips_special=False)
    assert parts == [*((char, False) for char in "<call>"), ("<call>", True), ("<other>", True)]


def test_a_marker_that_a_stop_string_held_back_is_still_special(marked_vocabulary):
    parts = divided(marked_vocabulary, A, MARKER, B, stop=("a<call>a",))
    assert parts == [("a", False), ("<call>", True), ("b", False)]
    assert divided(marked_vocabulary, B, A, MARKER, A, stop=("a<call>a",)) == [("b", False)]
