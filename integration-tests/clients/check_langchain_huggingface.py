"""Checks the models of langchain-huggingface against the server at argv[1]."""

import asyncio
import sys
from functools import partial
from typing import Any

from checks import PROMPT, TOOLS, Checks, check_arguments, raises
from huggingface_hub.errors import BadRequestError, ValidationError
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

QUESTION = "What is 2 + 3?"


def endpoint(url: str, **options: object) -> HuggingFaceEndpoint:
    # The library always sends a temperature and `top_p`: the text is drawn.
    arguments = {"max_new_tokens": 12, "seed": 7, "timeout": 60, **options}
    return HuggingFaceEndpoint(endpoint_url=url, task="text-generation", huggingfacehub_api_token="-", **arguments)


def chat_model(url: str, **options: object) -> ChatHuggingFace:
    return ChatHuggingFace(llm=endpoint(url), model_id="tgi", max_tokens=12, temperature=0.0, **options)


def invoke(url: str) -> None:
    text = endpoint(url).invoke(PROMPT)
    assert text and asyncio.run(endpoint(url).ainvoke(PROMPT)) == text


def stream(url: str) -> None:
    assert "".join(endpoint(url).stream(PROMPT)) == endpoint(url).invoke(PROMPT)


def stop(url: str) -> None:
    """The library itself cuts the stop text off."""
    text = endpoint(url).invoke(PROMPT)
    assert endpoint(url).invoke(PROMPT, stop=[text[4:7]]) == text[: text.index(text[4:7])]


def chat(url: str) -> None:
    message = chat_model(url).invoke(QUESTION)
    assert message.content and message.response_metadata["finish_reason"] in ("stop", "length")
    assert message.usage_metadata["output_tokens"] > 0


def chat_stream(url: str) -> None:
    chunks = list(chat_model(url).stream(QUESTION))
    assert len(chunks) > 2 and "".join(chunk.content for chunk in chunks) == chat_model(url).invoke(QUESTION).content


def errors_name_the_field(url: str) -> None:
    raises(ValidationError, "`top_p`", partial(endpoint(url, top_p=2.0).invoke, PROMPT))
    unique = {"type": "object", "properties": {"words": {"type": "array", "uniqueItems": True}}}
    unsupported = {"type": "function", "function": {"name": "say", "parameters": unique, "strict": True}}
    raises(BadRequestError, "uniqueItems", partial(bound(url, [unsupported], "say").invoke, QUESTION))


def bound(url: str, tools: list[dict], wanted: str) -> Any:
    model = ChatHuggingFace(llm=endpoint(url), model_id="tgi", max_tokens=100, temperature=0.0)
    return model.bind_tools(tools, tool_choice=wanted)


def calls(url: str) -> None:
    """The library takes a choice of one tool only."""
    for tool in TOOLS:
        message = bound(url, [tool], tool["function"]["name"]).invoke(QUESTION)
        (made,) = message.tool_calls
        assert made["id"] and made["name"] == tool["function"]["name"]
        check_arguments(made["name"], made["args"])
    message = chat_model(url).bind_tools(TOOLS).invoke(QUESTION)
    assert message.content or message.tool_calls


if __name__ == "__main__":
    checks = Checks("langchain-huggingface")
    checks.run_module(globals(), url=sys.argv[1])
    checks.exit()
