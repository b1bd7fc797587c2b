"""Has the shards compile the grammars of requests before these are queued, so that no step waits for a compiler.

One grammar is compiled at a time, and owners take turns.
"""

import asyncio
from collections.abc import Callable, Sequence

from text_generation_common.errors import GRAMMARS_WAIT
from text_generation_common.tasks import cancelled
from text_generation_router.engine.requests import Requests
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.errors import OverloadedError, ShardsError
from text_generation_router.fairness.slots import FairSlots
from text_generation_router.scheduling.request import GenerationRequest


class Compiling:
    def __init__(self, requests: Requests, shards: Callable[[], ShardedClient | None], max_waiting: int) -> None:
        """`shards`: returns the shards that work now, or None. `max_waiting`: most grammars of one tenant that may
        wait."""
        self._requests = requests
        self._shards = shards
        self._turns = FairSlots(1, max_waiting)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, indexes: Sequence[int], request: GenerationRequest) -> None:
        """Queues the requests `indexes`, which have the grammar of `request`, when the shards have compiled it, or ends
        them if they refuse to."""
        task = asyncio.create_task(self._compile(indexes, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compile(self, indexes: Sequence[int], request: GenerationRequest) -> None:
        refusal = ""
        try:
            refusal = await self._refusal(indexes, request)
        except OverloadedError:
            refusal = GRAMMARS_WAIT
        except ShardsError:
            pass  # the next shards compile the grammar with the request's first step
        finally:  # whatever has happened, no request waits for ever
            for index in indexes:
                if refusal:
                    self._requests.fail(index, refusal)
                else:
                    self._requests.make_ready(index)

    async def _refusal(self, indexes: Sequence[int], request: GenerationRequest) -> str:
        grammar = request.sampling.grammar
        async with self._turns.slot(request.share, len(grammar)):
            shards = self._shards()  # not those of the time before the wait, which may be lost
            are_wanted = any(map(self._requests.is_open, indexes))
            return await shards.compile(grammar) if shards is not None and are_wanted else ""

    async def close(self) -> None:
        await cancelled(*self._tasks)
