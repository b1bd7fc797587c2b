"""Checks the calls of OpenAI's client against the server at argv[1]."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import openai
import pydantic
from checks import MESSAGES, PROMPT, Call, Checks, async_call, check_results, check_usage, error_of, sync_call

MODEL = "tgi"
CHAT = "chat.completions.create"
COMPLETION = "completions.create"
NEUTRAL = {"n": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}


def models(call: Call) -> None:
    (model,) = call("models.list").data
    assert model.id and model.object == "model"


def chat(call: Call) -> None:
    answer = call(CHAT, model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0.0, seed=3, **NEUTRAL)
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and answer.usage.completion_tokens <= 12
    check_usage(answer.usage)


def chat_with_an_unknown_model_name(call: Call) -> None:
    (model,) = call("models.list").data
    assert call(CHAT, model="whatever", messages=MESSAGES, max_tokens=2).model == model.id
    assert call("models.retrieve", model.id).id == model.id


def chats_have_ids_and_several_choices(call: Call) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 1.0}
    answer = call(CHAT, n=3, seed=5, **options)
    assert answer.id.startswith("chatcmpl-") and [choice.index for choice in answer.choices] == [0, 1, 2]
    alone = call(CHAT, seed=6, **options)
    assert alone.choices[0].message.content == answer.choices[1].message.content and alone.id != answer.id
    chunks = call(CHAT, n=3, stream=True, **options)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].finish_reason) == [0, 1, 2]


def chat_logprobs(call: Call) -> None:
    answer = call(CHAT, model=MODEL, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, temperature=0)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(bytes(entry.bytes).decode(errors="replace") for entry in entries)


def chat_stream(call: Call) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = call(CHAT, **options)
    *chunks, last = call(CHAT, stream=True, stream_options={"include_usage": True}, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in chunks)
    assert call(CHAT, stream=True, **options)[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def chat_stops(call: Call) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    text = call(CHAT, **options).choices[0].message.content
    (choice,) = call(CHAT, stop=[text[2:4]], **options).choices
    assert (choice.message.content, choice.finish_reason) == (text[:2], "stop")


def completion(call: Call) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 7}
    first, second = (call(COMPLETION, **options) for _ in range(2))
    assert first.object == "text_completion" and first.choices == second.choices and first.choices[0].text
    check_usage(first.usage)


def completion_of_several_prompts(call: Call) -> None:
    prompts = [PROMPT, "The dog", "One day"]
    options = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    answer = call(COMPLETION, prompt=prompts, **options)
    alone = [call(COMPLETION, prompt=prompt, **options) for prompt in prompts]
    texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == {index: one.choices[0].text for index, one in enumerate(alone)}
    assert answer.usage.total_tokens == sum(one.usage.total_tokens for one in alone)


def completion_stream(call: Call) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
    whole = call(COMPLETION, **options)
    chunks = [chunk for chunk in call(COMPLETION, stream=True, **options) if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


RESPONSE = "responses.create"
LOGPROBS = "message.output_text.logprobs"
FIRST_EVENTS = ("created", "in_progress", "output_item.added")
ASKED = {"model": MODEL, "input": MESSAGES, "max_output_tokens": 24, "temperature": 0}


def response(call: Call) -> None:
    answer = call(RESPONSE, **ASKED)
    assert (answer.output_text, answer.status, answer.object) == ("2 + 3 = 5", "completed", "response")
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_") and answer.error is None
    usage = answer.usage
    assert usage.input_tokens > 0 and usage.total_tokens == usage.input_tokens + usage.output_tokens
    cut = call(RESPONSE, **ASKED | {"max_output_tokens": 1})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert call(RESPONSE, **ASKED | {"input": MESSAGES[0]["content"]}).output_text == answer.output_text
    assert call(RESPONSE, instructions="Be short.", metadata={"a": "b"}, **ASKED).metadata == {"a": "b"}


def response_stream(call: Call) -> None:
    whole = call(RESPONSE, include=[LOGPROBS], top_logprobs=2, **ASKED)
    events = call(RESPONSE, include=[LOGPROBS], top_logprobs=2, stream=True, **ASKED)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text and len(deltas) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [f"response.{name}" for name in FIRST_EVENTS]
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == whole.output_text
    assert len(last.response.output[0].content[0].logprobs) == last.response.usage.output_tokens
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def responses_go_on(call: Call) -> None:
    """A conversation is continued with the items of an answer."""
    first = call(RESPONSE, **ASKED)
    given = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in first.output), *MESSAGES]
    assert call(RESPONSE, **ASKED | {"input": given}).output_text
    refused("previous_response_id", partial(call, RESPONSE, previous_response_id=first.id, **ASKED))
    refused("frequency_penalty", partial(call, RESPONSE, extra_body={"frequency_penalty": 3.0}, **ASKED))


# Short enough for any model: the arguments are one of a few words.
WORDS = {"type": "string", "enum": ["five", "six"]}
SCHEMA = {"type": "object", "properties": {"word": WORDS}, "required": ["word"], "additionalProperties": False}
FUNCTION = {"type": "function", "name": "say", "description": "Says a word.", "parameters": SCHEMA, "strict": True}


def response_calls(call: Call) -> None:
    asked = ASKED | {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
    whole = call(RESPONSE, **asked | {"max_output_tokens": 100})
    (item,) = (item for item in whole.output if item.type == "function_call")
    assert item.name == "say" and json.loads(item.arguments)["word"] in WORDS["enum"], item
    events = call(RESPONSE, stream=True, **asked | {"max_output_tokens": 100})
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(parts) == done.arguments == item.arguments
    assert events[-1].response.output[-1].call_id
    # A tool that OpenAI's own servers run is left out, unless the request demands its call.
    search = {"tools": [{"type": "web_search"}]}
    assert call(RESPONSE, **ASKED | search).output_text == call(RESPONSE, **ASKED).output_text
    refused("tool_choice", partial(call, RESPONSE, **ASKED | search | {"tool_choice": {"type": "web_search"}}))


def results_of_response_calls(folder: str, call: Call) -> None:
    """A call and its output are items of the input that follows, as the client gives them back."""
    asked = ASKED | {"max_output_tokens": 100, "tools": [FUNCTION]}
    first = call(RESPONSE, tool_choice="required", parallel_tool_calls=False, **asked)
    (made,) = (item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "It is said."}
    given = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in first.output), output]

    def go_on() -> None:
        for options in ({"tool_choice": "none"}, {"tool_choice": "auto"}, {"tools": []}):
            answer = call(RESPONSE, **asked | {"input": given} | options)
            assert answer.output and answer.usage.input_tokens > call(RESPONSE, **asked | options).usage.input_tokens
            last = call(RESPONSE, stream=True, **asked | {"input": given} | options)[-1]
            assert last.response.output_text == answer.output_text
        parts = output | {"output": [{"type": "input_text", "text": "It is said."}]}
        assert call(RESPONSE, **asked | {"input": [*given[:-1], parts], "tools": []}).usage == answer.usage

    check_results(folder, openai.BadRequestError, go_on)


class Word(pydantic.BaseModel):
    word: Literal["five", "six"]


def response_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(text_format=Word, **ASKED | {"max_output_tokens": 100})
    assert answer.output_parsed.word in ("five", "six")
    with client.responses.stream(text_format=Word, **ASKED | {"max_output_tokens": 100}) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def refused(text: str, action: Callable[[], object]) -> None:
    """Checks that `action` is refused, and that what the client prints names the field."""
    error = error_of(openai.BadRequestError, action)
    assert text in str(error) and error.param == text and error.type == "invalid_request_error", error
    assert error.request_id


def too_long_prompts_have_a_code(call: Call) -> None:
    long = [{"role": "user", "content": "word " * 5000}]
    error = error_of(openai.BadRequestError, partial(call, CHAT, model=MODEL, messages=long))
    assert error.code == "context_length_exceeded" and "must have less than" in str(error)


def token_ids_and_lists_of_them(call: Call) -> None:
    options = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    answer = call(COMPLETION, prompt=[[5, 6], [7]], **options)
    assert answer.usage.prompt_tokens == 3
    for choice, ids in zip(answer.choices, ([5, 6], [7]), strict=True):
        assert call(COMPLETION, prompt=ids, **options).choices[0].text == choice.text


def errors_of_the_server(call: Call) -> None:
    for stream in (False, True):
        for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": PROMPT})):
            action = partial(call, path, model=MODEL, stream=stream, **body)
            refused("frequency_penalty", partial(action, frequency_penalty=3.0))
            refused("max_tokens", partial(action, max_tokens="many"))
    refused("messages", partial(call, CHAT, model=MODEL, messages="hello"))


def unknown_route(call: Call) -> None:
    error_of(openai.NotFoundError, partial(call, "embeddings.create", model=MODEL, input="a"))


def stream_helper(client: openai.OpenAI) -> None:
    """The helper that puts a chat's chunks together: the role must come once."""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.role == "assistant" and message.content


def response_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASKED) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "2 + 3 = 5" and final.status == "completed"


def main(url: str, folder: str) -> None:
    checks = Checks(f"openai {openai.__version__}")
    options = {"base_url": f"{url}/v1", "api_key": "-", "max_retries": 0, "timeout": 60}
    for kind, call in (
        ("sync", sync_call(lambda: openai.OpenAI(**options))),
        ("async", async_call(lambda: openai.AsyncOpenAI(**options))),
    ):
        checks.run_module(globals(), kind, call=call, folder=folder)
    checks.run_module(globals(), client=openai.OpenAI(**options))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
