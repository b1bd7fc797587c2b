"""The sinks of one front's requests: what one step makes for the front becomes one message."""

import asyncio
from collections.abc import Callable

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import Ended, Tokens
from text_generation_router.engine_service.outbox import Outbox
from text_generation_router.wire.endings import ended_to_pb
from text_generation_router.wire.prompts import pieces_of
from text_generation_router.wire.steps import FrontTokens


class Trial:
    """The suspects that an engine has from all its fronts: of one group at a time (`fleet/suspects.py`)."""

    def __init__(self) -> None:
        self._group = ""
        self._count = 0  # suspects of the group that have neither made a token here nor ended

    def takes(self, group: str) -> bool:
        """Whether a request of this group may be submitted. An empty name: the request is not a suspect."""
        return not group or not self._count or group == self._group

    def enter(self, group: str, count: int) -> None:
        """Takes `count` suspects of a group that `takes` has let in."""
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
    """Collects the tokens of a step for one front. They are sent when the engine's loop has ended the step."""

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
        is called at its end, with an Ended that is still to be sent. `trial`: that of a suspect, which it leaves with
        its first tokens or its end."""
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
