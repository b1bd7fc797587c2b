"""Checks litellm's calls, by each of the providers that may name this server, against the server at argv[1]."""

import asyncio
import os
import sys
from functools import partial

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise importing it downloads a list of prices

import litellm
from checks import MESSAGES, PROMPT, Checks, check_usage, raises

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


def main(url: str) -> None:
    checks = Checks("litellm")
    options = {"api_base": f"{url}/v1", **OPTIONS}
    for provider in PROVIDERS:
        for check in (chat, chat_stream):
            checks.run(f"{check.__name__} ({provider})", partial(check, options, provider))
    for check in (stop_and_logprobs, text_completion, a_long_prompt_exceeds_the_context_window, errors_name_the_field):
        checks.run(check.__name__, partial(check, options))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1])
