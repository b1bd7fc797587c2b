"""A whole server gives the calls, the text and the reasoning that a model has written: each format, by each API."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import written
from calls import at_once
from written import Answer, WritingServer

from text_generation_router.text.calls.tests.call_texts import CALL_TEXTS, TOOLS, CallText

# Formats that are served by each run: one for each kind of body. The others are served by `make test-served-calls`.
SERVED = {("hermes", False), ("mistral-args", True), ("qwen3-coder", False), ("harmony", True), ("llama4", True)}
KINDS = sorted({(case.format, case.reasoning_format, special) for case in CALL_TEXTS for special in (False, True)})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = ("weather", '{"city": "Rome"}')


def kind_param(calls: str, reasoning: str, special: bool) -> object:
    is_served = (calls, special) in SERVED and reasoning in ("think", "harmony")
    name = f"{calls}, {reasoning}, {'special tokens' if special else 'text'}"
    return pytest.param(calls, reasoning, special, id=name, marks=() if is_served else pytest.mark.formats)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritingServer]:
    with WritingServer(tmp_path_factory.mktemp("model"), "hermes", "think", has_special=False) as server:
        yield server


def is_writable(case: CallText, special: tuple[str, ...]) -> bool:
    """Whether every marker in the text is meant as one, so that the tokenizer may have it as a special token."""
    return not special or not (case.is_spelled or any(marker in case.content + case.reasoning for marker in special))


@pytest.mark.parametrize(("calls", "reasoning", "special"), [kind_param(*kind) for kind in KINDS])
def test_each_text_gives_its_calls_answer_and_reasoning_by_each_api(
    tmp_path: Path, calls: str, reasoning: str, special: bool
) -> None:
    with WritingServer(tmp_path, calls, reasoning, special) as server:
        cases = [case for case in CALL_TEXTS if (case.format, case.reasoning_format) == (calls, reasoning)]
        cases = [case for case in cases if is_writable(case, server.special)]
        assert cases
        for case in cases:
            check(server, case)


def check(server: WritingServer, case: CallText) -> None:
    server.write(case.text)
    apis = (written.chat, written.chat_stream, written.anthropic, written.anthropic_stream)
    asked = [api("Hi. " + case.prompt, TOOLS) for api in (*apis, written.responses, written.responses_stream)]
    [chat], [chat_stream], *others = at_once(server.url, *asked)
    as_objects = tuple((name, json.dumps(written.object_of(arguments))) for name, arguments in case.calls)
    endings = ("tool_calls", "tool_use") if case.calls else ("stop", "end_turn")
    for answer in (chat, chat_stream):
        check_answer(answer, case, case.calls, endings[0])
    for answer in others[:2]:
        check_answer(answer, case, as_objects, endings[1])
    for answer in others[2:]:
        check_answer(answer, case, case.calls, "completed")


def check_answer(answer: Answer, case: CallText, calls: tuple[tuple[str, str], ...], ending: str) -> None:
    found = answer.content, answer.reasoning, answer.calls, answer.ending
    assert found == (case.content, case.reasoning, calls, ending), case.label
    assert len(set(answer.ids)) == len(answer.ids) and all(answer.ids), case.label
    own = case.ids or [None] * len(calls)
    assert all(given in (None, id) for given, id in zip(own, answer.ids, strict=True)), case.label


def both(server: WritingServer, text: str, **fields: Any) -> list[list[Answer]]:
    """The choices of a whole answer and of a stream."""
    server.write(text)
    return at_once(server.url, *(api("Hi.", TOOLS, **fields) for api in (written.chat, written.chat_stream)))


def test_each_of_several_choices_has_its_calls(hermes: WritingServer) -> None:
    for choices in both(hermes, f"Well. {CALL}", n=2):
        assert [(choice.calls, choice.ending) for choice in choices] == [((WEATHER,), "tool_calls")] * 2
        assert choices[0].ids != choices[1].ids


def test_a_call_that_is_cut_off_loses_nothing(hermes: WritingServer) -> None:
    tokens = hermes.write(CALL)
    for [choice] in both(hermes, CALL, max_tokens=tokens - len('"}}\n</tool_call>')):
        assert choice.ending == "length" and choice.calls == (("weather", '{"city": "Rome'),)
    for [choice] in both(hermes, CALL, max_tokens=20):
        assert choice.ending == "length" and not choice.calls and choice.content == CALL[:20]


def test_one_call_is_given_if_calls_are_not_parallel(hermes: WritingServer) -> None:
    for [choice] in both(hermes, f"{CALL}\n{CALL}", parallel_tool_calls=False):
        assert (choice.calls, choice.ending) == ((WEATHER,), "tool_calls")


def test_a_stop_string_ends_an_answer_before_its_call(hermes: WritingServer) -> None:
    for [choice] in both(hermes, f"Well, then. {CALL}", stop=["then"]):
        assert (choice.content, choice.calls, choice.ending) == ("Well, ", (), "stop")
