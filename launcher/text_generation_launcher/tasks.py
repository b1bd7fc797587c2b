"""The end of asyncio tasks that somebody owns."""

import asyncio
from typing import Any


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Returns when all have ended. What they raise by then is of no interest any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
