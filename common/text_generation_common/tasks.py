"""Cancels asyncio tasks and waits for their end."""

import asyncio
from typing import Any


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels the tasks and returns when all have ended. Their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
