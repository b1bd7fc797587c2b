"""Events written straight to a connection, in the callback that has made them: no task wakes up for each event."""

import asyncio
from collections.abc import Sequence

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# The ASGI extension in which `Connection` gives an application the response that belongs to a request.
EXTENSION = "text_generation_router.response"

EMPTY_COMMENT = b":\n\n"


class DirectWriter:
    """Writes parts of one response's body, past ASGI's `send`: the same bytes, in fewer calls. Closed before the
    response has started, while the client does not read (the transport has paused writing), and after the response; and
    always if the server is not `Connection`. A caller that finds it closed must use `send`, which waits for the client.
    """

    __slots__ = ("_clock", "_cycle", "keep_alive", "last_sent_s")

    def __init__(self) -> None:
        self.last_sent_s = 0.0
        self.keep_alive = EMPTY_COMMENT  # what is sent after a long silence
        self._cycle: RequestResponseCycle | None = None

    def start(self, scope: Scope) -> None:
        """To be called when `send` has started the response."""
        self._clock = asyncio.get_running_loop().time
        self._cycle = scope.get("extensions", {}).get(EXTENSION)
        self.note_sent()

    def note_sent(self) -> None:
        self.last_sent_s = self._clock()

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return (
            cycle is not None
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
            and cycle.chunked_encoding is True
        )

    def write(self, events: Sequence[bytes]) -> None:
        """Writes each event as a chunk of its own. May be called only while `is_open`."""
        assert self._cycle is not None
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
        self._cycle.transport.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        self.last_sent_s = self._clock()
