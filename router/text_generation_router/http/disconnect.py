"""Cancels work when its client disconnects. Starlette does not tell an endpoint about a disconnect."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from text_generation_common.tasks import cancelled

T = TypeVar("T")
HALF_CLOSE = "text_generation_router.half_close"


def end_at_half_close(scope: Scope) -> None:
    """Marks a request as one that generates text. A client that leaves closes its sending side first. That it does not
    read either is seen at the next write only, which may be the end of a whole answer."""
    scope[HALF_CLOSE] = True


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` and returns its result. If the client disconnects first, `work` is cancelled and ClientDisconnect is
    raised.

    The request's body must have been read before.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await cancelled(task, gone)


async def send_unless_disconnected(
    receive: Receive, content: AsyncGenerator[bytes, None], sending: Coroutine[Any, Any, None]
) -> None:
    """Runs `sending`, which sends `content`, to its end or until the client disconnects, and closes `content`."""
    with suppress(ClientDisconnect):  # no answer is needed when the client is gone
        async with aclosing(content):
            await unless_disconnected(receive, sending)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
