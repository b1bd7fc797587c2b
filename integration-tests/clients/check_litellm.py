"""Checks litellm's calls, by each of the providers that may name this server, against the server at argv[1]."""

import asyncio
import os
import sys
from functools import partial
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing it downloads a list of prices

import litellm
from checks import MESSAGES, PROMPT, SCHEMA, TOOLS, Checks, check_arguments, check_results, check_usage, raises
from pydantic import BaseModel

litellm.suppress_debug_info = True

PROVIDERS = ("openai", "hosted_vllm")
OPTIONS = {"api_key": "-", "max_tokens": 12, "temperature": 0, "timeout": 60, "max_retries": 0}


def chat(options: dict, provider: str) -> None:
    asked = {"model": f"{provider}/tgi", "messages": MESSAGES, **options}
    answer = litellm.completion(**asked)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason in ("stop", "length")
    check_usage(answer.usage)
    assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == choice.message.content


def chat_stream(options: dict, provider: str) -> None:
    asked = {"model": f"{provider}/tgi", "messages": MESSAGES, **options}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == whole.choices[0].message.content
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == content and built.choices[0].message.role == "assistant"
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    assert built.usage.completion_tokens == whole.usage.completion_tokens


def stop_and_logprobs(options: dict) -> None:
    asked = {"model": "openai/tgi", "messages": MESSAGES, **options}
    text = litellm.completion(**asked).choices[0].message.content
    (choice,) = litellm.completion(stop=[text[2:4]], logprobs=True, top_logprobs=2, **asked).choices
    assert (choice.message.content, choice.finish_reason) == (text[:2], "stop")
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def text_completion(options: dict) -> None:
    asked = {"model": "text-completion-openai/tgi", "prompt": PROMPT, **options}
    whole = litellm.text_completion(**asked)
    assert whole.choices[0].text
    chunks = litellm.text_completion(stream=True, **asked)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices) == whole.choices[0].text


def a_long_prompt_exceeds_the_context_window(options: dict) -> None:
    messages = [{"role": "user", "content": "word " * 5000}]
    action = partial(litellm.completion, model="openai/tgi", messages=messages, **options)
    raises(litellm.ContextWindowExceededError, "must have less than", action)


def errors_name_the_field(options: dict) -> None:
    asked = {"model": "openai/tgi", "messages": MESSAGES, **options}
    raises(litellm.BadRequestError, "frequency_penalty", partial(litellm.completion, frequency_penalty=3.0, **asked))
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    raises(litellm.BadRequestError, "`response_format`", partial(litellm.completion, response_format=schema, **asked))


class Say(BaseModel):
    word: Literal["five", "six"]


def tools(options: dict, provider: str) -> None:
    named = {"type": "function", "function": {"name": "say"}}
    asked = {"model": f"{provider}/tgi", "messages": MESSAGES, **options, "max_tokens": 100, "tools": TOOLS}
    for wanted in ("required", named):
        asked |= {"tool_choice": wanted, "parallel_tool_calls": False}
        (choice,) = litellm.completion(**asked).choices
        check_one_call(choice)
        assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.tool_calls[0].function == (
            choice.message.tool_calls[0].function
        )
        built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)), messages=MESSAGES)
        check_one_call(built.choices[0])
        assert built.choices[0].message.tool_calls[0].function == choice.message.tool_calls[0].function
    assert litellm.completion(**asked | {"tool_choice": "none"}).choices[0].message.content


def check_one_call(choice: Any) -> None:
    (made,) = choice.message.tool_calls
    assert made.id and made.type == "function" and choice.finish_reason == "tool_calls"
    check_arguments(made.function.name, made.function.arguments)


def results_of_calls(options: dict, folder: str) -> None:
    asked = {"model": "openai/tgi", **options, "max_tokens": 100, "tools": TOOLS}
    message = litellm.completion(messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, **asked)
    message = message.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is done."}
    go_on = partial(litellm.completion, messages=[*MESSAGES, message, result], **asked)
    check_results(folder, litellm.BadRequestError, go_on)


def forms(options: dict, provider: str) -> None:
    asked = {"model": f"{provider}/tgi", "messages": MESSAGES, **options, "max_tokens": 60}
    schema = {"type": "json_schema", "json_schema": {"name": "say", "schema": SCHEMA, "strict": True}}
    for form in (Say, schema):
        content = litellm.completion(response_format=form, **asked).choices[0].message.content
        check_arguments("say", content)
        chunks = litellm.completion(stream=True, response_format=form, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    text = litellm.completion(response_format={"type": "json_object"}, **asked).choices[0].message.content
    assert text.startswith("{")


def main(url: str, folder: str) -> None:
    checks = Checks("litellm")
    options = {"api_base": f"{url}/v1", **OPTIONS}
    for provider in PROVIDERS:
        checks.run_module(globals(), provider, provider=provider, options=options)
    checks.run_module(globals(), options=options, folder=folder)
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
