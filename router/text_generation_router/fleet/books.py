"""All requests of one front on engines elsewhere: where each request is, where it goes next, and what its sink gets.
Pure: no input or output; `clock` gives the time.

A request is on one engine at a time, or waits for one. A message about a request that has left the engine changes
nothing.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from text_generation_router.engine.protocol import Ended, Sink, Snapshot, Tokens
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.engines import EngineView, Fleet
from text_generation_router.fleet.requests import RemoteGroup, RemoteRequest
from text_generation_router.fleet.values import EngineFirst, EngineLoss, LoadReport, RemoteCounts
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.wire.steps import TokenRun
from text_generation_router.wire.version import WireError

# End reasons that the front checks itself, because the request's tokens and its maximum number of tokens decide them.
BY_TOKENS = frozenset({EndReason.LENGTH, EndReason.EOS_TOKEN, EndReason.COMPLETE})
# End reasons after which the front submits the request to another engine.
ELSEWHERE = frozenset({EndReason.WITHDRAWN, EndReason.CLOSED})
# End reasons that an engine may report only after the front has asked for the end of the request.
FRONTS_OWN = frozenset({EndReason.STOPPED, EndReason.CANCELLED})
# Seconds that a request waits for an engine of the build that made its tokens, while engines of other builds are there.
STRANDED_S = 30.0
# Texts of the errors that clients of failed requests get.
DEADLY = "Server error: engines died again and again while they worked on this request and on nothing else"
HUNG = "Server error: engines fell silent again and again while they worked on this request and on nothing else"
STRANDED = "Server error: no engine of the build that began this text is left"


class FrontBooks:
    """Implements the methods of Engine that take the index of a request, and handles the messages of engines."""

    def __init__(
        self, fleet: Fleet, clock: Callable[[], float], counts: RemoteCounts, on_end: Callable[[int], None]
    ) -> None:
        """`on_end` is called with the index of each request that has ended, before its sink is called."""
        self._fleet = fleet
        self._on_end = on_end
        self._clock = clock
        self._counts = counts
        self._open: dict[int, RemoteRequest] = {}
        self._waiting: list[RemoteGroup] = []  # groups without an engine, in order of arrival
        self._next = 1

    @property
    def now(self) -> float:
        return self._clock()

    # Methods that `RemoteEngine` calls.

    @property
    def num_requests(self) -> int:
        """Number of requests that are on an engine or wait for an engine."""
        return len(self._open)

    def num_with(self, adapter: str) -> int:
        """Number of the same of a LoRA adapter."""
        return sum(request.request.adapter == adapter for request in self._open.values())

    def submit_all(
        self,
        requests: Sequence[GenerationRequest],
        sinks: Sequence[Sink],
        credits: int,
        on_answer: Callable[[RefusedError | None], None],
    ) -> list[int]:
        """Takes the sequences of one prompt. Returns the indexes of their requests. `on_answer` is called once, after
        this method has returned."""
        now = self._clock()
        group = RemoteGroup(self._next, requests[0], now, on_answer)
        for index, (request, sink) in enumerate(zip(requests, sinks, strict=True), self._next):
            member = RemoteRequest(index, request, sink, credits, group)
            if request.timeout_s is not None:
                member.deadline_s = now + request.timeout_s
            group.members[index] = self._open[index] = member
        self._next += len(requests)
        if not self._fleet.submit(group, now):
            self._waiting.append(group)
        return list(group.members)

    def end(self, index: int, num_tokens: int) -> None:
        if (request := self._open.get(index)) is not None:
            if (attempts := self._attempts_of(request)) is not None:
                attempts.end(request, num_tokens)
            self._close(request, Ended(EndReason.STOPPED))

    def cancel(self, index: int, reason: EndReason = EndReason.CANCELLED, cause: str = "") -> None:
        if (request := self._open.get(index)) is not None:
            if (attempts := self._attempts_of(request)) is not None:
                attempts.cancel(request)
            self._close(request, Ended(reason, cause=cause))

    def credit(self, index: int, tokens: int) -> None:
        if (request := self._open.get(index)) is not None:
            given = request.credit(tokens)
            if (attempts := self._attempts_of(request)) is not None:
                attempts.credit(request, given)

    def has_begun(self, index: int) -> bool:
        """Whether any engine has decided the request's first step."""
        request = self._open.get(index)
        return request is not None and (request.is_begun or request.begun_s > 0 or request.group.has_run)

    def end_all(self, reason: EndReason, cause: str = "") -> None:
        for index in list(self._open):
            self.cancel(index, reason, cause)

    def _attempts_of(self, request: RemoteRequest) -> Attempts | None:
        engine = request.group.engine
        return self._fleet.engines[engine].attempts if engine is not None else None

    # Messages of engines. WireError: the message breaks the protocol, and the connection to the engine has to end.

    def joined(self, number: int, engine: EngineView) -> None:
        """Notes that an engine is connected."""
        now = self._clock()
        self._give_up(self._fleet.join(number, engine, now), HUNG)
        self._fleet.withdraw_queued(now)
        self.place()

    def reported(self, number: int, report: LoadReport) -> None:
        now = self._clock()
        if self._fleet.take_report(number, report, now):
            self._fleet.withdraw_queued(now)
        self._fleet.leave_draining(now)
        self.place(is_late=True)

    def lost(self, number: int, loss: EngineLoss) -> None:
        """Notes that an engine is not connected any more."""
        if number not in self._fleet.engines:
            return
        self._counts.lost_engines += 1
        now = self._clock()
        groups, given_up = self._fleet.lose(number, loss, now)
        for group in groups:
            for member in group.members.values():
                member.lose(now)
            self._counts.resumes += len(group.members) if group.is_accepted else 0
            insort(self._waiting, group, key=_number)
        self._give_up(given_up, HUNG if loss is EngineLoss.SILENT else DEADLY)
        self.place()

    def _give_up(self, numbers: Collection[int], cause: str) -> None:
        for group in [group for group in self._waiting if group.number in numbers]:
            self._fail(group, cause)

    def removed(self, number: int) -> None:
        """Notes that a lost engine will not come back."""
        self._fleet.remove(number)
        self.place()

    def look(self) -> None:
        """To be called once a second: gives up requests that have waited too long, and moves queued requests."""
        self.give_up_stranded()
        self._fleet.balance(self._clock())
        self.place()

    def accepted(self, engine: EngineView, indexes: Sequence[int]) -> None:
        if (group := engine.attempts.accepted(indexes)) is not None:
            group.answer()
        if self._waiting:
            self.place()

    def refused(self, engine: EngineView, indexes: Sequence[int], error: RefusedError) -> None:
        if (group := engine.attempts.refused(indexes)) is None:
            return
        self._fleet.suspects.take_back(group.number)
        if error.reason in (Refusal.CLOSED, Refusal.DRAINING):
            engine.close()
            insort(self._waiting, group, key=_number)
        elif error.reason is Refusal.OTHER_SUSPECTS:
            if not group.is_suspect:
                raise WireError("a request that is not a suspect was refused as one")
            engine.has_other_suspects = True
            insort(self._waiting, group, key=_number)
        elif group.is_accepted and error.reason is Refusal.OVERLOADED:
            engine.is_full = True
            insort(self._waiting, group, key=_number)
        elif group.is_accepted:
            self._fail(group, f"Server error: no engine goes on with the request: {error}")
        else:
            for index in group.members:
                del self._open[index]
                self._on_end(index)
            group.answer(error)
        self.place()

    def begun(self, engine: EngineView, indexes: Iterable[int]) -> None:
        """Notes that the engine has decided the first steps of these requests."""
        for index in indexes:
            if (request := engine.attempts.find(index)) is not None:
                if request.is_begun:
                    engine.attempts.note_useless()
                request.is_begun = request.group.has_run = True

    def tokens(self, engine: EngineView, run: TokenRun, first: EngineFirst | None, ended: Ended | None) -> None:
        """Gives new tokens of a request to its sink. `ended`: how the request ended, if these are its last tokens."""
        if (request := engine.attempts.find(run.wire_index)) is None:
            self._counts.dropped_tokens += len(run.ids)
            return
        tokens = request.take(run, first, self._clock())
        if tokens is None:
            self._counts.dropped_tokens += len(run.ids)
        else:
            self._counts.dropped_tokens += len(run.ids) - len(tokens.ids)
            self._note_progress(request.group, engine)
        if ended is not None:
            self._ended(engine, request, ended, tokens)
        elif tokens is not None and (cause := request.give(tokens, None)):
            self.cancel(request.index, EndReason.FAILED, cause)

    def _note_progress(self, group: RemoteGroup, engine: EngineView) -> None:
        group.digest = engine.facts.digest
        if not group.has_run or group.suspicions or group.counts:
            group.has_run, group.suspicions, group.counts = True, 0, 0
        self._clear(group)

    def _clear(self, group: RemoteGroup) -> None:
        """Notes that the group has made a token, or has ended."""
        if self._fleet.suspects.clear(group.number):
            self.place()

    def computed(self, engine: EngineView, index: int, first: EngineFirst, ended: Ended) -> None:
        """Ends a request whose `max_new_tokens` is 0."""
        if (request := engine.attempts.find(index)) is not None:
            if request.request.max_new_tokens:
                raise WireError("a request ended without a token")
            self._ended(engine, request, ended, request.computed(first, self._clock()))

    def prompt(self, engine: EngineView, index: int, start: int, piece: PromptLogprobs) -> None:
        if (request := engine.attempts.find(index)) is not None:
            request.add_prompt(start, piece)

    def ended(self, engine: EngineView, index: int, ended: Ended) -> None:
        """Ends a request; the engine sends no more tokens of it."""
        if (request := engine.attempts.find(index)) is not None:
            self._ended(engine, request, ended, None)

    def _ended(self, engine: EngineView, request: RemoteRequest, reported: Ended, last: Tokens | None) -> None:
        problem = _problem(request, reported.reason, last)
        if reported.reason in BY_TOKENS and last is not None and problem is None:
            engine.attempts.forget(request)
            ended = replace(request.ended(reported, self._clock()), inference_s=last.inference_s)
            self._remove(request)
            request.give(last, ended)
            return
        if last is not None and (cause := request.give(last, None)):
            self.cancel(request.index, EndReason.FAILED, cause)
        if problem is not None:
            raise WireError(problem)
        if request.index not in self._open:
            return  # the sink has ended the request
        engine.attempts.forget(request)
        if reported.reason in ELSEWHERE:
            if reported.reason is EndReason.CLOSED:
                engine.close()
            self._go_elsewhere(request, reported)
        else:
            self._close(request, reported)

    def _go_elsewhere(self, request: RemoteRequest, reported: Ended) -> None:
        """Lets a request wait for another engine. Losses that the first engine counted against the request also count
        on the next engine."""
        group = request.group
        request.lose(self._clock())
        self._counts.moves += 1
        del group.members[request.index]
        together = group.moved
        if together is None or together.engine is not None or not together.members:
            together = replace(group, number=request.index, members={}, engine=None, origin=group)
            group.moved = together
            insort(self._waiting, together, key=_number)
        together.suspicions, together.counts = reported.suspicions, reported.counts
        together.members[request.index] = request
        request.group = together
        suspects = self._fleet.suspects
        suspects.inherit(group.number, together.number)
        if not group.members:
            suspects.take_back(group.number)
            if together.number != group.number:
                suspects.clear(group.number)
        self.place()

    def epoch(self, engine: EngineView, snapshot: Snapshot | None, aboard: Iterable[int]) -> None:
        """Notes that the engine has lost its shards, or that `snapshot` describes its new shards. `aboard`: indexes of
        the requests whose steps the lost shards had not answered."""
        engine.attempts.note_useless()  # an engine that reports one epoch after the other floods the front
        if snapshot is not None:
            engine.facts = replace(engine.facts, snapshot=snapshot)
        for index in aboard:
            if (request := engine.attempts.find(index)) is not None:
                request.group.has_run = True

    def place(self, is_late: bool = False) -> None:
        """Submits waiting groups, oldest first. Members of a group that leave an engine one after the other wait until
        all have left, unless `is_late`."""
        if not self._waiting:
            return
        now, waiting, self._waiting = self._clock(), self._waiting, []
        for group in waiting:
            is_apart = group.origin is not None and bool(group.origin.members) and not is_late
            if group.members and (is_apart or not self._fleet.submit(group, now)):
                self._waiting.append(group)

    def give_up_stranded(self) -> None:
        """Fails the requests that have waited too long for an engine of their build, while engines of other builds are
        connected."""
        now = self._clock()
        for group in list(self._waiting):
            if not self._fleet.is_stranded(group):
                group.stranded_s = None
            elif group.stranded_s is None:
                group.stranded_s = now
            elif now - group.stranded_s >= STRANDED_S:
                self._fail(group, STRANDED)

    # Methods that call the sinks of requests.

    def _fail(self, group: RemoteGroup, cause: str) -> None:
        for index in list(group.members):
            self.cancel(index, EndReason.FAILED, cause)

    def _close(self, request: RemoteRequest, reported: Ended) -> None:
        ended = request.ended(reported, self._clock())
        self._remove(request)
        request.report_end(ended)

    def _remove(self, request: RemoteRequest) -> None:
        del self._open[request.index]
        self._on_end(request.index)
        group = request.group
        del group.members[request.index]
        if not group.members:
            group.answer()
            self._clear(group)


def _number(group: RemoteGroup) -> int:
    return group.number


def _problem(request: RemoteRequest, reason: EndReason, last: Tokens | None) -> str | None:
    """Why an engine may not give this reason for the end of the request. None: the engine may."""
    if reason in FRONTS_OWN:
        return f"a request ended as {reason.value}, which the front did not ask for"
    made, most = len(request.output_ids), request.request.max_new_tokens
    if reason in BY_TOKENS and (last is None or (reason is EndReason.LENGTH and made < most)):
        return f"a request ended as {reason.value} with {made} of {most} tokens"
    return None
