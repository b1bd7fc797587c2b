"""Checks the modes of instructor with OpenAI's client against the server at argv[1]."""

import asyncio
import sys
from typing import Any, Literal

import instructor
import openai
from checks import MESSAGES, Checks
from instructor import Mode
from pydantic import BaseModel, Field

ASKED: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "max_tokens": 100, "temperature": 0, "max_retries": 0}
MODES = (Mode.JSON_SCHEMA, Mode.TOOLS, Mode.TOOLS_STRICT)


class Say(BaseModel):
    """Says a word, several times."""

    word: Literal["five", "six"]
    times: int = Field(ge=1, le=9)


def create(options: dict[str, Any], mode: Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(**options), mode=mode)
    made, completion = client.create_with_completion(response_model=Say, **ASKED)
    assert isinstance(made, Say) and completion.usage.completion_tokens > 0
    # The library keeps the raw answer in the object, which makes two objects differ.
    assert client.create(response_model=Say, **ASKED).model_dump() == made.model_dump()

    async def asynchronous() -> Say:
        return await instructor.from_openai(openai.AsyncOpenAI(**options), mode=mode).create(
            response_model=Say, **ASKED
        )

    assert asyncio.run(asynchronous()).model_dump() == made.model_dump()


def partial_objects(options: dict[str, Any], mode: Mode) -> None:
    """A stream gives the object in parts, as soon as they are there."""
    client = instructor.from_openai(openai.OpenAI(**options), mode=mode)
    *parts, last = client.create_partial(response_model=Say, **ASKED)
    assert parts
    Say.model_validate(last.model_dump())


def main(url: str) -> None:
    checks = Checks("instructor")
    options = {"base_url": f"{url}/v1", "api_key": "-", "max_retries": 0, "timeout": 60}
    for mode in MODES:
        checks.run_module(globals(), mode.name, mode=mode, options=options)
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1])
