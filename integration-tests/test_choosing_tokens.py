"""Parameters that name tokens and words do to a text what docs/choosing-tokens.md says."""

import json
import re
from typing import Any

import httpx
import jsonschema
from calls import at_once, generate, token_ids, tokenizer
from server_process import ServerProcess

STORY = "<|user|>Tell me a story about a river.</s><|assistant|>"
END = 2  # the demo model's end token


def told(server: ServerProcess, **parameters: Any) -> tuple[list[int], str, str]:
    """The token ids of a greedy story, its text, and why it ended."""
    answer = at_once(server.url, generate(STORY, **{"max_new_tokens": 24, "details": True} | parameters))[0]
    return token_ids(answer), answer["generated_text"], answer["details"]["finish_reason"]


def test_a_text_has_allowed_tokens_only_and_no_bad_word(server: ServerProcess) -> None:
    ids, text, _ = told(server)
    allowed = sorted({*ids, 300, 301} - {ids[3]})
    assert set(told(server, allowed_token_ids=allowed)[0]) <= set(allowed)
    words = [word for word in text.split() if word.isalpha()][:3]
    assert len(words) == 3
    assert not set(words) & set(told(server, bad_words=words)[1].split())


def test_a_text_ends_with_its_own_stop_token_but_not_before_min_new_tokens(server: ServerProcess) -> None:
    ids, _, _ = told(server)
    stop = ids[2]
    ended = (ids[: ids.index(stop) + 1], "eos_token")
    for ignores in (False, True):
        stopped, _, reason = told(server, stop_token_ids=[stop], ignore_eos_token=ignores)
        assert (stopped, reason) == ended
    longer, _, reason = told(server, stop_token_ids=[stop], min_new_tokens=8)
    assert len(longer) > 8 and stop not in longer[:-1] and END not in longer[:-1]
    assert (reason == "eos_token") == (longer[-1] in (stop, END))


def test_a_model_that_would_end_goes_on_until_min_tokens(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
    url = f"{server.url}/v1/chat/completions"
    short = httpx.post(url, json=body, timeout=60).json()
    least = int(short["usage"]["completion_tokens"]) + 5
    long = httpx.post(url, json=body | {"min_tokens": least}, timeout=60).json()
    assert long["usage"]["completion_tokens"] > least
    assert long["choices"][0]["message"]["content"] != short["choices"][0]["message"]["content"]


def test_a_bias_forces_or_forbids_a_token_and_the_largest_min_p_leaves_the_best(server: ServerProcess) -> None:
    ids, _, _ = told(server)
    forced = tokenizer().encode_batch([" lamp"])[0].ids[-1]
    assert set(told(server, logit_bias={str(forced): 100})[0]) == {forced}
    assert ids[0] not in told(server, logit_bias={str(ids[0]): -100})[0]
    assert told(server, do_sample=True, seed=3, min_p=1.0)[0] == ids


def test_a_text_follows_its_grammar_in_every_company_and_ends_with_it(server: ServerProcess) -> None:
    """Texts of a schema and of an expression, alone and in a crowd, whatever the length and end tokens say."""
    properties = {"name": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 22]}}
    schema = {"type": "object", "properties": properties, "required": ["name", "n"]}
    forms: list[Any] = [{"type": "json", "value": schema}, {"type": "regex", "value": r"( the|a) (fox|river){2}\n"}]
    rows = {"do_sample": True, "max_new_tokens": 60, "ignore_eos_token": True, "details": True}
    calls = [generate(STORY, **rows, seed=i, grammar=forms[i % 2]) for i in range(16)]
    alone = [at_once(server.url, call)[0] for call in calls[:2]]
    crowd = at_once(server.url, *calls, *(generate(STORY, **rows, seed=i) for i in range(8)))
    assert [token_ids(answer) for answer in crowd[:2]] == [token_ids(answer) for answer in alone]
    for i, answer in enumerate(crowd[:16]):
        text = answer["generated_text"]
        assert answer["details"]["finish_reason"] == "eos_token" and END not in token_ids(answer), text
        if i % 2:
            assert re.fullmatch(forms[1]["value"], text), text
        else:
            assert jsonschema.validate(json.loads(text), schema) is None


def test_a_chat_by_a_schema_is_whole_without_its_end_token(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "response_format": form, "n": 2, "seed": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert jsonschema.validate(json.loads(choice["message"]["content"]), schema) is None


def test_a_grammar_that_other_parameters_contradict_fails_by_name(server: ServerProcess) -> None:
    parameters = {"grammar": {"type": "regex", "value": "abc"}, "allowed_token_ids": [300], "max_new_tokens": 5}
    body = {"inputs": STORY, "parameters": parameters}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 422
    assert "is left by the grammar and `allowed_token_ids`" in answer.json()["error"]
    assert answer.json()["error_type"] == "validation"
