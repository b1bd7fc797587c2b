import asyncio
import json
import re
from pathlib import Path

import pytest

from text_generation_router.api.openai.schemas import ChatRequest
from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.templates.rendering import Renderer

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields):
    return {"messages": USER} | fields


PATHS = ("/v1/completions", "/v1/chat/completions")
BODIES = {PATHS[0]: {"prompt": "Hi"}, PATHS[1]: chat()}


def error_of(answer):
    """The error of an answer of OpenAI's shape, without its message."""
    told = dict(answer.json["error"])
    assert told.pop("message") and answer.json["error_type"]
    return answer.status, told


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
        "id": answer.json["id"],
        "model": "local/model",
        "system_fingerprint": "1.2.3-native",
        "choices": [{"index": 0, "text": " there!", "logprobs": None, "finish_reason": "length"}],
        "usage": usage(2, 2),
    }
    assert answer.json["id"] == "cmpl-" + answer.headers["x-request-id"]
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


def test_a_completion_stream_ends_each_text_with_a_reason_and_all_with_done(server):
    events = server.post("/v1/completions", {"prompt": ["Hi", "Ho!"], "stream": True}).events
    assert events.pop() == "[DONE]" and len({event["id"] for event in events}) == 1
    for index in (0, 1):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices == [
            {"index": index, "text": " there", "logprobs": None, "finish_reason": None},
            {"index": index, "text": "!", "logprobs": None, "finish_reason": "length"},
        ]
    assert not any("usage" in event for event in events)


def test_completion_stream_sends_one_sum_where_it_is_asked_for(server):
    body = {"prompt": ["Hi", "Ho!"], "stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = server.post("/v1/completions", body).events
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"] == usage(5, 4)
    assert all(event["usage"] is None for event in events)


@pytest.mark.parametrize("path", PATHS)
def test_every_event_has_the_usage_until_then_where_it_is_asked_for(server, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = server.post(path, BODIES[path] | {"stream": True, "stream_options": options}).events
    assert [event["usage"]["completion_tokens"] for event in events][-1] == 2 == last["usage"]["completion_tokens"]
    assert events[0]["usage"]["completion_tokens"] < 2


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


def test_one_bad_prompt_refuses_all(server):
    answer = server.post("/v1/completions", {"prompt": ["Hi", ""]})
    assert (answer.status, server.engine.asked, server.permits.left) == (400, [], 4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_prompt_cancels_the_tokenization_of_the_others(server, stream, monkeypatch):
    ended = []

    async def encode(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def ask() -> None:
        body = json.dumps({"prompt": ["Hi", "Ho", ""], "stream": stream}).encode()
        assert (await server.call("POST", "/v1/completions", body)).status == 400
        assert ended == [True, True]

    monkeypatch.setattr(server.tokenizer, "encode", encode)
    asyncio.run(ask())


def chat_json(answer_id):
    """The answer to `chat()`."""
    message = {"role": "assistant", "content": " there!"}
    return {
        "object": "chat.completion", "id": answer_id, "model": "local/model", "system_fingerprint": "1.2.3-native",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": usage(20, 2),
    }  # fmt: skip


def test_chat_has_the_shape_of_the_contract(server):
    answer = server.post("/v1/chat/completions", chat()).json
    assert without_time(answer) == chat_json(answer["id"])
    assert server.metric("tgi_request_count_total") == 2


def test_chat_uses_the_template_without_more_special_tokens(server):
    chunks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": chunks, "name": None, "tool_calls": None}]
    server.post("/v1/chat/completions", {"messages": messages})
    ids = list(server.engine.asked[0].request.input_ids)
    text = server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<system>ab</s><assistant>"


def test_a_last_message_of_the_assistants_is_continued(server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    server.post("/v1/chat/completions", {"messages": messages})
    ids = list(server.engine.asked[0].request.input_ids)
    assert server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == "<user>a</s><assistant>b "


SAMPLED = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": chat(),
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": chat(max_tokens=1),
}


@pytest.mark.parametrize(
    ("fields", "draws", "temperature"),
    [
        ({"temperature": 0}, False, 1.0),
        ({"top_p": 0}, False, 1.0),
        ({}, True, 1.0),
        ({"temperature": 0.5, "top_p": 1}, True, 0.5),
    ],
)
def test_temperature_and_top_p_mean_what_they_do_at_openai(server, fields, draws, temperature):
    for path, body in SAMPLED.items():
        assert server.post(path, body | fields).status == 200
        sampling = server.engine.asked[-1].request.sampling
        assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (draws, temperature, 1.0)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "typical_p"])
@pytest.mark.parametrize("path", SAMPLED)
def test_a_refused_parameter_tells_the_values_that_are_taken(server, path, name):
    """Each bound in the words of the refusal is taken or refused as the words say."""
    refused = server.post(path, SAMPLED[path] | {name: -2})
    bounds = re.findall(r"(>=?|<=?) (-?[0-9.]+)", refused.json["error"]["message"])
    assert refused.status == 400 and bounds
    for relation, bound in bounds:
        answer = server.post(path, SAMPLED[path] | {name: int(float(bound))})
        assert answer.status == (200 if "=" in relation else 400), (relation, bound)


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_its_generations(server, stream):
    server.engine.script.hang_after = 1
    for path, body in (("/v1/completions", {"prompt": ["Hi", "Ho"]}), ("/v1/chat/completions", chat())):
        content = json.dumps(body | {"stream": stream}).encode()
        asyncio.run(server.call("POST", path, content, leave_after=0))
    assert len(server.engine.asked) == 3 and all(one.cancelled for one in server.engine.asked)
    assert server.permits.left == 4


async def test_a_chat_that_waits_to_be_rendered_is_given_up_when_its_client_leaves(server, monkeypatch):
    ended = []

    async def never(self: object, messages: object, share: object) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    monkeypatch.setattr(Renderer, "render", never)
    async with asyncio.timeout(10):
        await server.call("POST", "/v1/chat/completions", json.dumps(chat()).encode(), leave_after=0)
    assert ended and not server.engine.asked and server.permits.left == 4


def test_chat_stream_has_the_bytes_of_the_contract(server):
    """The first chunk has the role, the last one the reason, and no other chunk has either."""
    server.engine.script.texts, server.engine.script.last_is_special = ("OK", "</s>"), True
    server.engine.script.reason = EndReason.EOS_TOKEN
    body = chat(stream=True, stream_options={"include_usage": True})
    answer = server.post("/v1/chat/completions", body, {"content-type": "application/json", "x-request-id": "mine"})
    created = answer.events[0]["created"]
    tokens = len(server.engine.asked[0].request.input_ids)
    head = (
        f'data: {{"object":"chat.completion.chunk","id":"chatcmpl-mine","created":{created},"model":"local/model",'
        '"system_fingerprint":"1.2.3-native","choices":['
    )
    end = '],"usage":null}\n\n'
    assert answer.body.decode() == "".join(
        (
            head + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + end,
            head + '{"index":0,"delta":{"content":"OK"},"logprobs":null,"finish_reason":null}' + end,
            head + '{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":null}' + end,
            head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}' + end,
            head + f'],"usage":{{"prompt_tokens":{tokens},"completion_tokens":2,"total_tokens":{tokens + 2},'
            '"prompt_tokens_details":{"cached_tokens":0}}}\n\n',
            "data: [DONE]\n\n",
        )
    )


ENDS = [
    {"texts": ("OK", "</s>"), "last_is_special": True, "reason": EndReason.EOS_TOKEN},
    {"texts": ("OK", "!")},
    {"texts": ("OK", "!"), "expires": True},
]


def texts_of(events):
    """The text of each choice of a stream, by the choice's index; and the choices' finish reasons, one for each."""
    texts, reasons = {}, {}
    for choice in (choice for event in events if event != "[DONE]" for choice in event["choices"]):
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons
            reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons


def whole_of(answer):
    choices = answer.json["choices"]
    texts = {c["index"]: c["message"]["content"] if "message" in c else c["text"] for c in choices}
    return texts, {c["index"]: c["finish_reason"] for c in choices}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", ENDS, ids=["end token", "length", "deadline"])
@pytest.mark.parametrize(
    "fields", [{}, {"stop": "OK"}, {"stop": "re"}, {"skip_special_tokens": False}, {"n": 2}], ids=str
)
def test_a_stream_is_the_whole_answer(server, path, end, fields):
    server.engine.script = type(server.engine.script)(**end, cuts_character=True)
    body = BODIES[path] | fields
    assert texts_of(server.post(path, body | {"stream": True}).events) == whole_of(server.post(path, body))


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_string_is_cut_off_unless_it_is_asked_for(server, path):
    server.engine.script = type(server.engine.script)(texts=("one", " two st", "op", " three"), logprobs=(0.0,) * 4)
    for stream in (False, True):
        for fields, text in (
            ({"stop": " stop"}, "one two"),
            ({"stop": [" three", "st"]}, "one two "),
            ({"stop": ["op", " stop"]}, "one two"),  # both end at the same character, and one begins earlier
            ({"stop": " stop", "include_stop_str_in_output": True}, "one two stop"),
            ({"stop": "never"}, "one two stop three"),
        ):
            answer = server.post(path, BODIES[path] | fields | {"stream": stream})
            texts, reasons = texts_of(answer.events) if stream else whole_of(answer)
            assert (texts, reasons) == ({0: text}, {0: "length" if fields["stop"] == "never" else "stop"})


@pytest.mark.parametrize("path", PATHS)
def test_several_texts_of_one_prompt(server, path):
    body = BODIES[path] | {"n": 3, "temperature": 1.0}
    answer = server.post(path, body | {"seed": 2**64 - 2})
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    assert [asked.request.sampling.seed for asked in server.engine.asked] == [2**64 - 2, 2**64 - 1, 0]
    tokens = len(server.engine.asked[0].request.input_ids)
    assert answer.json["usage"]["prompt_tokens"] == tokens and answer.json["usage"]["completion_tokens"] == 6
    server.post(path, body)
    assert len({asked.request.sampling.seed for asked in server.engine.asked[3:]}) == 3
    assert server.permits.left == 4
    assert error_of(server.post(path, body | {"n": 5})) == (
        429, {"type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    )  # fmt: skip
    for n in (0, 17):
        assert error_of(server.post(path, body | {"n": n}))[1]["param"] == "n"


def test_prompts_times_n_are_answered_in_order(server):
    body = {"prompt": ["Hi", "Ho!"], "n": 2, "return_token_ids": True}
    choices = server.post("/v1/completions", body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in choices] == [2, 2, 3, 3]
    assert all(choice["token_ids"] == choices[0]["token_ids"] and len(choice["token_ids"]) == 2 for choice in choices)


def test_prompts_may_be_token_ids(server):
    for prompt, ids in (([1, 2, 3], [(1, 2, 3)]), ([[1, 2], [3]], [(1, 2), (3,)]), (["Hi", [7]], [None, (7,)])):
        server.engine.asked.clear()
        assert server.post("/v1/completions", {"prompt": prompt}).status == 200
        for asked, wanted in zip(server.engine.asked, ids, strict=True):
            assert wanted in (None, asked.request.input_ids)
    for prompt in ([10**6], [[1], []], [1.5], [-1], [True], [2**31], [], [[]], {}, None, 5):
        status, told = error_of(server.post("/v1/completions", {"prompt": prompt}))
        assert (status, told["param"], told["type"]) == (400, "prompt", "invalid_request_error"), prompt


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_is_truncated_on_either_side(server, path):
    server.post(path, BODIES[path])
    whole = server.engine.asked[-1].request.input_ids
    for fields, ids in (
        ({"truncate_prompt_tokens": 1}, whole[-1:]),
        ({"truncate_prompt_tokens": 1, "truncation_side": "left"}, whole[-1:]),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, whole[:1]),
        ({"truncate_prompt_tokens": -1}, whole),
    ):
        assert server.post(path, BODIES[path] | fields).status == 200
        assert server.engine.asked[-1].request.input_ids == ids
    for most, kept in ((None, 40), (1, 40), (20, 40), (25, 35), (59, 1)):
        long = {"prompt": "a " * 60} if path == PATHS[0] else {"messages": [{"role": "user", "content": "a " * 60}]}
        assert server.post(path, long | {"truncate_prompt_tokens": -1, "max_tokens": most}).status == 200
        assert len(server.engine.asked[-1].request.input_ids) == kept
    for fields in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 10**6}, {"truncation_side": "top"}):
        assert error_of(server.post(path, BODIES[path] | {"truncate_prompt_tokens": 1} | fields))[0] == 400


def test_chat_logprobs_have_bytes_and_cover_every_token(server):
    body = chat(logprobs=True, top_logprobs=1)
    content = server.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    first = {"token": " there", "logprob": -0.5, "bytes": list(b" there")}
    assert content[0] == first | {"top_logprobs": [first]} and len(content) == 2
    events = server.post("/v1/chat/completions", body | {"stream": True}).events[:-1]
    told = [event["choices"][0]["logprobs"] for event in events]
    assert told[0] is told[-1] is None and [len(one["content"]) for one in told[1:-1]] == [1, 1]
    without = server.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=0)).json["choices"][0]
    assert [entry["top_logprobs"] for entry in without["logprobs"]["content"]] == [[], []]


def test_log_probabilities_of_20_tokens_may_be_asked_for(server):
    for path, fields, name in ((PATHS[0], {}, "logprobs"), (PATHS[1], {"logprobs": True}, "top_logprobs")):
        assert server.post(path, BODIES[path] | fields | {name: 20}).status == 200
        assert server.engine.asked[-1].request.sampling.top_n_tokens == 20
        status, told = error_of(server.post(path, BODIES[path] | fields | {name: 21}))
        assert (status, told["param"]) == (400, name)
    assert error_of(server.post(PATHS[1], chat(top_logprobs=2)))[1]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>Hi</s><assistant>"),
        ({"add_generation_prompt": True}, "<user>Hi</s><assistant>"),
        ({"add_generation_prompt": False}, "<user>Hi</s>"),
        ({"continue_final_message": True}, "<user>Hi"),
        ({"continue_final_message": False}, "<user>Hi</s><assistant>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>Hi</s><assistant>"),
    ],
)
def test_the_turn_may_be_set(server, fields, prompt):
    assert server.post(PATHS[1], chat(**fields)).status == 200
    ids = list(server.engine.asked[0].request.input_ids)
    assert server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False) == prompt
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert error_of(server.post(PATHS[1], chat(**both)))[1]["param"] == "continue_final_message"


def test_documents_are_the_templates_and_refused_if_it_has_no_place_for_them(server):
    documents = [{"title": "T", "text": "a"}]
    asked = ChatRequest.model_validate(chat(documents=documents))
    assert asked.conversation(CallWays()).documents == documents
    for given in ([], None):
        assert server.post(PATHS[1], chat(documents=given)).status == 200
    answer = server.post(PATHS[1], chat(documents=documents))
    assert answer.status == 400 and "`documents`" in answer.json["error"]["message"]
    assert error_of(server.post(PATHS[1], chat(documents=[{}] * 1025)))[1]["param"] == "documents"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_variables_of_the_template_are_not_fields_of_the_request(server, name):
    answer = server.post(PATHS[1], chat(chat_template_kwargs={name: False}))
    assert answer.status == 400 and f"`{name}`" in answer.json["error"]["message"]


def test_histories_of_agents_are_taken(server):
    history = [
        {"role": "system", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
        {
            "role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None,
            "annotations": [], "tool_calls": [
                {"id": "0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "0", "content": "7"},
        {"role": "critic", "content": "?", "made_up": {"a": [1]}},
    ]  # fmt: skip
    answer = server.post(PATHS[1], {"messages": history, "truncate_prompt_tokens": -1})
    assert answer.status == 200 and "x-ignored-parameters" not in answer.headers
    for field in ("audio", "function_call"):
        status, told = error_of(server.post(PATHS[1], {"messages": [*history, {"role": "user", field: {"id": "1"}}]}))
        assert (status, told["param"]) == (400, f"messages[5].{field}")
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    assert error_of(server.post(PATHS[1], {"messages": [{"role": "user", "content": image}]}))[1]["param"] == "messages"


def test_the_answers_name_is_the_served_one_and_another_name_is_told(server, make_server):
    for path in PATHS:
        for asked, ignored in ((None, None), ("local/model", None), ("tgi", "model"), ("gpt-4o", "model")):
            answer = server.post(path, BODIES[path] | {"model": asked})
            assert answer.json["model"] == "local/model" and answer.headers.get("x-ignored-parameters") == ignored
        refused = make_server(strict_parameters=True).post(path, BODIES[path] | {"model": "gpt-4o"})
        expected = {"type": "invalid_request_error", "param": None, "code": "model_not_found"}
        assert error_of(refused) == (404, expected)


def test_streams_answer_a_real_status_before_the_first_byte(make_server):
    for path, body in (("/v1/completions", {"prompt": ""}), ("/v1/chat/completions", chat(max_tokens=10**6))):
        server = make_server()
        answer = server.post(path, body | {"stream": True})
        assert (answer.status, answer.json["error_type"], server.permits.left) == (400, "validation", 4)
        answer = make_server(max_concurrent_requests=0).post(path, body | {"stream": True})
        assert (answer.status, answer.json["error_type"]) == (429, "overloaded")


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho"]])
def test_an_error_after_the_first_byte_is_an_event_before_done(server, prompt):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    told = {"message": "Request failed during generation: boom", "type": "server_error", "param": None, "code": None}
    for path, body in (("/v1/completions", {"prompt": prompt}), ("/v1/chat/completions", chat())):
        answer = server.post(path, body | {"stream": True})
        assert answer.status == 200
        assert answer.events[-2:] == [{"error": told, "error_type": "generation"}, "[DONE]"]
    assert server.permits.left == 4 and all(asked.end for asked in server.engine.asked)


def test_a_failed_generation_is_a_500_that_asks_for_no_retry(server):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    answer = server.post(PATHS[1], chat())
    assert (answer.status, answer.headers["x-should-retry"]) == (500, "false")


def test_a_prompt_that_is_too_long_is_told_in_words_that_litellm_knows(server):
    for path, field in ((PATHS[0], {"prompt": "x" * 5000}), (PATHS[1], {"max_tokens": 10**6})):
        message = server.post(path, BODIES[path] | field).json["error"]["message"]
        assert message.endswith(". The request exceeds the available context size")


def test_errors_are_openais_and_name_the_callers_own_field(server):
    """(path, what is wrong) -> (status, param, code)."""
    long = "x" * 5000
    for path, fields, status, param, code in [
        *TABLES["errors"],
        (PATHS[1], {"max_tokens": 10**6}, 400, "messages", "context_length_exceeded"),
        (PATHS[1], {"messages": [{"role": "user", "content": long}]}, 400, "messages", "context_length_exceeded"),
        (PATHS[0], {"prompt": long}, 400, "prompt", "context_length_exceeded"),
    ]:
        expected = {"type": "invalid_request_error", "param": param, "code": code}
        assert error_of(server.post(path, BODIES.get(path, {}) | fields)) == (status, expected), fields
    assert error_of(server.get(PATHS[0]))[0] == 405
    assert error_of(server.post(PATHS[0], b"[1]"))[0] == 400
    assert error_of(server.post(PATHS[0], b"{"))[0] == 400
    assert error_of(server.post(PATHS[0], b"{" + b" " * 20_000))[0] == 413
    assert error_of(server.post(PATHS[0], b"{}", {"content-type": "text/plain"}))[0] == 415


def test_a_missing_key_is_openais_too(make_server):
    server = make_server(api_keys={b"x" * 32: ""})
    told = {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    assert error_of(server.post(PATHS[1], chat())) == (401, told)


def test_template_errors_are_400(server):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "bad", "content": "x"}], "stream": True})
    error = "Template error: the model's chat template refuses the conversation: no such role"
    assert (answer.status, answer.json["error"]["message"]) == (400, error)
    assert answer.json["error_type"] == "template_error" and server.failures("template") == 1


def test_null_is_an_absent_field(server):
    names = {"stream", "n", "seed", "stop", "temperature", "top_p", "max_tokens", "logprobs", "stream_options", "user"}
    for path in PATHS:
        assert server.post(path, BODIES[path] | dict.fromkeys(names)).status == 200
