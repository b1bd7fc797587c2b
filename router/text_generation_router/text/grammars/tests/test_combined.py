"""Reasoning and calls of tools, followed with the demo model's tokenizer and three tokens more."""

import json
from itertools import product
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from text_generation_router.text.grammars.asked import GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.chat_forms import (
    CallForm,
    Marker,
    Schema,
    after_reasoning,
    tool_calls_grammar,
)
from text_generation_router.text.grammars.checking_child import LIMITS
from text_generation_router.text.grammars.forms import special_id
from text_generation_router.text.grammars.tests.matching import grammar_of

DEMO = Path(__file__).parents[5] / "server/text_generation_server/demo_model/tokenizer.json"
SPECIAL = ("<think>", "</think>", "[CALL]")
EOS = 0


def marker_of(text: str, tokenizer: Tokenizer) -> Marker:
    return Marker(text, special_id(text, tokenizer))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.add_tokens([AddedToken(text, special=False) for text in SPECIAL[:2]])  # as Qwen's are
    tokenizer.add_special_tokens([AddedToken(SPECIAL[2], special=True)])
    return tokenizer


@pytest.fixture(scope="module")
def follows(tokenizer):
    """Whether the model may write the text, and then end it. `whole`: markers in it are tokens, not spelled."""
    known = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=EOS)
    plain = Tokenizer.from_file(str(DEMO))

    def follow(grammar: str, text: str, whole: bool = True) -> bool:
        ids = (tokenizer if whole else plain).encode(text, add_special_tokens=False).ids
        matcher = LLMatcher(known, grammar, limits=LIMITS, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return follow


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANSWERS = {
    '{"a": 1}': grammar_of(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "yes/no": grammar_of(GrammarKind.REGEX, "yes/no"),
    "[1]": grammar_of(GrammarKind.RULES, 'start: "[" %json {"type": "integer"} "]"'),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("whole", [True, False], ids=["one token", "spelled"])
def test_the_grammar_holds_behind_the_reasoning(tokenizer, follows, answer, whole):
    markers = [marker_of(text, tokenizer) if whole else Marker(text) for text in ("<think>", "</think>")]
    assert all((marker.token_id is not None) == whole for marker in markers)
    start, end = markers
    inside = after_reasoning(ANSWERS[answer], end, opens_inside=True)
    outside = after_reasoning(ANSWERS[answer], end, opens_inside=False, start=start)
    for thoughts, gap in product(("", "Well, {\n", "a < b </thin", answer), ("", "\n\n", " ")):
        assert follows(inside, f"{thoughts}</think>{gap}{answer}", whole)
        assert follows(outside, f"<think>{thoughts}</think>{gap}{answer}", whole)
        assert not follows(inside, f"{thoughts}</think>{gap}{answer}x", whole)
        assert not follows(inside, f"{thoughts}</think>{gap}Well, {answer}", whole)
    assert follows(outside, answer, whole) and not follows(inside, answer, whole)
    assert not follows(outside, f"Well</think>{answer}", whole)


@pytest.mark.parametrize("most", [1, 5])
def test_a_limit_of_reasoning_ends_it(tokenizer, follows, most):
    end = marker_of("</think>", tokenizer)
    grammar = after_reasoning(ANSWERS["[1]"], end, opens_inside=True, max_tokens=most)
    word = tokenizer.encode(" a", add_special_tokens=False).ids
    assert len(word) == 1
    for count in range(8):
        assert follows(grammar, " a" * count + "</think>[1]") == (count <= most)
    with pytest.raises(RefusedGrammarError, match="not one token"):
        after_reasoning(ANSWERS["[1]"], Marker("</think>"), opens_inside=True, max_tokens=5)


def call_parts(name: str, schema: object, trigger: str | Marker) -> list:
    return [trigger, f'\n{{"name": "{name}", "arguments": ', Schema.of(schema), "}\n</tool_call>"]


SIZE = '\n{"name": "size", "arguments": {"a": 12}}\n</tool_call>'
STOP = '\n{"name": "stop", "arguments": {}}\n</tool_call>'


def calls_of(trigger: str | Marker) -> CallForm:
    none = {"type": "object", "properties": {}}
    calls = [call_parts("size", SCHEMA, trigger), call_parts("stop", none, trigger)]
    return CallForm(calls, separator=["\n"])


@pytest.fixture(params=["<tool_call>", "[CALL]"])
def trigger(request, tokenizer) -> Marker:
    """A trigger that ordinary tokens spell, and one that is a token."""
    marker = marker_of(request.param, tokenizer)
    assert (marker.token_id is None) == (request.param == "<tool_call>")
    return marker


@pytest.mark.parametrize("several", [True, False])
def test_required_calls_are_the_whole_answer(follows, trigger, several):
    grammar, begin = tool_calls_grammar(calls_of(trigger), several=several), trigger.text
    assert follows(grammar, begin + SIZE) and follows(grammar, begin + STOP)
    assert follows(grammar, f"{begin}{SIZE}\n{begin}{STOP}") == several
    for text in (
        "",
        "Hello",
        f"Well, {begin}{SIZE}",
        f"{begin}{SIZE} Done",
        begin + SIZE.replace("size", "sizes"),
        begin + SIZE.replace("12", '"12"'),
        begin + STOP.replace("{}", '{"a": 1}'),
        begin,
    ):
        assert not follows(grammar, text), text


@pytest.mark.parametrize("several", [True, False])
def test_required_calls_may_have_text_before_them(follows, trigger, several):
    grammar = tool_calls_grammar(calls_of(trigger), several=several, free_text=True)
    begin = trigger.text
    assert follows(grammar, f"Well, a < b: {begin}{SIZE}") and follows(grammar, begin + STOP)
    assert follows(grammar, f"Well: {begin}{SIZE}\n{begin}{STOP}") == several
    assert not follows(grammar, "Hello") and not follows(grammar, f"{begin}Hello")


@pytest.mark.parametrize("several", [True, False])
def test_calls_among_free_text_have_their_form(follows, trigger, several):
    grammar = tool_calls_grammar(calls_of(trigger), at_least_one=False, several=several, free_text=True)
    begin = trigger.text
    for text in ("", "Hello", f"Well: {begin}{SIZE}", f"{begin}{STOP} Done.", begin[:4]):
        assert follows(grammar, text), text
    assert follows(grammar, f"A {begin}{SIZE} B {begin}{STOP} C") == several
    for text in (f"Well: {begin}", f"{begin}Hello", begin + SIZE.replace("12", "null")):
        assert not follows(grammar, text), text


def test_a_list_of_calls_has_one_opening_and_one_closing(tokenizer, follows):
    calls = [['{"name": "size", "arguments": ', Schema.of(SCHEMA), "}"]]
    opening = [marker_of("[CALL]", tokenizer), "["]
    form = CallForm(calls, opening=opening, separator=[", "], closing=["]"])
    one = '{"name": "size", "arguments": {"a": 1}}'
    for free_text in (True, False):
        grammar = tool_calls_grammar(form, free_text=free_text)
        assert follows(grammar, f"[CALL][{one}]") and follows(grammar, f"[CALL][{one}, {one}]")
        assert follows(grammar, f"Well: [CALL][{one}]") == free_text
        assert not follows(grammar, f"[CALL][{one}][CALL][{one}]") and not follows(grammar, "[CALL][]")


def test_reasoning_goes_before_calls(tokenizer, follows, trigger):
    calls = tool_calls_grammar(calls_of(trigger))
    grammar = after_reasoning(calls, marker_of("</think>", tokenizer), opens_inside=True)
    assert follows(grammar, f"Hm</think>\n{trigger.text}{SIZE}")
    assert not follows(grammar, f"Hm</think>{trigger.text}x")


def test_calls_that_begin_differently_have_no_trigger():
    with pytest.raises(ValueError, match="same text"):
        tool_calls_grammar(CallForm([["<a>", Schema.of({})], ["<b>", Schema.of({})]]))
    with pytest.raises(ValueError, match="is empty"):
        tool_calls_grammar(CallForm([["<a>", Schema.of({})]]), at_least_one=False)


def test_a_schema_of_a_tool_stays_as_it_was():
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "c": inner}}
    before = json.dumps(schema)
    assert Schema.of(schema).text.count('"additionalProperties":false') == 3
    assert json.dumps(schema) == before
