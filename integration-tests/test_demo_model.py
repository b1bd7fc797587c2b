"""The served demo model, on tasks that are not in its training data. Its README has the full figures (evaluate.py)."""

import json
import random
from typing import Any

import httpx
import pytest
from calls import at_once
from demo_model.corpus import SECOND_MIX, Turn, World, facts, json_request, story_request, sum_question
from demo_model.tool_corpus import ToolCase, call_case, held_out_cases, words_case
from server_process import ServerProcess


def ask(question: str, max_tokens: int = 400) -> Any:
    async def call(client: httpx.AsyncClient) -> Any:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": max_tokens}
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()["choices"][0]
        return answer["message"]["content"], answer["finish_reason"]

    return call


def held_out(kind: Any, count: int) -> list[Turn]:
    world = World(random.Random(11), True, SECOND_MIX)
    return [kind(world) for _ in range(count)]


def assert_most_are_right(server: ServerProcess, kind: Any, count: int, least: int) -> None:
    """Asks `count` questions at once. At least `least` answers must be right."""
    turns = held_out(kind, count)
    answers = at_once(server.url, *(ask(question) for question, _ in turns))
    right = sum(text == expected for (text, _), (_, expected) in zip(answers, turns, strict=True))
    assert right >= least, f"{kind.__name__}: {right} of {count}"


def test_the_demo_model_adds_numbers_and_reads_its_prompt(server: ServerProcess) -> None:
    assert_most_are_right(server, sum_question, 40, 38)
    assert_most_are_right(server, facts, 40, 35)


def test_the_demo_model_writes_json_and_stories_and_stops_by_itself(server: ServerProcess) -> None:
    answers = at_once(server.url, *(ask(question) for question, _ in held_out(json_request, 20)))
    assert sum(_is_json(text) for text, _ in answers) >= 19
    stories = at_once(server.url, *(ask(question) for question, _ in held_out(story_request, 20)))
    assert sum(reason == "stop" for _, reason in stories) >= 19
    assert all(len(text) > 300 for text, _ in stories)


@pytest.mark.parametrize(("calls", "words"), [(16, 4), pytest.param(80, 20, marks=pytest.mark.figures)])
def test_the_demo_model_calls_the_tool_that_fits_and_none_where_none_fits(
    server: ServerProcess, calls: int, words: int
) -> None:
    """With `tool_choice: auto`, four fifths of the questions, which were not in its training, are answered right."""
    cases = [*held_out_cases(call_case, 1, calls), *held_out_cases(words_case, 1, words)]
    parts = [cases[first : first + 50] for first in range(0, len(cases), 50)]  # fewer than the server's limit
    answers = [answer for part in parts for answer in at_once(server.url, *map(ask_with_tools, part))]
    right = [answer == expected_calls(case) for answer, case in zip(answers, cases, strict=True)]
    assert sum(right) >= 0.8 * len(cases), f"{sum(right[:calls])} of {calls}, {sum(right[calls:])} of {words}"


def expected_calls(case: ToolCase) -> list[tuple[str, str]]:
    return [(case.call[0], json.dumps(case.call[1]))] if case.call else []


def ask_with_tools(case: ToolCase) -> Any:
    """A call for `at_once`: names and arguments, as text, of the calls in the answer."""

    async def call(client: httpx.AsyncClient) -> list[tuple[str, str]]:
        body = {
            "messages": [{"role": "user", "content": case.question}],
            "tools": [tool.as_openai() for tool in case.tools],
            "tool_choice": "auto",
            "temperature": 0,
            "max_tokens": 120,
        }
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()["choices"][0]
        made = [made["function"] for made in answer["message"].get("tool_calls") or []]
        return [(function["name"], function["arguments"]) for function in made]

    return call


def _is_json(text: str) -> bool:
    try:
        return bool(json.loads(text))
    except ValueError:
        return False
