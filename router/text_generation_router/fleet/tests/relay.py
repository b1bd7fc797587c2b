"""A TCP relay on the loopback device that delays, freezes or cuts the connections through it."""

import asyncio
from types import TracebackType

from text_generation_common.cluster.endpoints import TcpEndpoint


class Relay:
    """Forwards connections from a port of its own to `target`."""

    def __init__(self, target: TcpEndpoint) -> None:
        self._target = target
        self._flows = asyncio.Event()  # cleared: bytes wait in the relay, and no connection ends
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = TcpEndpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        self.thaw()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """Resets all connections, in both directions."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        try:
            to, back = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, back), (to, writer)):
            self._writers.add(sink)
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
            await self._flows.wait()
        except OSError:
            pass  # the connection was reset
        finally:
            self._writers.discard(sink)
            sink.transport.abort()
