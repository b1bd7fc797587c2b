"""Children that are not there: their jobs are done in the test's own process."""

import asyncio
from collections.abc import Mapping

from text_generation_router.offload.child import Handler


class InProcess:
    """Runs the children's handlers in this process. Raises `failures` first, one per job."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers
        self.done: list[str] = []
        self.failures: list[Exception] = []

    async def run(self, name: str, content: bytes, timeout_s: float, tenant: str = "") -> bytes:
        self.done.append(name)
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        return self.handlers[name](content)

    async def all_ready(self) -> None:
        pass
