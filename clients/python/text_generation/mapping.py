"""Answers to many prompts: several calls at a time, and results in the order of the prompts."""

import asyncio
import difflib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from text_generation.errors import TextGenerationError, ValidationError
from text_generation.progress import Progress

Item = TypeVar("Item")
T = TypeVar("T")

OnError = Literal["raise", "return"]

# Parameters of a call that `map` gives itself, or cannot have.
_OWN = ("prompt", "messages", "stream")


async def map_ordered(
    call: Callable[[Item], Awaitable[T]],
    items: Sequence[Item],
    concurrency: int,
    errors: OnError,
    progress: Progress | None,
) -> list[T | TextGenerationError]:
    """The result of `call` for each item. If `errors` is "return", an error takes the place of its result; otherwise
    the first error cancels the other calls and is raised.
    """
    results: dict[int, T | TextGenerationError] = {}
    numbered = iter(enumerate(items))  # shared: each worker takes the next item

    async def work() -> None:
        for index, item in numbered:
            try:
                results[index] = await call(item)
            except TextGenerationError as error:
                if errors == "raise":
                    error.add_note(f"This was item {index} of {len(items)} (the first is 0).")
                    raise
                results[index] = error
            if progress is not None:
                progress.advance(failed=isinstance(results[index], TextGenerationError))

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        if progress is not None:
            progress.close()
    return [results[index] for index in range(len(items))]


def method_for(items: Sequence[Any], client: Any) -> Callable[..., Any]:
    """The method of either client that answers the items."""
    method: Callable[..., Any] = client.generate if all(isinstance(item, str) for item in items) else client.chat
    return method


def checked_items(
    prompts: Iterable[Any], concurrency: int, errors: str, options: Iterable[str], client: Any
) -> list[Any]:
    """The prompts as a list. Raises ValidationError for a wrong value, and TypeError for an option that is not a
    parameter of the client's method, as Python does for a method's own.
    """
    if isinstance(prompts, str | bytes | Mapping):
        raise ValidationError(f"`prompts` must be a list of prompts. Given: one {type(prompts).__name__}")
    if concurrency < 1:
        raise ValidationError(f"`concurrency` must be strictly positive. Given: {concurrency}")
    if errors not in ("raise", "return"):
        raise ValidationError(f"`errors` must be 'raise' or 'return'. Given: {errors!r}")
    items = list(prompts)
    known = [name for name in inspect.signature(method_for(items, client)).parameters if name not in _OWN]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean '{close[0]}'?" if close else ""
            raise TypeError(f"map() got an unexpected keyword argument '{name}'{meant}")
    return items
