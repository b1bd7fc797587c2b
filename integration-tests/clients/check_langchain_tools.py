"""Checks the tools and the structured output of langchain-openai against the server at argv[1]."""

import asyncio
import sys
from functools import partial
from typing import Any, Literal

from check_langchain_openai import QUESTION, Models
from checks import SCHEMA, TOOLS, Checks, check_arguments, check_results
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai.chat_models.base import OpenAIInvalidRequestError
from pydantic import BaseModel, Field
from typing_extensions import TypedDict


class say(BaseModel):  # noqa: N801: the name of the tool
    """Says a word."""

    word: Literal["five", "six"]


@tool
def count(number: Literal[1, 2, 3]) -> str:
    """Counts to a number."""
    return " ".join(str(one) for one in range(1, number + 1))


class Said(TypedDict):
    """Says a word."""

    word: Literal["five", "six"]


def bound(models: Models, tools: Any, wanted: Any, **options: Any) -> Any:
    return models.chat(max_tokens=100).bind_tools(tools, tool_choice=wanted, parallel_tool_calls=False, **options)


def check_one_call(message: AIMessage) -> dict[str, Any]:
    (made,) = message.tool_calls
    assert made["id"] and not message.invalid_tool_calls and not message.content, message
    assert message.response_metadata["finish_reason"] == "tool_calls"
    check_arguments(made["name"], made["args"])
    return made


def bind_tools(models: Models) -> None:
    """Tools as classes, functions and schemas, each with every way to demand a call."""
    for tools in ([say, count], TOOLS):
        for wanted in ("any", "required", True):
            check_one_call(bound(models, tools, wanted).invoke(QUESTION))
        for name in ("say", "count"):
            assert check_one_call(bound(models, tools, name).invoke(QUESTION))["name"] == name
            assert check_one_call(bound(models, tools, name, strict=True).invoke(QUESTION))["name"] == name
    for wanted in ("auto", None):
        message = models.chat().bind_tools(TOOLS, tool_choice=wanted).invoke(QUESTION)
        assert message.content or message.tool_calls or message.invalid_tool_calls
    assert bound(models, TOOLS, "none").invoke(QUESTION).content


def stream_of_calls(models: Models) -> None:
    model = bound(models, [say, count], "say")
    whole = check_one_call(model.invoke(QUESTION))
    chunks = list(model.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    made = check_one_call(total)
    assert (made["name"], made["args"]) == (whole["name"], whole["args"])
    assert sum(bool(part["name"]) for chunk in chunks for part in chunk.tool_call_chunks) == 1


def asynchronous_calls(models: Models) -> None:
    async def calls() -> list[Any]:
        model = bound(models, [say, count], "say")
        whole = check_one_call(await model.ainvoke(QUESTION))
        form = await models.chat(max_tokens=60).with_structured_output(say).ainvoke(QUESTION)
        return [whole["args"], form.model_dump()]

    for arguments in asyncio.run(calls()):
        check_arguments("say", arguments)


def results_of_calls(models: Models, folder: str) -> None:
    """One round of an agent: a call, the function's result, and the answer that follows."""
    message = bound(models, [say, count], "count").invoke(QUESTION)
    result = count.invoke(check_one_call(message))
    assert isinstance(result, ToolMessage) and result.content.startswith("1")
    told = [HumanMessage(QUESTION), message, result]
    for tools in ([say, count], []):
        model = models.chat().bind_tools(tools) if tools else models.chat()
        check_results(folder, OpenAIInvalidRequestError, partial(model.invoke, told))


def structured_output(models: Models) -> None:
    """The methods that demand a schema, of pydantic models, typed dicts and JSON schemas."""
    chat = models.chat(max_tokens=100)
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            made = chat.with_structured_output(say, method=method, strict=strict).invoke(QUESTION)
            assert isinstance(made, say)
        for schema in (Said, {"title": "said", "description": "Says a word."} | SCHEMA):
            check_arguments("say", chat.with_structured_output(schema, method=method).invoke(QUESTION))
        raw = chat.with_structured_output(say, method=method, include_raw=True).invoke(QUESTION)
        assert isinstance(raw["parsed"], say) and raw["parsing_error"] is None and raw["raw"].id
        assert list(chat.with_structured_output(say, method=method).stream(QUESTION))[-1] == raw["parsed"]


class Anything(BaseModel):
    """What any JSON object is."""

    word: Any = Field(default=None)


def structured_output_json_mode(models: Models) -> None:
    """The method that demands any JSON object."""
    asked = f'{QUESTION} Answer as JSON, {{"word": string}}.'
    raw = models.chat(max_tokens=200).with_structured_output(Anything, method="json_mode", include_raw=True)
    message = raw.invoke(asked)["raw"]
    assert message.content.startswith("{")
    assert message.response_metadata["finish_reason"] in ("stop", "length")
    if message.response_metadata["finish_reason"] == "stop":
        assert isinstance(
            models.chat(max_tokens=200).with_structured_output(Anything, method="json_mode").invoke(asked), Anything
        )


if __name__ == "__main__":
    checks = Checks("langchain-openai, tools")
    checks.run_module(globals(), models=Models(sys.argv[1]), folder=sys.argv[2])
    checks.exit()
