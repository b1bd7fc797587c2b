"""Checks llama-index's OpenAILike against the server at argv[1]."""

import asyncio
import sys
from functools import partial
from typing import Literal

import openai
from checks import MESSAGES, PROMPT, Checks, check_arguments, check_results, raises
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

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


class Say(BaseModel):
    """Says a word."""

    word: Literal["five", "six"]


def said(word: Literal["five", "six"]) -> str:
    return f"I said {word}."


ASK = PromptTemplate("What is {sum}?")
TOOL = FunctionTool.from_defaults(said, name="say", description="Says a word.")
# The two ways of the library to demand an object.
WAYS = {"calls": {"is_function_calling_model": True}, "form": {"should_use_structured_outputs": True}}


def structured_predict(url: str, way: str) -> None:
    llm = model(url, max_tokens=100, **WAYS[way])
    made = llm.structured_predict(Say, ASK, sum="2 + 3")
    assert isinstance(made, Say)
    assert isinstance(asyncio.run(llm.astructured_predict(Say, ASK, sum="2 + 3")), Say)
    *_, last = llm.stream_structured_predict(Say, ASK, sum="2 + 3")
    if way == "form":  # in a stream, llama-index does not demand the call
        Say.model_validate(last.model_dump())
    assert isinstance(llm.as_structured_llm(Say).chat(QUESTION).raw, Say)


def chat_with_tools(url: str) -> None:
    llm = model(url, max_tokens=100, is_function_calling_model=True)
    answer = llm.chat_with_tools([TOOL], user_msg="What is 2 + 3?", tool_required=True)
    (made,) = llm.get_tool_calls_from_response(answer)
    assert made.tool_name == "say" and made.tool_id
    check_arguments("say", made.tool_kwargs)
    *_, last = llm.stream_chat_with_tools([TOOL], user_msg="What is 2 + 3?", tool_required=True)
    (streamed,) = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == made.tool_kwargs
    done = llm.predict_and_call([TOOL], user_msg="What is 2 + 3?", tool_choice="required")
    assert done.response == said(**made.tool_kwargs)


def results_of_calls(url: str, folder: str) -> None:
    llm = model(url, max_tokens=100, is_function_calling_model=True)
    answer = llm.chat_with_tools([TOOL], user_msg="What is 2 + 3?", tool_required=True)
    (made,) = llm.get_tool_calls_from_response(answer)
    options = {"tool_call_id": made.tool_id, "name": made.tool_name}
    result = ChatMessage(role="tool", content=said(**made.tool_kwargs), additional_kwargs=options)
    go_on = partial(llm.chat_with_tools, [TOOL], chat_history=[*QUESTION, answer.message, result])
    check_results(folder, openai.BadRequestError, go_on)


if __name__ == "__main__":
    checks = Checks("llama-index")
    for way in WAYS:
        checks.run_module(globals(), way, way=way, url=sys.argv[1])
    checks.run_module(globals(), url=sys.argv[1], folder=sys.argv[2])
    checks.exit()
