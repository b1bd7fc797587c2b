"""The shard's socket for steps: a thread for each connection reads frames, and the worker's thread writes the answers.

A step costs a shard less here than as a gRPC call: its answer passes through no other thread, in particular not through
an event loop that needs the interpreter lock while the worker launches the next step.
"""

import asyncio
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress

from text_generation_common.frames import Frame, FrameError, FrameReader

logger = logging.getLogger("text_generation_server")

READ_BYTES = 2**18
MAX_CONNECTIONS = 8  # a router has one, a benchmark another
JOIN_S = 1.0
AGAIN_S = 0.2  # seconds after which a connection that was not accepted is tried again

Send = Callable[[bytes], None]
# Takes a frame, and sends the answer later, from any thread. FrameError: the frame makes no sense.
Take = Callable[[Frame, Send], None]


class RouterConnection:
    """One client's connection. `send` may be called from any thread."""

    def __init__(self, client: socket.socket, take: Take) -> None:
        self._client = client
        self._take = take
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="steps", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def send(self, data: bytes) -> None:
        """Sends an answer; it is dropped if the client has gone. Waits while the client does not read: a router sends
        no third step before it has read an answer, and its launcher kills a router that hangs."""
        with suppress(OSError), self._sending:
            self._client.sendall(data)

    def close(self) -> None:
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_S)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._client.recv(READ_BYTES):
                for frame in frames.feed(data):
                    self._take(frame, self.send)
        except FrameError as error:
            logger.error("the socket for steps: %s; the connection ends", error)
        except OSError as error:
            logger.debug("the socket for steps: %s", error)
        finally:
            with self._sending:
                self._client.close()


class StepSocket:
    """Listens for connections. Belongs to an event loop."""

    def __init__(self, path: str, take: Take) -> None:
        self._take = take
        self._connections: list[RouterConnection] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)  # a shard that was killed has left it; gRPC removes its own file likewise
        self._listener.bind(path)
        self._listener.listen()
        self._accepting = asyncio.create_task(self._accept(), name="steps")

    @property
    def num_open(self) -> int:
        """Number of connections on which more steps may come."""
        return sum(connection.is_open for connection in self._connections)

    async def _accept(self) -> None:
        while True:
            try:
                client, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:  # too many open files, for example
                logger.error("the socket for steps does not accept a connection: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            client.setblocking(True)
            self._connections = [connection for connection in self._connections if connection.is_open]
            if len(self._connections) < MAX_CONNECTIONS:
                self._connections.append(RouterConnection(client, self._take))
            else:
                logger.error("the socket for steps has %d connections already: another one is closed", MAX_CONNECTIONS)
                client.close()

    def close(self) -> None:
        self._accepting.cancel()
        self._listener.close()
        for connection in self._connections:
            connection.close()
