"""Chats with tools and reasoning through the whole application: prompts, grammars, messages and streams."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from text_generation_router.api.tests.conftest import Script
from text_generation_router.engine.protocol import Ended
from text_generation_router.openapi.v1_answers import ChatChunkJson, ChatJson
from text_generation_router.scheduling.request import EndReason
from text_generation_router.text.grammars.checking_child import byte_tokenizer

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

# A template that writes tools into the prompt, and its model's forms of calls and of reasoning.
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>"
    '{{ m.content }}{% endfor %}<assistant>{# "arguments" #}'
)
THINKING = HERMES + "{# <think> #}"
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    for name in ("weather", "time")
]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PATH = "/v1/chat/completions"


def script(text: str, size: int = 3, **fields: Any) -> Script:
    texts = tuple(text[at : at + size] for at in range(0, len(text), size))
    return Script((*texts, "</s>"), (-0.5,) * (len(texts) + 1), EndReason.EOS_TOKEN, last_is_special=True, **fields)


def asks(server: Any, text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of the answer whose text is `text`, and the choices of the chunks of a stream of it."""
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script(text), script(text)]
    whole = server.post(PATH, CHAT | fields)
    assert whole.status == 200, whole.body
    stream = server.post(PATH, CHAT | fields | {"stream": True})
    assert stream.events[-1] == "[DONE]"
    ChatJson.model_validate(whole.json)
    for event in stream.events[:-1]:
        ChatChunkJson.model_validate(event)
    return whole.json["choices"][0], [event["choices"][0] for event in stream.events[:-1]]


def is_allowed(grammar: str, text: str) -> bool:
    """Whether the text is one that the grammar allows from its beginning to its end."""
    matcher = LLMatcher(byte_tokenizer(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and bool(matcher.is_accepting())


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the chunks."""
    message: dict[str, Any] = {}
    for delta in (chunk["delta"] for chunk in chunks):
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": {"name": call["function"]["name"]}})
            else:
                assert call.keys() == {"index", "function"}
            function = calls[call["index"]]["function"]
            function["arguments"] = function.get("arguments", "") + call["function"]["arguments"]
        for name in delta.keys() - {"tool_calls"}:
            message[name] = (message.get(name) or "") + delta[name] if delta[name] is not None else message.get(name)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("text", ["Hello", CALL, f"Let me see. {CALL}\n{CALL}", CALL[:40], "<tool_call>no</tool_call>"])
def test_a_stream_adds_up_to_the_whole_answer(make_server, text, logprobs):
    choice, chunks = asks(make_server(template=HERMES), text, tools=TOOLS, logprobs=logprobs)
    assert without_ids(joined(chunks)) == without_ids(choice["message"])
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    begins_with_call = not choice["message"]["content"] or (logprobs and text[0] == "<")  # perhaps a call, to be exact
    first = None if begins_with_call else ""
    assert chunks[0]["delta"] == {"role": "assistant", "content": first}


def test_calls_are_tool_calls_with_ids_and_the_finish_reason_says_so(make_server):
    choice, chunks = asks(make_server(template=HERMES), f"{CALL}\n{CALL}", tools=TOOLS)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    first, second = choice["message"]["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"city": "Rome"} and first["function"]["name"] == "weather"
    assert first["id"].startswith("call_") and first["id"] != second["id"] and choice["message"]["content"] is None
    arguments = [chunk for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert len(arguments) > 4  # a call is sent while the model writes it


BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": 800'


@pytest.mark.parametrize(("text", "is_call"), [(CALL, True), (BROKEN, False), (f"{CALL}{BROKEN}", False)])
def test_a_call_that_the_model_breaks_off_is_not_the_reason_of_the_end(make_server, text, is_call):
    server = make_server(template=HERMES)
    choice, chunks = asks(server, text, tools=TOOLS)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == ("tool_calls" if is_call else "stop")
    assert len(choice["message"]["tool_calls"]) == text.count("<tool_call>")
    flat = [{"type": "function"} | tool["function"] for tool in TOOLS]
    server.engine.scripts = [script(text), script(text)]
    item = server.post("/v1/responses", {"input": "Hi", "tools": flat}).json["output"][-1]
    assert item["status"] == ("completed" if is_call else "incomplete")
    own = [{"name": tool["name"], "input_schema": tool["parameters"] | {"type": "object"}} for tool in flat]
    body = CHAT | {"tools": own, "max_tokens": 99}
    assert server.post("/v1/messages", body).json["stop_reason"] == ("tool_use" if is_call else "end_turn")
    server.engine.scripts = [script(text)]
    last = server.post("/v1/messages", body | {"stream": True}).events[-2]
    assert last["delta"]["stop_reason"] == ("tool_use" if is_call else "end_turn")


def test_the_template_gets_the_tools_and_without_a_choice_of_them_none(make_server):
    server = make_server(template=HERMES)
    choice, _ = asks(server, CALL, tools=TOOLS, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"
    lengths = [len(asked.request.input_ids) for asked in server.engine.asked]
    asks(server, CALL, tools=TOOLS)
    assert len(server.engine.asked[-1].request.input_ids) > lengths[0] + 100


def test_reasoning_is_apart_from_the_answer_unless_the_request_says_otherwise(make_server):
    server = make_server(template=THINKING)
    text = "<think>\nHm.\n</think>\n\nYes."
    choice, chunks = asks(server, text)
    assert choice["message"] == joined(chunks)
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."}
    whole, _ = asks(server, text, separate_reasoning=False)
    assert whole["message"] == {"role": "assistant", "content": text}
    hidden, chunks = asks(server, text, include_reasoning=False)
    assert hidden["message"] == joined(chunks) == {"role": "assistant", "content": "Yes."}


def test_log_probabilities_of_every_token_are_told_once(make_server):
    server = make_server(template=HERMES)
    choice, chunks = asks(server, f"Yes. {CALL}", tools=TOOLS, logprobs=True)
    told = [row["token"] for chunk in chunks if chunk["logprobs"] for row in chunk["logprobs"]["content"]]
    assert told == [row["token"] for row in choice["logprobs"]["content"]]
    assert "".join(told) == f"Yes. {CALL}</s>"


@pytest.mark.parametrize("tgi", [True, False])
def test_a_model_without_a_known_way_to_call_calls_by_a_grammar(make_server, tgi):
    server = make_server(tgi_dialect=tgi)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    answer = '{"function": {"_name": "weather", "city": "Rome"}}'
    server.engine.scripts = [script('{"function": {"_name": "weather"'), script(answer)]
    answer = server.post(PATH, CHAT | {"tools": TOOLS}).json
    ChatJson.model_validate(answer)
    choice = answer["choices"][0]
    [call] = choice["message"]["tool_calls"]
    choosing, calling = (asked.request for asked in server.engine.asked)
    assert "no_tool" in choosing.sampling.grammar and "time" not in calling.sampling.grammar
    assert choosing.input_ids == calling.input_ids
    if tgi:
        assert call == {
            "id": "0",
            "type": "function",
            "function": {"description": None, "name": "weather", "arguments": '{"city":"Rome"}'},
        }
        assert choice["finish_reason"] == "stop" and "content" not in choice["message"]
    else:
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert choice["finish_reason"] == "tool_calls"


def test_a_choice_of_a_name_is_counted_with_its_answer(make_server):
    server = make_server()
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    names = ("success_total", "duration_count", "input_length_count", "generated_tokens_count", "queue_duration_count")
    for stream in (False, True):
        server.engine.scripts = [script('{"function": {"_name": "no_tool"'), script("Hello")]
        assert server.post(PATH, CHAT | {"tools": TOOLS, "stream": stream}).status == 200
        assert {server.metric(f"tgi_request_{name}") for name in names} == {1.0 + stream}
        assert server.metric("tgi_request_time_to_first_token_duration_count") == 1 + stream
    server.engine.scripts = [Script(ends_after=(0, Ended(EndReason.FAILED, cause="boom")))]
    assert server.post(PATH, CHAT | {"tools": TOOLS}).status == 500
    assert server.failures("generation") == 1 and server.metric("tgi_request_success_total") == 2
    server.engine.limits = type(server.engine.limits)(9, 20, 9000)
    assert server.post(PATH, CHAT | {"tools": TOOLS}).status == 400
    assert server.failures("validation") == 1 and server.permits.left == 4


def test_an_answer_in_words_has_a_prompt_without_tools(make_server):
    server = make_server()
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script('{"function": {"_name": "no_tool"'), script("Hello")]
    choice = server.post(PATH, CHAT | {"tools": TOOLS}).json["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello"} and choice["finish_reason"] == "stop"
    choosing, answering = (asked.request for asked in server.engine.asked)
    assert len(answering.input_ids) < len(choosing.input_ids) / 4 and not answering.sampling.grammar


@pytest.mark.parametrize("choice", ["required", "weather", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_needs_no_choice_first(make_server, choice):
    server = make_server()
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script('{"function": {"_name": "weather", "city": "Rome"}}')]
    body = CHAT | {"tools": TOOLS, "tool_choice": choice, "stream": True}
    chunks = [event["choices"][0] for event in server.post(PATH, body).events[:-1]]
    [call] = joined(chunks)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert ("time" in server.engine.asked[0].request.sampling.grammar) == (choice == "required")


def test_tgis_stream_of_a_call(make_server):
    server = make_server(tgi_dialect=True)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script('{"function": {"_name": "weather", "city": "Rome"}}')]
    body = CHAT | {"tools": TOOLS, "tool_choice": "weather", "stream": True}
    events = server.post(PATH, body).events[:-1]
    chunks = [ChatChunkJson.model_validate(event) and event["choices"][0] for event in events]
    deltas = [chunk["delta"] for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert all(delta["role"] == "assistant" for delta in deltas)
    calls = [delta["tool_calls"][0] for delta in deltas]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["function"]["arguments"].startswith("{")
    assert {call["id"] for call in calls} == {"0"} and {call["index"] for call in calls} == {0}
    assert all(call["function"]["name"] is None for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    assert chunks[-1]["finish_reason"] == "stop"
    server.engine.scripts = [script('{"function": {"_name": "weather", "city": "Rome"}}')] * 2
    body |= {"logprobs": True, "return_token_ids": True}
    [whole] = server.post(PATH, body | {"stream": False}).json["choices"]
    chunks = [event["choices"][0] for event in server.post(PATH, body).events[1:-1]]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == whole["token_ids"]
    assert [row for chunk in chunks for row in chunk["logprobs"]["content"]] == whole["logprobs"]["content"]


@pytest.mark.parametrize(
    ("fields", "tgis", "text"),
    [
        ({"tool_choice": "x"}, False, "Tool error: Tool with name x not found"),
        ({"tool_choice": "x"}, True, "Tool error: Tool with name x not found"),
        (
            {"response_format": {"type": "json_object", "value": {"properties": {}}}},
            True,
            "Tool error: Grammar and tools are mutually exclusive",
        ),
    ],
)
def test_what_does_not_go_together_costs_nothing(make_server, fields, tgis, text):
    server = make_server(tgi_dialect=tgis)
    answer = server.post(PATH, CHAT | {"tools": TOOLS} | fields)
    assert answer.status == (422 if tgis else 400) and text in answer.told["error"]
    assert not server.engine.asked


def test_a_large_body_is_answered_as_a_small_one(make_server):
    lengths = []
    for count in (20, 45_000):
        server = make_server(payload_limit=10**6)
        server.engine.limits = type(server.engine.limits)(400_000, 500_000, 900_000)
        server.engine.scripts = [script('{"function": {"_name": "no_tool"'), script("Hello")]
        body = {"messages": [{"role": "user", "content": "x " * count}], "tools": TOOLS}
        assert server.post(PATH, body).json["choices"][0]["message"]["content"] == "Hello"
        lengths.append([len(asked.request.input_ids) for asked in server.engine.asked])
        assert bool(server.offload.done) == (count > 20)
    (small, small_plain), (large, large_plain) = lengths
    assert small - small_plain == large - large_plain > 100


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{CALL}"], ["Hello", f"Hello {CALL}"]),
        ({"tool_choice": "weather"}, [CALL], [CALL.replace("weather", "time"), f"{CALL}\n{CALL}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{CALL}\n{CALL}"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "number"}}}},
            [CALL, "12.5"],
            ["Hello"],
        ),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_grammar_guides_calls_in_the_models_own_way(make_server, fields, allowed, refused, thinks):
    server = make_server(template=THINKING if thinks else HERMES)
    asks(server, CALL, tools=TOOLS, **fields)
    grammar = server.engine.asked[0].request.sampling.grammar
    before = "<think>Hm, a } and a <tool_call>.</think>\n" if thinks else ""
    for text in allowed:
        assert is_allowed(grammar, before + text), text
    for text in refused:
        assert not is_allowed(grammar, before + text), text


def test_a_strict_tool_is_guided_and_other_text_stays_free(make_server):
    server = make_server(template=HERMES)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    asks(server, CALL, tools=strict)
    grammar = server.engine.asked[0].request.sampling.grammar
    assert all(is_allowed(grammar, text) for text in ("Hello", CALL, f"Well. {CALL}"))
    assert not is_allowed(grammar, CALL.replace('"Rome"', "3")) and not is_allowed(grammar, "<tool_call>no")


def test_a_schema_that_no_grammar_can_follow_is_refused_for_strict_tools_only(make_server):
    server = make_server(template=HERMES)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    server.engine.scripts = [script(CALL)]
    assert server.post(PATH, body).status == 200
    function["strict"] = True
    answer = server.post(PATH, body)
    assert answer.status == 400 and "`uniqueItems` is not supported" in answer.told["error"]


NOT_OBJECTS = (
    {"type": "integer"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "array"}, {"const": 5}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"enum": ["x"]}}},
)


@pytest.mark.parametrize("schema", NOT_OBJECTS, ids=str)
def test_a_function_is_refused_by_its_name_if_its_arguments_cannot_be_an_object(make_server, schema):
    tools = [TOOLS[0], {"type": "function", "function": {"name": "odd", "parameters": schema}}]
    for template in (HERMES, None):
        server = make_server(**({} if template is None else {"template": template}))
        for choice in ("auto", "required", "odd"):
            answer = server.post(PATH, CHAT | {"tools": tools, "tool_choice": choice})
            assert answer.status == 400 and answer.json["error"]["param"] == "tools"
            assert "`odd` must be of the type object, not" in answer.told["error"] and not server.engine.asked
    flat = [{"type": "function"} | tools[1]["function"]]
    assert "`odd`" in server.post("/v1/responses", {"input": "Hi", "tools": flat}).told["error"]


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "llama4"])
@pytest.mark.parametrize(
    "schema",
    [{"type": ["object", "null"]}, {"type": ["integer", "object"]}, {"anyOf": [{"type": "object"}, {"const": 5}]}],
)
def test_arguments_that_may_be_an_object_are_one(make_server, name, schema):
    server = make_server(template=HERMES, tool_call_format=name)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    assert server.post(PATH, CHAT | {"tools": tools, "tool_choice": "required"}).status == 200
    grammar = server.engine.asked[0].request.sampling.grammar
    given, wrong = {
        "hermes": (CALL.replace('{"city": "Rome"}', "{}"), CALL.replace('{"city": "Rome"}', "5")),
        "qwen3-coder": ("<tool_call>\n<function=weather>\n</function>\n</tool_call>", "<tool_call>\n5"),
        "llama4": ("[weather()]", "[weather(5)]"),
    }[name]
    assert is_allowed(grammar, given) and not is_allowed(grammar, wrong)
    if name == "hermes":
        assert not is_allowed(grammar, CALL.replace('{"city": "Rome"}', "null"))


def test_a_limit_of_reasoning_needs_reasoning_with_an_end_of_one_token(make_server):
    for template, text in ((HERMES, "shows no reasoning"), (THINKING, "is not one token")):
        answer = make_server(template=template).post(PATH, CHAT | {"max_thinking_tokens": 5})
        assert answer.status == 400 and text in answer.told["error"]
        assert answer.json["error"]["param"] == "max_thinking_tokens"


def test_usage_counts_the_tokens_of_the_reasoning(make_server):
    server = make_server(template=THINKING)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script("<think>Hm.</think>Yes.", 7), script("<think>Hm.</think>Yes.", 7)]
    whole = server.post(PATH, CHAT).json["usage"]
    events = server.post(PATH, CHAT | {"stream": True, "stream_options": {"include_usage": True}}).events
    ChatChunkJson.model_validate(events[-2])
    assert whole == events[-2]["usage"] and 0 < whole["completion_tokens_details"]["reasoning_tokens"] < 4


@pytest.mark.parametrize("template", [None, HERMES])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schema", TABLES["nonsense"])
def test_a_schema_that_makes_no_sense_is_refused_or_counts_as_any_object(make_server, template, strict, schema):
    server = make_server(**({} if template is None else {"template": template}))
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script(CALL if template else '{"function": {"_name": "f"}}')]
    function = {"name": "f", "parameters": schema, "strict": strict}
    body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    answer = server.post(PATH, body)
    assert answer.status == 200 or (answer.status == 400 and answer.json["error"]["param"] == "tools")


def test_a_name_is_chosen_where_only_a_few_tokens_fit_behind_the_prompt(make_server):
    server = make_server()
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.scripts = [script('{"function": {"_name": "no_tool"'), script("Hello")] * 2
    body = CHAT | {"tools": TOOLS, "max_tokens": 5}
    assert server.post(PATH, body).status == 200
    length = len(server.engine.asked[0].request.input_ids)
    server.engine.limits = type(server.engine.limits)(length, length + 9, 9000)
    assert server.post(PATH, body).json["choices"][0]["message"]["content"] == "Hello"
