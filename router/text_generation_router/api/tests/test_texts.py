"""The routes between texts and tokens."""

import pytest

from text_generation_router.scheduling.request import Share

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


def test_the_tokens_of_a_chat_are_those_of_its_prompt(server):
    answer = server.post("/chat_tokenize", CHAT | {"temperature": 0.5})
    assert answer.status == 200 and list(answer.json) == ["tokenize_response", "templated_text"]
    text, tokens = answer.json["templated_text"], answer.json["tokenize_response"]
    assert text == "<user>hello world</s><assistant>"
    content = text.encode()
    assert b"".join(content[token["start"] : token["stop"]] for token in tokens if token["text"]) == content
    server.post("/v1/chat/completions", CHAT)
    assert tuple(token["id"] for token in tokens) == server.engine.asked[0].request.input_ids
    assert server.metric("tgi_request_count_total") == 3  # as in TGI, one for each of its two requests and one more


def test_the_tokens_of_a_long_chat_are_sent_in_pieces(make_server):
    server = make_server(payload_limit=200_000)
    answer = server.post("/chat_tokenize", {"messages": [{"role": "user", "content": "hello world " * 4000}]})
    content = answer.json["templated_text"].encode()
    tokens = answer.json["tokenize_response"]
    assert len(answer.chunks) > 2
    assert b"".join(content[token["start"] : token["stop"]] for token in tokens if token["text"]) == content


def test_a_chat_without_a_permit_or_a_template_is_refused(make_server):
    server = make_server(max_concurrent_requests=1)
    permit = server.permits.take(Share("peer 192.0.2.1"), 1)
    assert server.post("/chat_tokenize", CHAT).status == 429
    permit.give_back(1)
    refused = server.post("/chat_tokenize", {"messages": [{"role": "bad", "content": "x"}]})
    assert (refused.status, refused.json["error_type"], server.permits.left) == (422, "template_error", 1)
    assert server.post("/chat_tokenize", CHAT | {"tools": [{}]}).status == 422


def test_text_tokens_and_back(server):
    ids = [token["id"] for token in server.post("/tokenize", {"inputs": "hello world"}).json]
    assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": "hello world"}
    special = server.tokenizer.tokenizer.token_to_id("</s>")
    assert server.post("/detokenize", {"tokens": [*ids, special]}).json == {"prompt": "hello world"}
    shown = server.post("/detokenize", {"tokens": [*ids, special], "skip_special_tokens": False}).json
    assert shown == {"prompt": "hello world</s>"}
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}
    assert server.permits.left == server.config.requests.max_concurrent_requests


@pytest.mark.parametrize("tokens", [None, "a", [1.5], [-1], [True], ["a"], [[1]], [10**6], [2**40]])
def test_wrong_tokens_are_refused(server, tokens):
    answer = server.post("/detokenize", {"tokens": tokens})
    assert answer.status == 422 and "tokens" in answer.json["error"]


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize", "/detokenize", "/invocations", "/vertex"])
def test_a_key_is_needed(make_server, path):
    assert make_server(api_keys={b"x" * 32: ""}).post(path, {}).status == 401
