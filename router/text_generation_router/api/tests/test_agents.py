"""Bodies as coding agents send them, written from the clients' types: `agent_bodies.json`. Tools and reasoning through
/v1/messages and /v1/responses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from text_generation_router.api.common.agent_lines import without_agent_lines
from text_generation_router.api.tests.conftest import HEADERS
from text_generation_router.api.tests.test_tool_routes import CALL, HERMES, script

BODIES = json.loads((Path(__file__).parent / "agent_bodies.json").read_text())
CASES = [(f"/v1/{route}", name) for route, cases in BODIES.items() for name in cases]
TEXT = f"<think>\nHm.\n</think>\n\nYes.{CALL}"
# This template writes all fields of each message into the prompt.
AGENTS = HERMES.replace(
    "{{ m.content }}",
    "{{ m.content or '' }}{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}",
)
TEMPLATE = AGENTS + "{# <think> #}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
ASKED = {
    "/v1/messages": {
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "weather", "input_schema": WEATHER}],
    },
    "/v1/responses": {"input": "Hi", "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}]},
}


@pytest.fixture(params=[False, True], ids=["", "TGI's dialect"])
def agents_server(make_server, request):
    """A server with and without TGI's dialect, which changes nothing on these routes: TGI does not have them."""
    server = make_server(template=TEMPLATE, tgi_dialect=request.param)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    server.engine.script = script(TEXT)
    return server


def prompt_of(server: Any) -> str:
    ids = list(server.engine.asked[-1].request.input_ids)
    return str(server.tokenizer.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(("path", "name"), CASES)
def test_the_body_of_an_agent_is_served_and_no_field_of_it_is_unknown(make_server, path, name):
    server = make_server(template=AGENTS)
    server.engine.limits = type(server.engine.limits)(8000, 9000, 18000)
    server.engine.script = script(CALL)
    case = BODIES[path.rpartition("/")[2]][name]
    answer = server.post(path, case["body"], HEADERS | case["headers"])
    assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, case.get("ignored", "model"))
    told = [event["type"] for event in answer.events]
    assert told[-1] == ("message_stop" if path == "/v1/messages" else "response.completed")
    prompt = prompt_of(server)
    tools = [tool["name"] for tool in case["body"]["tools"] if tool.get("type") in (None, "custom", "function")]
    assert all(f'"{tool}"' in prompt.partition("</tools>")[0] for tool in tools)
    assert "<system>You are a coding agent." in prompt or "ignored" in case
    if "round trip" in name:
        assert "<assistant>I read the file.[I have to read it.](" in prompt
        assert "<tool>" in prompt and "print(1)" in prompt
    if path == "/v1/messages" and "round trip" in name:
        assert "<tool>print(1)<tool>Error: No such file.<user>Go on.<assistant>" in prompt


def test_a_message_has_blocks_of_thinking_text_and_calls(agents_server):
    path = "/v1/messages"
    whole = agents_server.post(path, ASKED[path]).json
    *others, call = whole["content"]
    assert others == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert whole["stop_reason"] == "tool_use" and call["id"].startswith("toolu_")
    thinking = whole["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < thinking < whole["usage"]["output_tokens"] / 2
    events = agents_server.post(path, ASKED[path] | {"stream": True}).events
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert json.loads("".join(arguments)) == {"city": "Rome"} and len(arguments) > 2
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == ["tool_use"]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2]


def test_a_response_has_items_of_reasoning_text_and_calls(agents_server):
    path = "/v1/responses"
    whole = agents_server.post(path, ASKED[path]).json
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes." and whole["status"] == "completed"
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
    assert whole["tools"][0]["name"] == "weather" and whole["tool_choice"] == "auto"
    events = agents_server.post(path, ASKED[path] | {"stream": True}).events
    streamed = events[-1]["response"]["output"]
    assert streamed[:2] == whole["output"][:2] and streamed[2] | {"call_id": ""} == call | {"call_id": ""}
    assert events[-1]["response"]["usage"] == whole["usage"]
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"] / 2
    kinds = {event["type"] for event in events}
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= kinds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"<think>Hm. </think>\n\nYes. {CALL}", ["Yes. "]),
        (f"Yes, <to and {CALL} No.", ["Yes, <to and ", " No.</s>"]),
        ("<think>Hm.</think>Yes.", ["Yes.</s>"]),
        (CALL, []),
        ("", ["</s>"]),
    ],
)
def test_log_probabilities_of_a_response_are_those_of_its_text(agents_server, text, told):
    path = "/v1/responses"
    agents_server.engine.script = script(text, size=1)
    asked = ASKED[path] | {"include": ["message.output_text.logprobs"]}
    whole = agents_server.post(path, asked).json["output"]
    events = agents_server.post(path, asked | {"stream": True}).events
    for output in (whole, events[-1]["response"]["output"]):
        parts = [item["content"][0] for item in output if item["type"] == "message"]
        assert ["".join(entry["token"] for entry in part["logprobs"]) for part in parts] == told
    streamed = [
        entry["token"] for event in events if event["type"].endswith("delta") for entry in event.get("logprobs", ())
    ]
    assert "".join(streamed) == "".join(told)


@pytest.mark.parametrize("path", ASKED)
def test_a_choice_that_asks_for_calls_needs_tools_and_they_need_each_other(agents_server, path):
    required: Any = {"type": "any"} if path == "/v1/messages" else "required"
    for fields, field in (
        ({"tools": None, "tool_choice": required}, "tool_choice"),
        ({"tools": ASKED[path]["tools"] * 2}, "tools"),
    ):
        answer = agents_server.post(path, ASKED[path] | fields)
        assert answer.status == 400 and f"`{field}`" in answer.json["error"]["message"]
    bad = [ASKED[path]["tools"][0] | {"name": "no name!"}]
    answer = agents_server.post(path, ASKED[path] | {"tools": bad})
    assert answer.status == 400 and "tools[0].name" in answer.json["error"]["message"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("tgi", [True, False])
def test_a_large_body_with_tools_is_answered_as_a_small_one(make_server, path, tgi):
    told = []
    for padding in ({}, {"padding": "x" * 2**16}):
        server = make_server(template=TEMPLATE, payload_limit=10**6, tgi_dialect=tgi)
        server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
        server.engine.script = script(TEXT)
        value = server.post(path, ASKED[path] | padding).json
        assert len(server.offload.done) == bool(padding)
        told.append((len(value.get("content", value.get("output"))), prompt_of(server)))
    assert told[0] == told[1] and told[0][0] == 3


def test_a_budget_of_thinking_that_cannot_be_kept_is_refused(agents_server):
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 9}}
    answer = agents_server.post("/v1/messages", ASKED["/v1/messages"] | thinking)  # "</think>" is not one token
    assert answer.status == 400 and "`thinking.budget_tokens`" in answer.json["error"]["message"]


FORMS = {
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}},
    "/v1/responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": WEATHER}}},
}
BAD_FORMS = {
    "/v1/messages": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    "/v1/responses": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
}


@pytest.mark.parametrize("path", ASKED)
def test_the_form_of_the_text_becomes_a_grammar(agents_server, path):
    body = {name: value for name, value in ASKED[path].items() if name != "tools"}
    assert agents_server.post(path, body | FORMS[path]).status == 200
    assert "city" in agents_server.engine.asked[-1].request.sampling.grammar
    fields, name = BAD_FORMS[path]
    answer = agents_server.post(path, body | fields)
    assert answer.status == 400 and f"`{name}`" in answer.json["error"]["message"]


BILLING = "x-anthropic-billing-header: cc_version=2.1.36.1; cc_entrypoint=cli; cch={};"
COUNTER = "<total_tokens>{} tokens left</total_tokens>"
SYSTEM: dict[str, Callable[[int], Any]] = {
    "a block of its own": lambda n: [{"type": "text", "text": BILLING.format(n)}, {"type": "text", "text": "Code."}],
    "a line of the text": lambda n: BILLING.format(n) + "\nCode.",
    "a counter": lambda n: f"Code.\n\n{COUNTER.format(n)}",
    "counters and a line": lambda n: f"{BILLING.format(n)}\nCode.{COUNTER.format(1)}\n{COUNTER.format(n)}",
}
NAMED = {"a counter": "total_tokens", "counters and a line": "x-anthropic-billing-header, total_tokens"}


def asked_with(path: str, system: Any, filler: str) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": COUNTER.format(9)},
        {"role": "user", "content": f"Is this a line? {COUNTER.format(1)}"},
    ]
    if path == "/v1/messages":
        return {"max_tokens": 2, "system": system, "messages": turns, "metadata": {"user_id": filler}}
    if path == "/v1/responses":
        text = system if isinstance(system, str) else "".join(f"{block['text']}\n" for block in system)
        return {"instructions": text, "input": turns, "metadata": {"user_id": filler}}
    turns = [{"role": "system", "content": system}, *turns]
    return {"max_tokens": 2, "messages": turns, "metadata": {"user_id": filler}}


@pytest.mark.parametrize("filler", ["", "x" * 70_000], ids=["", "read in a child"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("case", SYSTEM)
def test_what_agents_write_anew_for_each_request_is_in_no_prompt_and_is_named(make_server, path, case, filler):
    server = make_server(template=AGENTS, payload_limit=100_000)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    prompts = []
    for number in (1, 2):
        answer = server.post(path, asked_with(path, SYSTEM[case](number), filler), HEADERS)
        assert answer.status == 200
        names = NAMED.get(case, "x-anthropic-billing-header")
        assert answer.headers["x-ignored-parameters"] == ", ".join(dict.fromkeys([*names.split(", "), "total_tokens"]))
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1]
    assert "Code." in prompts[0] and "x-anthropic" not in prompts[0]
    assert prompts[0].count("total_tokens") == 2  # one opening and one closing tag: the user's text keeps its line


def test_a_flag_keeps_what_agents_write_anew(make_server):
    server = make_server(template=AGENTS, keep_agent_lines=True)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    answer = server.post("/v1/messages", asked_with("/v1/messages", BILLING.format(1), ""), HEADERS)
    assert answer.status == 200 and "x-ignored-parameters" not in answer.headers
    assert prompt_of(server).count("x-anthropic-billing-header") == 1


def test_many_lines_are_left_out_in_linear_time_and_16_of_them_named():
    text = "".join(f"x-anthropic-{'a' * (n % 60 + 1)}: {n};\n" for n in range(50_000)) + "Code." + "\n" * 50_000
    body, names = without_agent_lines({"system": text + COUNTER.format(1) * 10_000})
    assert body == {"system": "Code."} and len(names) == 16


@pytest.mark.parametrize("filler", ["", "x" * 70_000], ids=["", "read in a child"])
def test_a_call_is_told_in_the_form_of_the_tool_that_the_client_has_sent(make_server, filler):
    tools = [
        {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}]},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        {"type": "web_search"},
    ]
    server = make_server(template=AGENTS, payload_limit=100_000)
    server.engine.limits = type(server.engine.limits)(4000, 5000, 9000)
    asked = {"input": "Hi", "tools": tools, "metadata": {"user_id": filler}}
    written = [("sky__weather", {"city": "Rome"}), ("patch", {"input": 'a "b"\n'})]
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in written]
    server.engine.script = script("".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls))
    answer = server.post("/v1/responses", asked, HEADERS)
    assert answer.headers["x-ignored-parameters"] == "tools[1].format, tools[2].web_search"
    first, second = answer.json["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "sky", "weather")
    assert json.loads(first["arguments"]) == {"city": "Rome"}
    told = ("custom_tool_call", "patch", 'a "b"\n', "completed")
    assert (second["type"], second["name"], second["input"], second["status"]) == told and "arguments" not in second
    assert answer.json["tools"][0]["tools"][0]["name"] == "weather"
    events = server.post("/v1/responses", asked | {"stream": True}, HEADERS).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    without = [{name: item[name] for name in item.keys() - {"id", "call_id"}} for item in (*done, first, second)]
    assert without[:2] == without[2:]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ['a "b"\n']
    history = [
        *answer.json["output"],
        {"type": "custom_tool_call_output", "call_id": second["call_id"], "output": "ok"},
    ]
    assert server.post("/v1/responses", asked | {"input": [{"role": "user", "content": "Hi"}, *history]}).status == 200
    assert '(sky__weather {"city": "Rome"})(patch {"input": "a \\"b\\"\\n"})' in prompt_of(server)
