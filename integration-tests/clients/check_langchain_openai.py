"""Checks the chat and completion models of langchain-openai against the server at argv[1]."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial

import openai
from checks import PROMPT, Checks, error_of
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is 2 + 3?"


class Models:
    """Makes models that ask the server at `url`."""

    def __init__(self, url: str) -> None:
        self._options = {"model": "tgi", "base_url": f"{url}/v1", "api_key": "-", "max_retries": 0, "timeout": 60}

    def chat(self, **options: object) -> ChatOpenAI:
        return ChatOpenAI(**self._options, **{"temperature": 0, "max_tokens": 12, **options})

    def completion(self, **options: object) -> OpenAI:
        return OpenAI(**self._options, **{"temperature": 0, "max_tokens": 8, **options})


def invoke(models: Models) -> None:
    message = models.chat().invoke(QUESTION)
    assert message.content and message.response_metadata["finish_reason"] in ("stop", "length")
    assert message.response_metadata["id"].startswith("chatcmpl-")


def usage(models: Models) -> None:
    counts = models.chat().invoke(QUESTION).usage_metadata
    assert counts["input_tokens"] > 0 and 0 < counts["output_tokens"] <= 12
    assert counts["total_tokens"] == counts["input_tokens"] + counts["output_tokens"]


def stream(models: Models) -> None:
    whole = models.chat().invoke(QUESTION)
    chunks = list(models.chat(stream_usage=True).stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert len(chunks) > 2 and total.content == whole.content
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [total.usage_metadata[name] for name in counts] == [whole.usage_metadata[name] for name in counts]


def asynchronous(models: Models) -> None:
    """All of it in one event loop: the library shares its connections between models."""

    async def texts() -> list[str]:
        whole = await models.chat().ainvoke(QUESTION)
        return [whole.content, "".join([chunk.content async for chunk in models.chat().astream(QUESTION)])]

    assert asyncio.run(texts()) == [models.chat().invoke(QUESTION).content] * 2


def batch_of_six_chats(models: Models) -> None:
    questions = [f"What is {number} + 3?" for number in range(6)]
    answers = [message.content for message in models.chat().batch(questions)]
    assert answers == [models.chat().invoke(question).content for question in questions]


def stop(models: Models) -> None:
    text = models.chat().invoke(QUESTION).content
    message = models.chat().invoke(QUESTION, stop=[text[2:4]])
    assert (message.content, message.response_metadata["finish_reason"]) == (text[:2], "stop")


def logprobs(models: Models) -> None:
    message = models.chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = message.response_metadata["logprobs"]["content"]
    assert len(entries) == message.usage_metadata["output_tokens"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)


def penalties_and_seed(models: Models) -> None:
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    first, second = (models.chat(**options).invoke(QUESTION).content for _ in range(2))
    assert first and first == second


def several_choices(models: Models) -> None:
    result = models.chat(n=2, temperature=1.0).generate([[HumanMessage(QUESTION)]])
    assert len(result.generations[0]) == 2


def completion(models: Models) -> None:
    text = models.completion().invoke(PROMPT)
    assert text and "".join(models.completion().stream(PROMPT)) == text


def batch_of_six_completions(models: Models) -> None:
    """One request of six prompts."""
    prompts = [PROMPT, "The dog", "One day", "The cat", "In the", "She said"]
    assert models.completion().batch(prompts) == [models.completion().invoke(prompt) for prompt in prompts]


def refused(text: str, action: Callable[[], object]) -> None:
    """The library raises classes of its own that are openai's as well."""
    error = error_of(openai.BadRequestError, action)
    assert text in str(error), error


def errors_name_the_field(models: Models) -> None:
    refused("presence_penalty", partial(models.chat(presence_penalty=3.0).invoke, QUESTION))
    refused("frequency_penalty", lambda: list(models.chat(frequency_penalty=3.0).stream(QUESTION)))


if __name__ == "__main__":
    checks = Checks("langchain-openai")
    checks.run_module(globals(), models=Models(sys.argv[1]))
    checks.exit()
