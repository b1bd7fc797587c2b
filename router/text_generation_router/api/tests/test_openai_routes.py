import asyncio
import json

import pytest

from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason
from text_generation_router.text.rendering import Renderer

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields):
    return {"messages": USER} | fields


def usage(prompt, made, cached=0):
    total = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def without_time(value):
    assert value.pop("created") > 1_600_000_000
    return value


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


def test_several_prompts_are_answered_in_order_and_summed(server):
    script = type(server.engine.script)
    server.engine.scripts = [
        script(texts=("a", "b", "c", "d"), logprobs=(0.0,) * 4),
        script(texts=("z",), logprobs=(0.0,)),
    ]
    answer = server.post("/v1/completions", {"prompt": ["Hi", "Ho!"], "max_tokens": 4})
    assert [(choice["index"], choice["text"]) for choice in answer.json["choices"]] == [(0, "abcd"), (1, "z")]
    assert answer.json["usage"] == usage(5, 5)
    assert answer.headers["x-compute-characters"] == "5" and answer.headers["x-queue-time"] == "500"
    assert server.metric("tgi_request_count_total") == 3


def test_completion_stream_ends_each_prompt_with_its_usage_and_all_with_done(server):
    events = server.post("/v1/completions", {"prompt": ["Hi", "Ho!"], "stream": True}).events
    assert events.pop() == "[DONE]"
    for index, prompt_tokens in ((0, 2), (1, 3)):
        first, last = [event for event in events if event["choices"][0]["index"] == index]
        assert first["choices"] == [{"index": index, "text": " there", "logprobs": None, "finish_reason": ""}]
        assert "usage" not in first and last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["prompt_tokens"] == prompt_tokens


def test_completion_stream_sends_one_sum_where_it_is_asked_for(server):
    body = {"prompt": ["Hi", "Ho!"], "stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = server.post("/v1/completions", body).events
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"] == usage(5, 4)
    assert all(event.get("usage") is None for event in events)


def test_completion_logprobs_are_openais(server):
    body = {"prompt": "Hi", "logprobs": 1}
    expected = {
        "tokens": [" there", "!"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{" there": -0.5}, {"!": -0.25}],
        "text_offset": [0, 6],
    }
    assert server.post("/v1/completions", body).json["choices"][0]["logprobs"] == expected
    events = server.post("/v1/completions", body | {"stream": True}).events[:-1]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [6]]


def test_cached_tokens_are_summed_over_the_prompts(server):
    script = type(server.engine.script)
    server.engine.scripts = [script(cached_tokens=1), script(cached_tokens=2), script(cached_tokens=9)]
    assert server.post("/v1/completions", {"prompt": ["Hi", "Ho!"]}).json["usage"] == usage(5, 4, cached=3)
    details = server.post("/v1/chat/completions", chat()).json["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 9}


def test_suffix_and_too_many_prompts_have_tgis_own_errors(server):
    answer = server.post("/v1/completions", {"prompt": "Hi", "suffix": ""})
    assert (answer.status, answer.json["error_type"]) == (422, "suffix not supported")
    answer = server.post("/v1/completions", {"prompt": ["a"] * 4})
    assert answer.json == {
        "error": "Number of prompts exceeds the maximum allowed batch size of 3",
        "error_type": "batch size exceeded",
    }
    assert server.failures("validation") == 2


def test_one_bad_prompt_refuses_all(server):
    answer = server.post("/v1/completions", {"prompt": ["Hi", ""]})
    assert (answer.status, server.engine.asked, server.permits.left) == (422, [], 4)


def test_chat_has_the_shape_of_the_contract(server):
    answer = server.post("/v1/chat/completions", chat())
    assert without_time(answer.json) == {
        "object": "chat.completion",
        "id": "",
        "model": "local/model",
        "system_fingerprint": "1.2.3-native",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " there!"},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": usage(23, 2),
    } | {"usage": answer.json["usage"]}
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


ENDS = [
    {"texts": ("OK", "</s>"), "last_is_special": True, "reason": EndReason.EOS_TOKEN},
    {"texts": ("OK", "!")},
    {"texts": ("OK", "!"), "expires": True},
]


@pytest.mark.parametrize("end", ENDS, ids=["end token", "length", "deadline"])
def test_streams_show_text_that_was_held_back_until_their_end(server, end):
    server.engine.script = type(server.engine.script)(**end, cuts_character=True)
    message = server.post("/v1/chat/completions", chat()).json["choices"][0]["message"]
    chunks = server.post("/v1/chat/completions", chat(stream=True)).events[:-1]
    content = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert content == message["content"] and content.endswith("\ufffd")
    whole = server.post("/v1/completions", {"prompt": "Hi"}).json["choices"][0]["text"]
    chunks = server.post("/v1/completions", {"prompt": "Hi", "stream": True}).events[:-1]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole + ("</s>" if "last_is_special" in end else "")  # as in TGI, this stream shows the end token


def test_chat_uses_the_template_without_more_special_tokens(server):
    chunks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": chunks, "name": None, "tool_calls": None}]
    server.post("/v1/chat/completions", {"messages": messages})
    ids = list(server.engine.asked[0].request.input_ids)
    text = server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<developer>ab</s><assistant>"


def test_a_last_message_of_the_assistants_is_continued(server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    server.post("/v1/chat/completions", {"messages": messages})
    ids = list(server.engine.asked[0].request.input_ids)
    assert server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == "<user>a</s><assistant>b"


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


@pytest.mark.parametrize(
    ("fields", "draws", "temperature"),
    [({"temperature": 0}, False, 1.0), ({}, True, 1.0), ({"temperature": 0.5, "top_p": 1}, True, 0.5)],
)
def test_temperature_means_what_it_does_at_openai(server, fields, draws, temperature):
    for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", chat())):
        assert server.post(path, body | fields).status == 200
        sampling = server.engine.asked[-1].request.sampling
        assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (draws, temperature, 1.0)


def test_parameters_reach_the_engine_from_both_routes(server):
    fields = {"seed": 3, "stop": "x", "ignore_eos": True, "frequency_penalty": 0.5, "repetition_penalty": 2}
    for path, body in (
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/chat/completions", chat(max_completion_tokens=1)),
    ):
        assert server.post(path, body | fields).status == 200
        request = server.engine.asked[-1].request
        assert (request.ignore_eos, request.max_new_tokens, request.sampling.seed) == (True, 1, 3)
        assert (request.sampling.frequency_penalty, request.sampling.repetition_penalty) == (0.5, 2.0)


def test_parameters_that_name_tokens_reach_the_engine_from_both_routes(server):
    fields = {"min_tokens": 2, "presence_penalty": -0.5, "min_p": 0.5, "logit_bias": {"5": 100}, "stop_token_ids": [9]}
    for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", chat())):
        assert server.post(path, body | fields | {"bad_words": ["a"], "allowed_token_ids": [5, 9]}).status == 200
        request = server.engine.asked[-1].request
        sampling = request.sampling
        assert (sampling.min_new_tokens, sampling.presence_penalty, sampling.min_p) == (2, -0.5, 0.5)
        assert (sampling.logit_bias, sampling.allowed_token_ids) == (((5, 100.0),), (5, 9))
        assert request.stop_token_ids == {9} == set(sampling.end_token_ids) and len(sampling.bad_words_ids) == 2


BOTH = [
    ("n", 2),
    ("n", True),
    ("response_format", {"type": "json_object"}),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT_ONLY = [
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function"}),
    ("tool_prompt", "x"),
]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [("/v1/completions", *pair) for pair in [*BOTH, ("best_of", 2), ("echo", True)]]
    + [("/v1/chat/completions", *pair) for pair in BOTH + CHAT_ONLY],
)
def test_unsupported_fields_are_refused_by_name(server, path, name, value):
    body = {"prompt": "Hi", "messages": USER, "stream": True, name: value}
    answer = server.post(path, body)
    assert answer.status == 422
    error = f"Input validation error: `{name}` is not supported yet"
    assert answer.json == {"error": error, "error_type": "validation"}


def test_images_and_tool_calls_are_refused_by_name(server):
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "0"}]}
    for message, name in (({"role": "user", "content": image}, "`image_url`"), (calls, "`tool_calls`")):
        answer = server.post("/v1/chat/completions", {"messages": [message]})
        assert (answer.status, answer.json["error_type"]) == (422, "validation") and name in answer.json["error"]


def test_neutral_values_count_as_absent_fields(server):
    neutral = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "top_p": 1, "logit_bias": {}, "user": "x"}
    neutral |= {
        "response_format": {"type": "text"},
        "stream_options": None,
        "stop": None,
        "max_tokens": None,
        "seed": None,
    }
    assert (
        server.post("/v1/completions", neutral | {"prompt": "Hi", "best_of": 1, "echo": False, "suffix": None}).status
        == 200
    )
    tools = {"tools": [], "tool_choice": "auto", "tool_prompt": None, "logprobs": None, "top_logprobs": None}
    assert server.post("/v1/chat/completions", neutral | tools | chat()).status == 200


def test_streams_answer_a_real_status_before_the_first_byte(make_server):
    for path, body in (("/v1/completions", {"prompt": ""}), ("/v1/chat/completions", chat(max_tokens=10**6))):
        server = make_server()
        answer = server.post(path, body | {"stream": True})
        assert (answer.status, answer.json["error_type"], server.permits.left) == (422, "validation", 4)
        answer = make_server(max_concurrent_requests=0).post(path, body | {"stream": True})
        assert (answer.status, answer.json["error_type"]) == (429, "overloaded")


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho"]])
def test_an_error_after_the_first_byte_is_an_event_before_done(server, prompt):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    error = {"error": {"message": "Request failed during generation: boom", "http_status_code": 424}}
    for path, body in (("/v1/completions", {"prompt": prompt}), ("/v1/chat/completions", chat())):
        answer = server.post(path, body | {"stream": True})
        assert answer.status == 200
        assert answer.events[-2:] == [error, "[DONE]"]
    assert server.permits.left == 4 and all(asked.end for asked in server.engine.asked)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_its_generations(server, stream):
    server.engine.script.hang_after = 1
    for path, body in (("/v1/completions", {"prompt": ["Hi", "Ho"]}), ("/v1/chat/completions", chat())):
        content = json.dumps(body | {"stream": stream}).encode()
        asyncio.run(server.call("POST", path, content, leave_after=0))
    assert len(server.engine.asked) == 3 and all(one.cancelled for one in server.engine.asked)
    assert server.permits.left == 4


def test_a_chat_that_waits_to_be_rendered_is_given_up_when_its_client_leaves(server, monkeypatch):
    ended = []

    async def never(self: object, messages: object, share: object) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    monkeypatch.setattr(Renderer, "render", never)

    async def leave() -> None:
        async with asyncio.timeout(10):
            await server.call("POST", "/v1/chat/completions", json.dumps(chat()).encode(), leave_after=0)

    asyncio.run(leave())
    assert ended and not server.engine.asked and server.permits.left == 4


def test_template_errors_are_422(server):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "bad", "content": "x"}], "stream": True})
    error = "Template error: syntax error: no such role (in <string>:1)"
    assert (answer.status, answer.json) == (422, {"error": error, "error_type": "template_error"})
    assert server.failures("template") == 1
