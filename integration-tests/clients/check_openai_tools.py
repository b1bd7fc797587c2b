"""Checks the tools and the structured output of OpenAI's client in chats against the server at argv[1]."""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai
from checks import (
    MESSAGES,
    SCHEMA,
    TOOLS,
    WORDS,
    Call,
    Checks,
    async_call,
    check_arguments,
    check_results,
    error_of,
    sync_call,
)
from pydantic import BaseModel, Field

CHAT, PARSE = "chat.completions.create", "chat.completions.parse"
ASKED: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "max_tokens": 100, "temperature": 0}
ONE_CALL = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "say"}}
FORM = {"type": "json_schema", "json_schema": {"name": "say", "schema": SCHEMA, "strict": True}}


# The client sends the docstrings of these two classes as the descriptions of the tools `Say` and `Count`.
class Say(BaseModel):
    """Says a word."""

    word: Literal["five", "six"]


class Count(BaseModel):
    """Counts to a number."""

    number: int = Field(ge=0, le=9)


def check_calls(message: Any, names: tuple[str, ...] = ("say", "count")) -> None:
    """A message that calls at least one of the tools, each with an id of its own and arguments of its schema."""
    assert message.role == "assistant" and not message.content and message.tool_calls, message
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    for made in message.tool_calls:
        assert made.id and made.type == "function" and made.function.name in names, made
        check_arguments(made.function.name, made.function.arguments)


def auto(call: Call) -> None:
    """The model answers with text or with calls."""
    answer = call(CHAT, tools=TOOLS, **ASKED)
    (choice,) = answer.choices
    if choice.message.tool_calls:
        assert choice.finish_reason == "tool_calls"
    else:
        assert choice.message.content and choice.finish_reason in ("stop", "length")
    assert call(CHAT, tools=TOOLS, tool_choice="auto", **ASKED).choices[0].finish_reason == choice.finish_reason
    assert call(CHAT, tools=TOOLS, tool_choice="none", **ASKED).choices == call(CHAT, **ASKED).choices


def required(call: Call) -> None:
    (choice,) = call(CHAT, **ONE_CALL).choices
    check_calls(choice.message)
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    several = call(CHAT, **ONE_CALL | {"parallel_tool_calls": True, "max_tokens": 300}).choices[0]
    assert several.message.tool_calls and several.finish_reason in ("tool_calls", "length")


def named(call: Call) -> None:
    (choice,) = call(CHAT, **ONE_CALL | {"tool_choice": NAMED}).choices
    check_calls(choice.message, names=("say",))
    assert len(choice.message.tool_calls) == 1
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "count"}}]}
    choice = call(CHAT, **ONE_CALL | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}).choices[0]
    check_calls(choice.message, names=("count",))


def strict(call: Call) -> None:
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    check_calls(call(CHAT, **ONE_CALL | {"tools": strict}).choices[0].message)
    message = call(CHAT, tools=strict, **ASKED).choices[0].message
    if message.tool_calls:
        check_calls(message)


def calls_of_several_choices(call: Call) -> None:
    choices = call(CHAT, n=3, seed=5, **ONE_CALL | {"temperature": 1.0}).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls"] * 3
    for choice in choices:
        check_calls(choice.message)
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3


def stream_of_calls(call: Call) -> None:
    """The first part of a call has its id and name, and the parts of its arguments are those of the whole answer."""
    (made,) = call(CHAT, **ONE_CALL).choices[0].message.tool_calls
    *chunks, last = call(CHAT, stream=True, stream_options={"include_usage": True}, **ONE_CALL)
    first, *parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert first.id and (first.type, first.function.name, first.index) == ("function", made.function.name, 0)
    assert parts and all(part.index == 0 and not part.function.name for part in parts)
    arguments = "".join(part.function.arguments or "" for part in (first, *parts))
    assert arguments == made.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls" and last.usage.completion_tokens > 0


def results_of_calls(folder: str, call: Call) -> None:
    """A conversation with a tool call of the assistant and the call's result is answered: with the tools in the
    request, with `tool_choice` "none", and without tools."""
    message = call(CHAT, **ONE_CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is done."}
    told = [*MESSAGES, message.model_dump(exclude_none=True), result]

    def go_on(options: dict[str, Any]) -> None:
        answer = call(CHAT, **ASKED | {"messages": told} | options)
        (choice,) = answer.choices
        assert choice.message.content or choice.message.tool_calls
        assert answer.usage.prompt_tokens > call(CHAT, **ASKED | options).usage.prompt_tokens

    for options in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        check_results(folder, openai.BadRequestError, partial(go_on, options))


def forms(call: Call) -> None:
    """The form of an answer, as a whole and as a stream."""
    for options in (
        {"response_format": FORM},
        {"extra_body": {"guided_choice": [json.dumps({"word": word}) for word in WORDS]}},
        {"extra_body": {"structured_outputs": {"regex": '\\{"word": "(five|six)"\\}'}}},
    ):
        (choice,) = call(CHAT, **ASKED, **options).choices
        assert choice.finish_reason == "stop"
        check_arguments("say", choice.message.content)
        chunks = call(CHAT, stream=True, **ASKED, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    text = call(CHAT, response_format={"type": "json_object"}, **ASKED).choices[0].message.content
    assert text.startswith("{")


def form_beside_tools(call: Call) -> None:
    """An answer in words has the form, and a call has the form of its tool."""
    message = call(CHAT, **ASKED, tools=TOOLS, tool_choice="none", response_format=FORM).choices[0].message
    check_arguments("say", message.content)
    check_calls(call(CHAT, **ONE_CALL, response_format=FORM).choices[0].message)


def parse_of_a_model(call: Call) -> None:
    message = call(PARSE, response_format=Say, **ASKED).choices[0].message
    assert isinstance(message.parsed, Say) and message.refusal is None


def parse_of_tools(call: Call) -> None:
    tools = [openai.pydantic_function_tool(Say), openai.pydantic_function_tool(Count)]
    (made,) = call(PARSE, **ONE_CALL | {"tools": tools}).choices[0].message.tool_calls
    assert isinstance(made.function.parsed_arguments, {"Say": Say, "Count": Count}[made.function.name])
    both = call(PARSE, response_format=Say, tool_choice="none", tools=tools, **ASKED).choices[0].message
    assert isinstance(both.parsed, Say) and not both.tool_calls


def parse_of_a_cut_answer(call: Call) -> None:
    cut = ASKED | {"max_tokens": 2}
    error_of(openai.LengthFinishReasonError, partial(call, PARSE, response_format=Say, **cut))


def errors_name_the_field(call: Call) -> None:
    unique = SCHEMA | {"properties": {"words": {"type": "array", "uniqueItems": True}}, "required": ["words"]}
    unsupported = {"type": "function", "function": {"name": "say", "parameters": unique, "strict": True}}
    for stream in (False, True):
        refused = partial(_refused, partial(call, CHAT, stream=stream))
        refused("tools", "uniqueItems", ONE_CALL | {"tools": [unsupported]})
        refused("tools", "two functions named `say`", ONE_CALL | {"tools": [TOOLS[0], TOOLS[0]]})
        refused("tools[0].type", "`custom` is not supported", ONE_CALL | {"tools": [{"type": "custom"}]})
        refused("tool_choice", "at least one tool", ASKED | {"tool_choice": "required"})
        form = {"type": "json_schema", "json_schema": {"name": "say", "schema": unique, "strict": True}}
        refused("response_format", "uniqueItems", ASKED | {"response_format": form})
    # TGI's error for a tool that is not there.
    missing = {"type": "function", "function": {"name": "sing"}}
    error = error_of(openai.APIStatusError, partial(call, CHAT, **ONE_CALL | {"tool_choice": missing}))
    assert error.status_code in (400, 422) and "sing" in str(error), error


def _refused(action: Callable[..., object], param: str, text: str, options: dict[str, Any]) -> None:
    error = error_of(openai.BadRequestError, partial(action, **options))
    assert error.param == param and text in str(error), error


def streamed(options: dict[str, Any], **asked: Any) -> tuple[list[Any], Any]:
    """The events of the helper for streams, and the message that it puts together."""
    with openai.OpenAI(**options).chat.completions.stream(**asked) as stream:
        return list(stream), stream.get_final_completion().choices[0]


def streamed_async(options: dict[str, Any], **asked: Any) -> tuple[list[Any], Any]:
    async def read() -> tuple[list[Any], Any]:
        async with openai.AsyncOpenAI(**options) as client, client.chat.completions.stream(**asked) as stream:
            return [event async for event in stream], (await stream.get_final_completion()).choices[0]

    return asyncio.run(read())


def stream_helper_of_tools(stream: Callable[..., tuple[list[Any], Any]]) -> None:
    tools = [openai.pydantic_function_tool(Say), openai.pydantic_function_tool(Count)]
    events, choice = stream(**ONE_CALL | {"tools": tools})
    (made,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and made.id
    assert isinstance(made.function.parsed_arguments, {"Say": Say, "Count": Count}[made.function.name])
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = (event for event in events if event.type == "tool_calls.function.arguments.done")
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == made.function.arguments
    assert done.parsed_arguments == made.function.parsed_arguments and done.name == made.function.name


def stream_helper_of_a_form(stream: Callable[..., tuple[list[Any], Any]]) -> None:
    events, choice = stream(**ASKED, response_format=Say)
    assert isinstance(choice.message.parsed, Say)
    (done,) = (event for event in events if event.type == "content.done")
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == done.content == choice.message.content and done.parsed == choice.message.parsed


def main(url: str, folder: str) -> None:
    checks = Checks(f"openai {openai.__version__}, tools")
    options = {"base_url": f"{url}/v1", "api_key": "-", "max_retries": 0, "timeout": 60}
    for kind, call, stream in (
        ("sync", sync_call(lambda: openai.OpenAI(**options)), streamed),
        ("async", async_call(lambda: openai.AsyncOpenAI(**options)), streamed_async),
    ):
        checks.run_module(globals(), kind, call=call, folder=folder)
        checks.run_module(globals(), kind, stream=partial(stream, options))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
