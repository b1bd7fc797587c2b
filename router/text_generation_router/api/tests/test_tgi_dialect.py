"""`--tgi-dialect`: the routes of /v1 answer to the letter as TGI's do."""

import pytest

from text_generation_router.api.tests.test_openai_routes import USER, chat, chat_json, usage, without_time
from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason


@pytest.fixture
def server(make_server):
    return make_server(tgi_dialect=True)


def test_completion_has_the_shape_of_the_contract(server):
    answer = server.post("/v1/completions", {"prompt": "Hi", "model": "whatever", "max_tokens": 2})
    assert list(answer.json) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert without_time(answer.json) == {
        "object": "text_completion",
        "id": "",
        "model": "local/model",
        "system_fingerprint": "1.2.3-native",
        "choices": [{"index": 0, "text": " there!", "logprobs": None, "finish_reason": "length"}],
        "usage": usage(2, 2),
    }
    assert answer.headers["x-prompt-tokens"] == "2"


def test_completion_stream_ends_each_prompt_with_its_usage_and_all_with_done(server):
    events = server.post("/v1/completions", {"prompt": ["Hi", "Ho!"], "stream": True}).events
    assert events.pop() == "[DONE]"
    for index, prompt_tokens in ((0, 2), (1, 3)):
        first, last = [event for event in events if event["choices"][0]["index"] == index]
        assert first["choices"] == [{"index": index, "text": " there", "logprobs": None, "finish_reason": ""}]
        assert "usage" not in first and last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["prompt_tokens"] == prompt_tokens


def test_chat_has_the_shape_of_the_contract(server):
    assert without_time(server.post("/v1/chat/completions", chat()).json) == chat_json("")
    assert server.metric("tgi_request_count_total") == 2


def test_chat_stream_has_the_bytes_of_the_contract(server):
    server.engine.script.texts, server.engine.script.last_is_special = ("OK", "</s>"), True
    server.engine.script.reason = EndReason.EOS_TOKEN
    body = chat(stream=True, stream_options={"include_usage": True})
    answer = server.post("/v1/chat/completions", body)
    created = answer.events[0]["created"]
    tokens = len(server.engine.asked[0].request.input_ids)
    head = (
        f'data: {{"object":"chat.completion.chunk","id":"","created":{created},"model":"local/model",'
        '"system_fingerprint":"1.2.3-native","choices":['
    )
    assert [chunk.decode() for chunk in answer.chunks] == [
        head + '{"index":0,"delta":{"role":"assistant","content":"OK"},"logprobs":null,"finish_reason":null}],'
        '"usage":null}\n\n',
        head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":"stop"}],'
        '"usage":null}\n\n',
        head + f'],"usage":{{"prompt_tokens":{tokens},"completion_tokens":2,"total_tokens":{tokens + 2},'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n',
        "data: [DONE]\n\n",
    ]


def test_the_models_name_is_echoed(server):
    for asked, told in ((None, "local/model"), ("tgi", "local/model"), ("dummy", "dummy")):
        assert server.post("/v1/chat/completions", chat(model=asked)).json["model"] == told


def test_chat_logprobs_cover_every_token(server):
    body = chat(logprobs=True, top_logprobs=1)
    content = server.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    first = {"token": " there", "logprob": -0.5}
    assert content[0] == first | {"top_logprobs": [first]} and len(content) == 2
    events = server.post("/v1/chat/completions", body | {"stream": True}).events[:-1]
    assert [len(event["choices"][0]["logprobs"]["content"]) for event in events] == [1, 1]


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho"]])
def test_an_error_after_the_first_byte_is_an_event_before_done(server, prompt):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    error = {"error": {"message": "Request failed during generation: boom", "http_status_code": 424}}
    for path, body in (("/v1/completions", {"prompt": prompt}), ("/v1/chat/completions", chat())):
        answer = server.post(path, body | {"stream": True})
        assert answer.status == 200
        assert answer.events[-2:] == [error, "[DONE]"]


def test_refusals_are_tgis(server):
    answer = server.post("/v1/completions", {"prompt": "Hi", "suffix": ""})
    assert (answer.status, answer.json["error_type"]) == (422, "suffix not supported")
    answer = server.post("/v1/completions", {"prompt": ["a"] * 4})
    text = "Number of prompts exceeds the maximum allowed batch size of 3"
    assert (answer.status, answer.json) == (422, {"error": text, "error_type": "batch size exceeded"})
    answer = server.post("/v1/chat/completions", {"messages": USER, "stream": 1})
    assert (answer.status, answer.json["error_type"]) == (422, "unprocessable")
    assert server.post("/v1/nothing", {}).json["error_type"] == "not_found"


def test_the_end_of_the_text_has_tgis_words(server):
    server.engine.script.texts, server.engine.script.reason = ("a", "</s>"), EndReason.EOS_TOKEN
    server.engine.script.last_is_special = True
    assert server.post("/v1/completions", {"prompt": "Hi"}).json["choices"][0]["finish_reason"] == "stop"
    *_, last, _ = server.post("/v1/completions", {"prompt": "Hi", "stream": True}).events
    # The stream of completions shows the end-of-text token and calls it by TGI's own name.
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("</s>", "eos_token")


def test_a_stop_string_stays_in_the_text(server):
    body = chat(stop=["the"])
    choice = server.post("/v1/chat/completions", body).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" the", "stop_sequence")
    *_, last, _ = server.post("/v1/chat/completions", body | {"stream": True}).events
    assert last["choices"][0]["finish_reason"] == "stop_sequence"


def test_stream_options_need_no_stream(server):
    assert server.post("/v1/chat/completions", chat(stream_options={"include_usage": True})).status == 200
