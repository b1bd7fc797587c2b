"""Each API's fields for the form of the output (JSON schema, regular expression, grammar, choice) make a whole server
write text of that form."""

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest
from calls import at_once, stream
from server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 999, "minimum": 0},
    },
    "required": ["name", "age"],
}
PHONE = "[0-9]{3}-[a-c]{2}"
RULES = 'root ::= "a" [0-9] | "b"'
DRAWN = {"temperature": 1.0, "max_tokens": 60}
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


def is_person(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def fits(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("shape", "has_form"),
    [
        ({"type": "json", "value": SCHEMA}, is_person),
        ({"type": "json_object", "value": json.dumps(SCHEMA)}, is_person),
        ({"type": "regex", "value": PHONE}, fits(PHONE)),
    ],
)
def test_native_texts_have_tgis_grammars(server: ServerProcess, shape: dict[str, Any], has_form: Any) -> None:
    asked = {"grammar": shape, "do_sample": True, "details": True, "max_new_tokens": 60, "best_of": 2}
    answer = httpx.post(f"{server.url}/generate", json={"inputs": "A fox", "parameters": asked}, timeout=60).json()
    assert has_form(answer["generated_text"]) and answer["details"]["finish_reason"] == "eos_token"
    events = at_once(server.url, stream("A fox", grammar=shape, do_sample=True, max_new_tokens=60))[0]
    assert has_form(events[-1]["generated_text"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "has_form"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, is_person),
        ({"guided_json": SCHEMA}, is_person),
        ({"structured_outputs": {"regex": PHONE}}, fits(PHONE)),
        ({"guided_choice": ["red fox", "brown bear"]}, fits("red fox|brown bear")),
        ({"ebnf": RULES}, fits("a[0-9]|b")),
    ],
)
def test_texts_of_v1_have_the_form_of_each_field(
    server: ServerProcess, path: str, fields: dict[str, Any], has_form: Any
) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": ["A fox", "A bear"]}
    answer = httpx.post(server.url + path, json=body | fields | DRAWN | {"n": 2}, timeout=60).json()
    texts = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in answer["choices"]]
    assert len(texts) == (2 if "chat" in path else 4) and all(has_form(text) for text in texts)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


def test_a_form_ends_the_text_whatever_else_would_prolong_it(server: ServerProcess) -> None:
    fields = {"regex": "fox{3}", "ignore_eos": True, "min_tokens": 40, **DRAWN}
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "A", **fields}, timeout=60).json()
    assert answer["choices"][0]["text"] == "foxxx" and answer["choices"][0]["finish_reason"] == "stop"
