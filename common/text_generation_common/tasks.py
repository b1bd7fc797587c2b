"""Runs asyncio tasks together, cancels them, and waits for their end."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: "Iterable[Coroutine[Any, Any, T]]") -> list[T]:
    """The results of all works, which run at the same time. If one fails, its error is raised when the others, which
    are cancelled, have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels the tasks and returns when all have ended. Their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
