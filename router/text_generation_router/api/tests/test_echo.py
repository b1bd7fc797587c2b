"""The prompt's text and log-probabilities in answers of /v1: `echo` and `prompt_logprobs`."""

import pytest

from text_generation_router.api.openai.answers import TextSizes, offsets_in
from text_generation_router.api.tests.conftest import ScriptedVocabulary
from text_generation_router.text.tokens.events import Token

PATH = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def ids_of(server, text):
    return [token["id"] for token in server.post("/tokenize", {"inputs": text}).json]


@pytest.mark.parametrize("given", ["hello there", "as ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt_and_the_log_probabilities_of_its_tokens(server, given, stream):
    text = "hello there"
    ids = ids_of(server, text)
    body = {"prompt": text if given == text else ids, "echo": True, "logprobs": 2, "stream": stream}
    answer = server.post(PATH, body)
    parts = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
    assert "".join(part["text"] for part in parts) == "hello there there!"
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    arrays = {name: [x for part in parts for x in part["logprobs"][name]] for name in parts[0]["logprobs"]}
    count = len(ids)
    assert "".join(arrays["tokens"]) == "".join(server.engine.vocabulary.text_of(i) for i in ids) + " there!"
    assert arrays["token_logprobs"] == [None, *(-(i + 1) / 8 for i in range(count - 1)), -0.5, -0.25]
    assert arrays["top_logprobs"][0] is None and all(isinstance(row, dict) for row in arrays["top_logprobs"][1:])
    assert arrays["text_offset"][0] == 0 and arrays["text_offset"][count:] == [len(text), len(text) + 6]
    assert server.engine.asked[0].request.prompt_logprobs == 2


def test_without_log_probabilities_an_echo_is_a_text_only(server):
    choices = server.post(PATH, {"prompt": ["Hi", "Ho!"], "echo": True, "n": 2}).json["choices"]
    assert [choice["text"] for choice in choices] == ["Hi there!"] * 2 + ["Ho! there!"] * 2
    assert all(choice["logprobs"] is None for choice in choices)
    assert all(asked.request.prompt_logprobs is None for asked in server.engine.asked)
    events = server.post(PATH, {"prompt": ["Hi", "Ho!"], "echo": True, "n": 2, "stream": True}).events[:-1]
    texts = {}
    for choice in (event["choices"][0] for event in events):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in choices}


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_generated_where_no_token_is_asked_for(server, stream):
    answer = server.post(PATH, {"prompt": "Hi", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream})
    choices = [event["choices"][0] for event in answer.events[:-1]] if stream else answer.json["choices"]
    assert "".join(choice["text"] for choice in choices) == "Hi" and choices[-1]["finish_reason"] == "length"
    assert [x for choice in choices if choice["logprobs"] for x in choice["logprobs"]["token_logprobs"]] == [
        None,
        -0.125,
    ]
    if not stream:
        assert answer.json["usage"]["completion_tokens"] == 0
    refused = server.post(PATH, {"prompt": "Hi", "max_tokens": 0})
    assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")


def test_special_tokens_of_a_prompt_take_no_place_in_its_text_unless_they_stand_there():
    vocabulary = ScriptedVocabulary()
    special = vocabulary.id_of(b"<s>", special=True)
    texts = ("<s>", "Hi", "\ufffd<s>", "!")
    rows = [(Token(special if "<s>" in text else 0, text, 0.0, "<s>" in text), ()) for text in texts]
    sizes = TextSizes(vocabulary, has_special=False)
    assert offsets_in("Hi\ufffd!", rows, sizes) == [0, 0, 2, 3]
    assert offsets_in("Hi\ufffd<s>!", rows, sizes) == [0, 0, 2, 6]
    assert offsets_in("<s>Hi\ufffd<s>!", rows, sizes) == [0, 3, 5, 9]


@pytest.mark.parametrize(("path", "body"), [(PATH, {"prompt": "Hi"}), ("/v1/chat/completions", CHAT)])
def test_prompt_logprobs_have_vllms_form(server, path, body):
    answer = server.post(path, body | {"prompt_logprobs": 1, "n": 2}).json
    rows = answer["choices"][0]["prompt_logprobs"] if path == PATH else answer["prompt_logprobs"]
    ids = server.engine.asked[0].request.input_ids
    assert len(rows) == len(ids) and rows[0] is None
    assert rows[1][str(ids[1])]["logprob"] == -0.125 and rows[1]["0"] | {"decoded_token": ""} == {
        "logprob": -0.125, "rank": 1, "decoded_token": ""
    }  # fmt: skip
    for fields, name in (({"stream": True}, "prompt_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs")):
        refused = server.post(path, body | {"prompt_logprobs": 1} | fields)
        assert (refused.status, refused.json["error"]["param"]) == (400, name)


def test_a_cut_prompt_is_not_repeated(server):
    refused = server.post(PATH, {"prompt": "Hi", "echo": True, "truncate_prompt_tokens": 1})
    assert (refused.status, refused.json["error"]["param"]) == (400, "echo")
