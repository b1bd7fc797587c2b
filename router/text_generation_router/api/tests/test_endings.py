"""Finish reasons and text offsets, in whole answers and in streams of the generating routes."""

import random
from typing import Any

import pytest

from text_generation_router.api.tests.conftest import Script, Server
from text_generation_router.scheduling.request import EndReason

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/generate": {"inputs": "Hi", "parameters": {"details": True, "max_new_tokens": 4}},
}


def reasons(server: Server, path: str, script: Script, **fields: Any) -> list[str | None]:
    """The finish reasons of the whole answer and of the stream to the same request."""
    body = BODIES[path] | fields
    server.engine.scripts = [script, script]
    whole = server.post(path, body).json
    stream_path = "/generate_stream" if path == "/generate" else path
    last = [event for event in server.post(stream_path, body | {"stream": True}).events if isinstance(event, dict)]
    if path == "/generate":
        return [whole["details"]["finish_reason"], last[-1]["details"]["finish_reason"]]
    if path == "/v1/messages":
        return [whole["stop_reason"], last[-2]["delta"]["stop_reason"]]
    return [whole["choices"][0]["finish_reason"], last[-1]["choices"][0]["finish_reason"]]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stop_string_that_meets_the_length_is_the_reason_but_for_tgi(make_server, keeps):
    script = Script((" a", " stop"))
    fields = {"stop": [" stop"], "include_stop_str_in_output": keeps}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert reasons(make_server(), path, script, **fields) == ["stop", "stop"]
        assert reasons(make_server(tgi_dialect=True), path, script, **fields) == ["length", "length"]
    assert reasons(make_server(), "/v1/messages", script, stop_sequences=[" stop"]) == ["stop_sequence"] * 2
    parameters = BODIES["/generate"]["parameters"] | {"stop": [" stop"]}
    assert reasons(make_server(), "/generate", script, parameters=parameters) == ["length", "length"]


def test_an_end_token_that_meets_the_length_is_the_reason_but_for_tgi(make_server):
    for path in ("/v1/completions", "/v1/chat/completions"):
        for tgi, word in ((False, "stop"), (True, "length")):
            server = make_server(tgi_dialect=tgi)
            end = server.engine.vocabulary.id_of(b"</s>", special=True)
            assert reasons(server, path, Script((" a", "</s>")), stop_token_ids=[end]) == [word, word]


def test_a_stop_string_that_the_deadline_completes_is_the_reason(server):
    """The first byte of a character, which was held back, becomes the stop string."""
    script = Script((" a", "\udcc3"), expires=True)
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert reasons(server, path, script, stop=["\ufffd"]) == ["stop", "stop"]


def random_script(rng: random.Random) -> Script:
    """Words, parts of characters and special tokens."""
    texts = [rng.choice((" a", "bc", "\udcc3", "\udca9", "<x>", "<y>", "é ")) for _ in range(rng.randint(1, 9))]
    specials = frozenset(i for i, text in enumerate(texts) if text in ("<x>", "<y>"))
    ends = rng.random() < 0.5
    texts += ["</s>"] if ends else []
    reason = EndReason.EOS_TOKEN if ends else EndReason.LENGTH
    return Script(tuple(texts), (-0.5,) * len(texts), reason, last_is_special=ends, specials=specials)


@pytest.mark.parametrize("seed", range(60))
def test_offsets_are_those_of_the_choices_text_whole_and_streamed(make_server, seed):
    rng, server = random.Random(seed), make_server()
    script = random_script(rng)
    body = {"prompt": "hello", "logprobs": 0, "echo": rng.random() < 0.5, "skip_special_tokens": rng.random() < 0.5}
    if rng.random() < 0.6:
        stop = "".join(script.texts).encode(errors="surrogateescape").decode(errors="replace")[2:6] or "zz"
        body |= {"stop": [stop, "a zz"], "include_stop_str_in_output": rng.random() < 0.5}
    server.engine.scripts = [script, script]
    whole = server.post("/v1/completions", body).json["choices"][0]
    parts = [event["choices"][0] for event in server.post("/v1/completions", body | {"stream": True}).events[:-1]]
    text, arrays = whole["text"], whole["logprobs"]
    assert "".join(part["text"] for part in parts) == text
    assert [at for part in parts if part["logprobs"] for at in part["logprobs"]["text_offset"]] == arrays["text_offset"]
    for token, at in zip(arrays["tokens"], arrays["text_offset"], strict=True):
        for special in ("<x>", "<y>", "</s>") if body["skip_special_tokens"] else ("</s>",):
            token = token.removesuffix(special)
        shown = text[at : at + len(token)]
        assert token.startswith(shown) and (shown == token or at + len(token) > len(text)), (text, token, at)
