"""Checks llama-index's OpenAILike against the server at argv[1]."""

import asyncio
import sys
from functools import partial

import openai
from checks import MESSAGES, PROMPT, Checks, raises
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

QUESTION = [ChatMessage(**message) for message in MESSAGES]


def model(url: str, *, chat: bool = True, **options: object) -> OpenAILike:
    arguments = {"max_tokens": 12, "temperature": 0.0, "max_retries": 0, "timeout": 60, **options}
    return OpenAILike(model="tgi", api_base=f"{url}/v1", api_key="-", is_chat_model=chat, **arguments)


def chat(url: str) -> None:
    answer = model(url).chat(QUESTION)
    assert answer.message.role == "assistant" and answer.message.content
    assert asyncio.run(model(url).achat(QUESTION)).message.content == answer.message.content


def stream_chat(url: str) -> None:
    chunks = list(model(url).stream_chat(QUESTION))
    text = model(url).chat(QUESTION).message.content
    assert len(chunks) > 2 and chunks[-1].message.content == "".join(chunk.delta or "" for chunk in chunks) == text


def complete(url: str) -> None:
    for chat in (False, True):
        text = model(url, chat=chat).complete(PROMPT).text
        assert text and asyncio.run(model(url, chat=chat).acomplete(PROMPT)).text == text


def stream_complete(url: str) -> None:
    for chat in (False, True):
        chunks = list(model(url, chat=chat).stream_complete(PROMPT))
        text = model(url, chat=chat).complete(PROMPT).text
        assert chunks[-1].text == "".join(chunk.delta or "" for chunk in chunks) == text


def errors_name_the_field(url: str) -> None:
    wrong = model(url, additional_kwargs={"presence_penalty": 3.0})
    raises(openai.BadRequestError, "presence_penalty", partial(wrong.chat, QUESTION))


if __name__ == "__main__":
    checks = Checks("llama-index")
    for check in (chat, stream_chat, complete, stream_complete, errors_name_the_field):
        checks.run(check.__name__, partial(check, sys.argv[1]))
    checks.exit()
