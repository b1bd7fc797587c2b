"""The engines that one front is connected to: what each of them reported, and which engine gets a group of requests.
Pure: no input or output, and no clock."""

from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite

from text_generation_router.engine.protocol import Load, Snapshot, TokenLimits
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.cache_news import CacheNews
from text_generation_router.fleet.choice import QueuedRequest, ServiceBook, plan_leaves, plan_moves, takes_leavers
from text_generation_router.fleet.placement import Placement
from text_generation_router.fleet.requests import RemoteGroup
from text_generation_router.fleet.suspects import LostRequests, Suspects, meeting_engine
from text_generation_router.fleet.values import EngineFacts, EngineLoss, LoadReport
from text_generation_router.wire.version import WITH_BEGUN

# Maximum number of unacknowledged resubmissions per engine.
MAX_RESUBMITS = 64


@dataclass(slots=True, eq=False)
class EngineView:
    """A connected engine, as the front knows it."""

    facts: EngineFacts
    report: LoadReport
    attempts: Attempts
    is_full: bool = False  # whether the engine has refused a resubmission since its last report
    has_other_suspects: bool = False  # whether it has refused a suspect since that report: it has another group
    heard_s: float = 0.0  # time of the event loop at which the engine last sent a message
    is_open: bool = field(init=False)  # whether the engine takes requests
    is_ready: bool = field(init=False)  # whether the engine takes requests and has shards
    _is_closing: bool = False  # whether the engine has refused requests because the engine ends

    def __post_init__(self) -> None:
        self.update(self.report)

    def update(self, report: LoadReport) -> None:
        self.report = report
        self.is_full = self.has_other_suspects = False
        self._is_closing = self._is_closing and report.load.is_draining
        self._look()

    def close(self) -> None:
        """Notes that the engine has refused a request because the engine ends."""
        self._is_closing = True
        self._look()

    def _look(self) -> None:
        # Computed once for each report, because both are read for each request.
        self.is_open = not (self._is_closing or self.report.load.is_draining)
        self.is_ready = self.is_open and self.report.load.is_ready

    @property
    def is_current(self) -> bool:
        """Whether the last report includes all requests that the engine was sent."""
        newest = self.report.newest_index
        return not self.attempts.num_unanswered and (newest is None or newest >= self.attempts.newest_answered)

    @property
    def takes_resubmits(self) -> bool:
        return not self.is_full and self.attempts.num_unanswered < MAX_RESUBMITS


class Fleet:
    """Engines are known by numbers. The number of a lost engine may be used again."""

    def __init__(self, placement: Placement, resumes_across_builds: bool, front: str = "") -> None:
        """`resumes_across_builds`: whether a request goes on with an engine of another digest. `front`: the front's
        id."""
        self.engines: dict[int, EngineView] = {}
        self.suspects = Suspects(front)
        self._cut: dict[int, str] = {}  # engines whose stream broke: the `engine_id` at that time
        self.permits = 0  # requests that the engines allow this front; without any engine, the number allowed last
        self._placement = placement
        self._resumes_across_builds = resumes_across_builds
        self._service = ServiceBook()

    def join(self, engine: int, view: EngineView, now: float) -> list[int]:
        """Notes that an engine is connected. Returns the numbers of the groups that have to fail, because they hung
        this engine's earlier process."""
        self.permits = view.report.permits + (self.permits if self.engines else 0)
        self.engines[engine] = view
        given_up = self.suspects.returned(engine, view.facts.engine_id, now)
        if self._cut.pop(engine, None) == view.facts.engine_id:
            self.suspects.absolve(view.facts.engine_id)
        self._placement.joined(engine, view.facts.snapshot.limits.max_batch_total_tokens, view.attempts.__len__)
        self.take_report(engine, view.report, now)
        return given_up

    def take_report(self, engine: int, report: LoadReport, now: float) -> bool:
        """Notes an engine's load. Returns whether the engine has become ready, or is not ready any more."""
        view = self.engines[engine]
        was_ready = view.is_ready
        self.permits += report.permits - view.report.permits
        view.update(report)
        self._service.take_report(engine, view.facts.term, report.served, now)
        newest = view.attempts.newest_answered if report.newest_index is None else report.newest_index
        self._placement.reported(engine, report, newest, now)
        return was_ready != view.is_ready

    @property
    def wants_cache(self) -> bool:
        """Whether engines are to report changes of their caches."""
        return self._placement.wants_cache

    @property
    def num_cached_blocks(self) -> int:
        """Number of different blocks that engines are known to have cached."""
        return self._placement.num_cached_blocks

    def cached(self, engine: int, sequence: int, news: CacheNews) -> bool:
        """Notes changes of an engine's cache. False: earlier changes are missing."""
        return self._placement.cached(engine, sequence, news)

    def lose(self, engine: int, loss: EngineLoss, now: float) -> tuple[list[RemoteGroup], list[int]]:
        """Notes the loss of an engine. Returns the groups that it had, and the numbers of the groups that have to fail
        as the cause."""
        view = self.engines.pop(engine)
        self._cut[engine] = view.facts.engine_id
        self.permits -= view.report.permits if self.engines else 0
        self._placement.lost(engine)
        groups = view.attempts.lose()
        return groups, self.suspects.lose(engine, _lost(view.facts, groups, loss), now)

    def remove(self, engine: int) -> None:
        """Notes that a lost engine is not part of the deployment any more."""
        self._cut.pop(engine, None)
        self.suspects.returned(engine)

    def lacks_adapter(self, adapter: str) -> bool:
        """Whether no connected engine has loaded the adapter, so that a request for it would wait for ever."""
        having = [adapter in view.facts.snapshot.model.adapters for view in self.engines.values()]
        return bool(adapter and having) and not any(having)

    def submit(self, group: RemoteGroup, now: float) -> bool:
        """Submits the group to an engine. False: no engine may get the group now."""
        engine = self.engine_for(group, now)
        if engine is None:
            return False
        view = self.engines[engine]
        elsewhere = self._service.elsewhere(engine, view.facts.term, group.request.share)
        view.attempts.submit(group, now, elsewhere, self.suspects.trial(group.number))
        self._placement.sent(engine, group)
        self.suspects.send(group.number, engine)
        return True

    def engine_for(self, group: RemoteGroup, now: float) -> int | None:
        """The engine that gets the group. None: no engine may get the group now."""
        engines = self._engines_for(group, now)
        if len(engines) > 1:
            return self._choose(group, engines)
        return engines[0] if engines else None

    def _engines_for(self, group: RemoteGroup, now: float) -> list[int]:
        """The engines that may get the group. If any of them has running shards, only engines with running shards."""
        if group.is_new and self.suspects.are_free:
            ready = [engine for engine, view in self.engines.items() if view.is_ready and _has_adapter(group, view)]
            if ready:
                return ready
        engines = [engine for engine, view in self.engines.items() if view.is_open and self._goes_on(group, view)]
        if group.is_accepted:
            engines = [engine for engine in engines if self.engines[engine].takes_resubmits]
        if group.number in self.suspects:
            engines = [engine for engine in engines if not self.engines[engine].has_other_suspects]
        engines = self.suspects.engines_for(group.number, engines, now)
        ready = [engine for engine in engines if self.engines[engine].is_ready]
        return ready or engines

    def _goes_on(self, group: RemoteGroup, view: EngineView) -> bool:
        is_same = group.digest in (None, view.facts.digest) or self._resumes_across_builds
        return is_same and _has_adapter(group, view)

    def _choose(self, group: RemoteGroup, engines: list[int]) -> int:
        if (trial := self.suspects.trial(group.number)) is not None:
            names = {engine: self.engines[engine].facts.engine_id for engine in engines}
            return meeting_engine(trial.group, names)
        return self._placement.choose(group, engines)

    def withdraw_queued(self, now: float) -> None:
        """Takes waiting groups back from engines that drain or have no shards, if another engine can take them now.
        Groups that have made a token on an engine without shards leave it too. Other groups that have begun there stay:
        the likeliest cause of the loss is among them, and must not go on to end other shards."""
        for view in self.engines.values():
            if view.is_ready:
                continue
            has_lost_shards = view.is_open and view.facts.version >= WITH_BEGUN
            for group in view.attempts.groups:
                goes_on = has_lost_shards and group.is_answered and not group.is_leaving and group.is_proven_here
                if not (group.can_leave or goes_on):
                    continue
                if any(self.engines[engine].is_ready for engine in self._engines_for(group, now)):
                    view.attempts.withdraw(group, even_begun=not group.can_leave)

    def leave_draining(self, now: float) -> None:
        """Takes running requests back from engines that drain: the next few once the engines that can take them have
        reported loads that include all requests they were sent."""
        targets = {
            engine for engine, view in self.engines.items() if takes_leavers(view.report.load) and view.is_current
        }
        for view in self.engines.values() if targets else ():
            if view.report.load.is_draining and view.facts.version >= WITH_BEGUN:
                groups = [group for group in view.attempts.groups if group.is_answered]
                if any(group.is_leaving for group in groups):
                    continue
                may_leave = [
                    group
                    for group in groups
                    if group.number not in self.suspects and targets.intersection(self._engines_for(group, now))
                ]
                for group in may_leave[: plan_leaves(group.num_uncomputed for group in may_leave)]:
                    view.attempts.withdraw(group, even_begun=True)

    def balance(self, now: float) -> None:
        """Takes queued groups back from engines whose expected wait is much longer than the wait on another engine."""
        if len(self.engines) < 2:
            return
        loads = {engine: view.report.load for engine, view in self.engines.items() if view.is_open}
        queued = {group.number: group for view in self.engines.values() for group in view.attempts.groups}
        may_move = (  # evaluated only if the wait on any engine is long
            QueuedRequest(group.number, group.engine, group.num_uncomputed, group.has_moved)
            for group in queued.values()
            if group.engine in loads and group.can_leave and len(self._engines_for(group, now)) > 1
        )
        for move in plan_moves(may_move, loads):
            self.engines[move.source].attempts.withdraw(queued[move.index])

    def is_stranded(self, group: RemoteGroup) -> bool:
        """Whether engines are connected, but no engine of the build that has made the group's tokens."""
        return bool(self.engines) and not any(self._goes_on(group, view) for view in self.engines.values())

    @property
    def snapshot(self) -> Snapshot | None:
        """The facts of one engine, with the smallest limits of all engines. None: no engine is connected."""
        known = [view.facts.snapshot for view in self.engines.values()]
        if not known:
            return None
        limits = [snapshot.limits for snapshot in known]
        smallest = TokenLimits(
            min(limit.max_input_tokens for limit in limits),
            min(limit.max_total_tokens for limit in limits),
            min(limit.max_batch_total_tokens for limit in limits),
        )
        return replace(known[0], limits=smallest)

    @property
    def load(self) -> Load:
        wait_s = self.least_wait_s
        is_ready = any(view.is_ready for view in self.engines.values())
        return Load(max(1, ceil(wait_s if isfinite(wait_s) else 1.0)), is_ready=is_ready)

    @property
    def least_wait_s(self) -> float:
        """Shortest expected wait of a request that arrives now, over all engines; infinite: no engine takes
        requests."""
        return min((view.report.load.wait_s for view in self.engines.values() if view.is_open), default=inf)


def _lost(facts: EngineFacts, groups: list[RemoteGroup], loss: EngineLoss) -> LostRequests:
    """The requests of `groups` that may have caused the loss of their engine."""
    if loss in (EngineLoss.OUTSIDE, EngineLoss.SILENT):
        tokenless = [group.number for group in groups if not group.is_proven_here]
        return LostRequests(facts.engine_id, silent=tokenless, is_sure=loss is EngineLoss.SILENT)
    if loss is EngineLoss.CUT_OFF:
        unanswered = [group.number for group in groups if not group.is_answered]
        return LostRequests(facts.engine_id, queued=unanswered, has_died=False)
    reports_begun = facts.version >= WITH_BEGUN
    begun = {group.number: group for group in groups if (group.has_begun_here if reports_begun else group.is_answered)}
    return LostRequests(
        name=facts.engine_id,
        begun=list(begun),
        proven=[number for number, group in begun.items() if group.is_proven_here],
        queued=[group.number for group in groups if group.number not in begun],
    )


def _has_adapter(group: RemoteGroup, view: EngineView) -> bool:
    adapter = group.request.adapter
    return not adapter or adapter in view.facts.snapshot.model.adapters
