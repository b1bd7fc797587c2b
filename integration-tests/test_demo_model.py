"""The served demo model, on tasks that are not in its training data. Its README has the full figures (evaluate.py)."""

import json
import random
from typing import Any

import httpx
from calls import at_once
from demo_model.corpus import (
    SECOND_MIX,
    Turn,
    World,
    facts,
    json_request,
    story_request,
    sum_question,
)
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


def test_the_demo_model_adds_numbers_and_reads_its_prompt(server: ServerProcess) -> None:
    for kind, least in ((sum_question, 38), (facts, 35)):
        turns = held_out(kind, 40)
        answers = at_once(server.url, *(ask(question) for question, _ in turns))
        right = sum(text == expected for (text, _), (_, expected) in zip(answers, turns, strict=True))
        assert right >= least, f"{kind.__name__}: {right} of 40"


def test_the_demo_model_writes_json_and_stories_and_stops_by_itself(server: ServerProcess) -> None:
    answers = at_once(server.url, *(ask(question) for question, _ in held_out(json_request, 20)))
    assert sum(_is_json(text) for text, _ in answers) >= 19
    stories = at_once(server.url, *(ask(question) for question, _ in held_out(story_request, 20)))
    assert sum(reason == "stop" for _, reason in stories) >= 19
    assert all(len(text) > 300 for text, _ in stories)


def _is_json(text: str) -> bool:
    try:
        return bool(json.loads(text))
    except ValueError:
        return False
