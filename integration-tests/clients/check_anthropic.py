"""Checks the calls of Anthropic's client against the server at argv[1]."""

import json
import sys
from functools import partial
from typing import Any

import anthropic
from checks import MESSAGES, Call, Checks, async_call, check_results, error_of, sync_call

MODEL = "tgi"
CREATE, COUNT = "messages.create", "messages.count_tokens"
GREEDY = {"extra_body": {"temperature": 0}}
OPTIONS: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **GREEDY}


def message(call: Call) -> None:
    answer = call(CREATE, **OPTIONS)
    (block,) = answer.content
    assert (answer.type, answer.role, block.type, block.text) == ("message", "assistant", "text", "2 + 3 = 5")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None) and answer.id.startswith("msg_")
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0 and answer.usage.output_tokens > 0
    assert answer._request_id and answer.id == f"msg_{answer._request_id}"


def system_of_several_blocks(call: Call) -> None:
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": "Be short.", "cache_control": cached}, {"type": "text", "text": "Be kind."}]
    assert call(CREATE, system=system, metadata={"user_id": "a"}, **OPTIONS).content[0].text


def stream_is_the_answer_in_parts(call: Call) -> None:
    whole = call(CREATE, **OPTIONS)
    events = call(CREATE, stream=True, **OPTIONS)
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(texts) == whole.content[0].text and len(texts) > 1
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


def stops(call: Call) -> None:
    text = call(CREATE, **OPTIONS).content[0].text
    answer = call(CREATE, stop_sequences=["no such", text[2:4]], **OPTIONS)
    found = answer.content[0].text, answer.stop_reason, answer.stop_sequence
    assert found == (text[:2], "stop_sequence", text[2:4])
    cut = call(CREATE, **OPTIONS | {"max_tokens": 1})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)


def count_is_that_of_the_prompt(call: Call) -> None:
    usage = call(CREATE, **OPTIONS).usage
    counted = call(COUNT, model=MODEL, messages=MESSAGES).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert call(COUNT, model=MODEL, messages=MESSAGES, system="Be short.").input_tokens > counted


def messages_go_on(call: Call) -> None:
    """A conversation is continued with the blocks of an answer."""
    first = call(CREATE, **OPTIONS)
    answered = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    turns = {"messages": [*MESSAGES, answered, *MESSAGES]}
    assert call(CREATE, **OPTIONS | turns).content[0].text
    assert call("beta.messages.create", betas=["a-feature"], **OPTIONS | turns).content[0].text


# Short enough for any model: the arguments are one of a few words.
WORDS = {"type": "string", "enum": ["five", "six"]}
SCHEMA = {"type": "object", "properties": {"word": WORDS}, "required": ["word"], "additionalProperties": False}
TOOL = {"name": "say", "description": "Says a word.", "input_schema": SCHEMA}


def calls(call: Call) -> None:
    asked = OPTIONS | {"max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "say"}}
    whole = call(CREATE, **asked)
    (block,) = (block for block in whole.content if block.type == "tool_use")
    assert (block.name, whole.stop_reason) == ("say", "tool_use") and block.input["word"] in WORDS["enum"]
    events = call(CREATE, stream=True, **asked)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    arguments = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    assert json.loads(arguments) == block.input and events[-2].delta.stop_reason == "tool_use"
    assert call(COUNT, model=MODEL, messages=MESSAGES, tools=[TOOL]).input_tokens > 0


def results_of_calls(folder: str, call: Call) -> None:
    """A call's result, beside a text of the user's, and an error as a result."""
    asked = OPTIONS | {"max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "say"}}
    content = call(CREATE, **asked).content
    called = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in content]}
    (made,) = (block for block in content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": made.id, "content": [{"type": "text", "text": "It is said."}]}
    text = {"type": "text", "text": "What is 2 + 3?"}

    def go_on() -> None:
        counts = []
        for results in ([result], [result, text], [result | {"is_error": True}, text]):
            told = [*MESSAGES, called, {"role": "user", "content": results}]
            for options in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}}, {}):
                answer = call(CREATE, **OPTIONS | {"messages": told} | options)
                assert answer.content and answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
            events = call(CREATE, stream=True, **OPTIONS | {"messages": told})
            texts = [event.delta.text for event in events if event.type == "content_block_delta"]
            assert "".join(texts) == answer.content[0].text
            counts.append(call(COUNT, model=MODEL, messages=told).input_tokens)
        assert counts[0] < counts[1] < counts[2]  # "Error: " stands before the text of an error
        again = call(CREATE, **asked | {"messages": told})
        assert again.stop_reason == "tool_use" and again.content[0].id != made.id

    check_results(folder, anthropic.BadRequestError, go_on)


def form(call: Call) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = call(CREATE, output_config=config, **OPTIONS | {"max_tokens": 100})
    assert json.loads(answer.content[0].text)["word"] in WORDS["enum"]


def errors_of_the_server(call: Call) -> None:
    for stream in (False, True):
        wrong = OPTIONS | {"extra_body": {"frequency_penalty": 3.0}}
        error = error_of(anthropic.BadRequestError, partial(call, CREATE, stream=stream, **wrong))
        assert "`frequency_penalty`" in str(error) and error.request_id, error
        assert error.body["error"]["type"] == "invalid_request_error"
    long = OPTIONS | {"messages": [{"role": "user", "content": "word " * 5000}]}
    error = error_of(anthropic.BadRequestError, partial(call, CREATE, **long))
    assert "prompt is too long" in str(error)


def stream_helper(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**OPTIONS) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == "2 + 3 = 5"
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 0


def models(call: Call) -> None:
    listed = call("models.list")
    (model,) = listed.data
    assert (model.type, listed.has_more, listed.first_id) == ("model", False, model.id) and model.display_name
    assert call("models.retrieve", model_id=model.id).id == model.id


def main(url: str, folder: str) -> None:
    checks = Checks(f"anthropic {anthropic.__version__}")
    options = {"base_url": url, "api_key": "-", "max_retries": 0, "timeout": 60}
    for kind, call in (
        ("sync", sync_call(lambda: anthropic.Anthropic(**options))),
        ("async", async_call(lambda: anthropic.AsyncAnthropic(**options))),
    ):
        checks.run_module(globals(), kind, call=call, folder=folder)
    checks.run_module(globals(), client=anthropic.Anthropic(**options))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
