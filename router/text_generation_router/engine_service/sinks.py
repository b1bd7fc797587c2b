"""The messages that wait to be sent to one front, and the sinks of the front's requests, which put the tokens of one
step into one message."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import Ended, Tokens
from text_generation_router.errors import FrontLostError
from text_generation_router.wire.steps import FrontTokens, ended_to_pb, pieces_of

# The messages that wait to be sent to one front.

# Maximum number of seconds for which a front may leave a message unread.
STALL_S = 3.0
MAX_BYTES = 64 * 2**20


class Outbox:
    """A queue of messages. `put` never waits and never fails; if the front does not read, `run` raises FrontLostError
    instead."""

    def __init__(self, stall_s: float | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._stall_s = STALL_S if stall_s is None else stall_s
        self._max_bytes = max_bytes
        self._messages: deque[tuple[pb.EngineMessage, int]] = deque()  # each with its size in bytes
        self._bytes = 0
        self._is_full = self._is_closing = False
        self._changed = asyncio.Event()

    def put(self, message: pb.EngineMessage) -> None:
        if self._is_full:
            return
        size = message.ByteSize()
        self._bytes += size
        self._messages.append((message, size))
        if self._bytes > self._max_bytes:
            self._is_full = True
            self._messages.clear()
        self._changed.set()

    def close(self) -> None:
        """Lets `run` end once it has sent the waiting messages. `run` must not be cancelled while it writes: gRPC then
        loses track of what it has sent, and cannot end the call."""
        self._is_closing = True
        self._changed.set()

    async def run(self, write: Callable[[pb.EngineMessage], Awaitable[None]]) -> None:
        """Sends messages until `close` is called. Raises FrontLostError."""
        while not self._is_closing:
            await self._changed.wait()
            while self._messages:
                message, size = self._messages.popleft()
                try:
                    async with asyncio.timeout(self._stall_s):
                        await write(message)
                except TimeoutError:
                    raise FrontLostError(f"nothing was read for {self._stall_s:g} s") from None
                self._bytes -= size
            if self._is_full:
                raise FrontLostError(f"more than {self._max_bytes} bytes wait to be read")
            self._changed.clear()


class Trial:
    """The suspects that all fronts have sent to an engine. All suspects on the engine belong to one group
    (`fleet/suspects.py`)."""

    def __init__(self) -> None:
        self._group = ""
        self._count = 0  # number of suspects of `_group` without a token on this engine and without an end

    def takes(self, group: str) -> bool:
        """Whether a request of this group may be submitted. An empty name: the request is not a suspect."""
        return not group or not self._count or group == self._group

    def enter(self, group: str, count: int) -> None:
        """Counts `count` more suspects of `group`. `takes` must have returned True for the group."""
        assert self.takes(group)
        self._group = group
        self._count += count

    def leave(self) -> None:
        """Notes that a suspect has made a token here, or has ended."""
        self._count -= 1


# Estimated bytes of a request's token in a message, and of a top token; bytes after which a message is sent before its
# step ends.
TOKEN_BYTES, TOP_BYTES = 32, 8
MESSAGE_BYTES = 2**20


class StepSender:
    """Collects the tokens of a step for one front. The tokens are sent when the engine's loop has ended the step."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._step: FrontTokens | None = None  # None: nothing was added since the last message
        self._bytes = 0

    def add(self, index: int, position: int, tokens: Tokens, ended: Ended | None) -> None:
        if tokens.first is not None and tokens.first.prompt_logprobs is not None:
            for piece in pieces_of(index, tokens.first.prompt_logprobs):
                self._outbox.put(pb.EngineMessage(prompt=piece))
        if (step := self._step) is None:
            step = self._step = FrontTokens()
            # The engine gives all tokens of a step to their sinks in one turn of its loop.
            asyncio.get_running_loop().call_soon(self.send)
        step.add(index, position, tokens)
        if ended is not None:
            step.ended.append(ended_to_pb(index, ended))
        self._bytes += TOKEN_BYTES
        if tokens.tops:
            self._bytes += TOP_BYTES * sum(map(len, tokens.tops))
        if self._bytes > MESSAGE_BYTES:
            self.send()

    def begun(self, index: int) -> None:
        """Reports at once that the first step of a request is decided."""
        self._outbox.put(pb.EngineMessage(begun=pb.Begun(indexes=[index])))

    def end(self, ended: pb.Ended) -> None:
        """Sends the end of a request after all its tokens."""
        self.send()
        self._outbox.put(pb.EngineMessage(ended=ended))

    def send(self) -> None:
        """Sends the tokens and ends that were added since the last message."""
        step, self._step, self._bytes = self._step, None, 0
        if step is not None:
            self._outbox.put(pb.EngineMessage(tokens=step.message))


class RequestSink:
    """The sink of one request of a front."""

    __slots__ = ("_end", "_position", "_sender", "_trial", "_wire_index", "index")

    def __init__(
        self,
        wire_index: int,
        position: int,
        sender: StepSender,
        end: Callable[[int, Ended | None], None],
        trial: Trial | None = None,
    ) -> None:
        """`wire_index`: the front's index of the request. `position`: number of output tokens that came with it. `end`
        is called when the request ends, with the Ended that is still to be sent. `trial`: the engine's trial if the
        request is a suspect; the request leaves the trial with its first tokens or its end."""
        self.index = 0  # the engine's index of the request
        self._wire_index = wire_index
        self._position = position
        self._sender = sender
        self._end = end
        self._trial = trial

    def begun(self) -> None:
        self._sender.begun(self._wire_index)

    def _leave_trial(self) -> None:
        if self._trial is not None:
            self._trial.leave()
            self._trial = None

    def take(self, tokens: Tokens, ended: Ended | None) -> None:
        if self._trial is not None:
            self._leave_trial()
        self._sender.add(self._wire_index, self._position, tokens, ended)
        self._position += len(tokens.ids)
        if ended is not None:
            self._end(self._wire_index, None)

    def ended(self, ended: Ended) -> None:
        self._leave_trial()
        self._end(self._wire_index, ended)
