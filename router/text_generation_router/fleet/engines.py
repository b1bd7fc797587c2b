"""The engines that one front is connected to: what each of them told, and which of them gets a group of requests.
Pure: no input or output, and no clock."""

from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite

from text_generation_router.engine.protocol import Load, Snapshot, TokenLimits
from text_generation_router.fleet.attempts import Attempts
from text_generation_router.fleet.cache_news import CacheNews
from text_generation_router.fleet.choice import QueuedRequest, plan_leaves, plan_moves, takes_leavers
from text_generation_router.fleet.placement import Placement
from text_generation_router.fleet.requests import RemoteGroup
from text_generation_router.fleet.service import ServiceBook
from text_generation_router.fleet.suspects import LostRequests, Suspects, meeting_engine
from text_generation_router.fleet.values import EngineFacts, EngineLoss, ToldLoad
from text_generation_router.wire.version import WITH_BEGUN

# Most Submits of requests that were on another engine before, at a time, that an engine has not answered.
MAX_RESUBMITS = 64


@dataclass(slots=True, eq=False)
class EngineView:
    """A connected engine, as the front knows it."""

    facts: EngineFacts
    told: ToldLoad
    attempts: Attempts
    is_full: bool = False  # whether the engine has refused to go on with a request since it told its load
    has_other_suspects: bool = False  # whether it has refused a suspect since then, because of another front's
    heard_s: float = 0.0  # time of the event loop at which the engine last sent a message
    is_open: bool = field(init=False)  # whether the engine takes requests
    is_ready: bool = field(init=False)  # whether it has shards too
    _is_closing: bool = False  # whether the engine has refused requests because the engine ends

    def __post_init__(self) -> None:
        self.tell(self.told)

    def tell(self, told: ToldLoad) -> None:
        self.told = told
        self.is_full = self.has_other_suspects = False
        self._is_closing = self._is_closing and told.load.is_draining
        self._look()

    def close(self) -> None:
        """The engine has refused a request because the engine ends."""
        self._is_closing = True
        self._look()

    def _look(self) -> None:
        # Read for each request and engine.
        self.is_open = not (self._is_closing or self.told.load.is_draining)
        self.is_ready = self.is_open and self.told.load.is_ready

    @property
    def is_current(self) -> bool:
        """Whether the load that the engine told contains all that it was sent."""
        newest = self.told.newest_index
        return not self.attempts.num_unanswered and (newest is None or newest >= self.attempts.newest_answered)

    @property
    def takes_resubmits(self) -> bool:
        return not self.is_full and self.attempts.num_unanswered < MAX_RESUBMITS


class Fleet:
    """Engines have numbers; that of a lost engine may be used again."""

    def __init__(self, placement: Placement, resumes_across_builds: bool, front: str = "") -> None:
        """`resumes_across_builds`: whether a request goes on with an engine of another digest. `front`: the front's
        id."""
        self.engines: dict[int, EngineView] = {}
        self.suspects = Suspects(front)
        self._cut: dict[int, str] = {}  # for each engine whose stream broke, the name of its life
        self.permits = 0  # requests that the engines allow this front; without any engine: what they allowed last
        self._placement = placement
        self._resumes_across_builds = resumes_across_builds
        self._service = ServiceBook()

    def join(self, engine: int, view: EngineView, now: float) -> list[int]:
        """Returns the numbers of the groups that are given up, because they have hung the engine's last life."""
        self.permits = view.told.permits + (self.permits if self.engines else 0)
        self.engines[engine] = view
        given_up = self.suspects.returned(engine, view.facts.engine_id, now)
        if self._cut.pop(engine, None) == view.facts.engine_id:
            self.suspects.absolve(view.facts.engine_id)
        self._placement.joined(engine, view.facts.snapshot.limits.max_batch_total_tokens, view.attempts.__len__)
        self.tell(engine, view.told, now)
        return given_up

    def tell(self, engine: int, told: ToldLoad, now: float) -> bool:
        """Takes an engine's word. Returns whether it has become ready, or is no longer."""
        view = self.engines[engine]
        was_ready = view.is_ready
        self.permits += told.permits - view.told.permits
        view.tell(told)
        self._service.tell(engine, view.facts.term, told.served, now)
        newest = view.attempts.newest_answered if told.newest_index is None else told.newest_index
        self._placement.told(engine, told, newest, now)
        return was_ready != view.is_ready

    @property
    def wants_cache(self) -> bool:
        """Whether engines are to tell of their caches."""
        return self._placement.wants_cache

    @property
    def num_cached_blocks(self) -> int:
        """Number of different blocks that engines are known to have cached."""
        return self._placement.num_cached_blocks

    def cached(self, engine: int, sequence: int, news: CacheNews) -> bool:
        """Takes news of an engine's cache. False: some are missing before these."""
        return self._placement.cached(engine, sequence, news)

    def lose(self, engine: int, loss: EngineLoss, now: float) -> tuple[list[RemoteGroup], list[int]]:
        """Returns the groups that were there, and the numbers of those that are given up as the cause."""
        view = self.engines.pop(engine)
        self._cut[engine] = view.facts.engine_id
        self.permits -= view.told.permits if self.engines else 0
        self._placement.lost(engine)
        groups = view.attempts.lose()
        return groups, self.suspects.lose(engine, _lost(view.facts, groups, loss), now)

    def remove(self, engine: int) -> None:
        """The engine, which is lost, is not one of the deployment any more."""
        self._cut.pop(engine, None)
        self.suspects.returned(engine)

    def submit(self, group: RemoteGroup, now: float) -> bool:
        """Submits the group, if there is an engine for it."""
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
        """The engine that the group goes to. None: there is none now."""
        engines = self._engines_for(group, now)
        if len(engines) > 1:
            return self._choose(group, engines)
        return engines[0] if engines else None

    def _engines_for(self, group: RemoteGroup, now: float) -> list[int]:
        """The engines that may get the group: with shards, or else without."""
        if group.is_new and self.suspects.are_free:
            ready = [engine for engine, view in self.engines.items() if view.is_ready]
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
        return group.digest in (None, view.facts.digest) or self._resumes_across_builds

    def _choose(self, group: RemoteGroup, engines: list[int]) -> int:
        if (trial := self.suspects.trial(group.number)) is not None:
            names = {engine: self.engines[engine].facts.engine_id for engine in engines}
            return meeting_engine(trial.group, names)
        return self._placement.choose(group, engines)

    def withdraw_queued(self, now: float) -> None:
        """Takes groups back that wait on engines that are draining or have no shards, if another engine can take them
        now. From an engine without shards, groups that have made a token there leave too. The others that have begun
        there stay: the likeliest cause of the loss is among them, and must not go on to end other shards."""
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
        told loads that contain all that they were sent."""
        targets = {engine for engine, view in self.engines.items() if takes_leavers(view.told.load) and view.is_current}
        for view in self.engines.values() if targets else ():
            if view.told.load.is_draining and view.facts.version >= WITH_BEGUN:
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
        """Takes queued groups back from engines whose expected wait is much longer than that of another one."""
        if len(self.engines) < 2:
            return
        loads = {engine: view.told.load for engine, view in self.engines.items() if view.is_open}
        queued = {group.number: group for view in self.engines.values() for group in view.attempts.groups}
        may_move = (  # looked at only if any engine's wait is long
            QueuedRequest(group.number, group.engine, group.num_uncomputed, group.has_moved)
            for group in queued.values()
            if group.engine in loads and group.can_leave and len(self._engines_for(group, now)) > 1
        )
        for move in plan_moves(may_move, loads):
            self.engines[move.source].attempts.withdraw(queued[move.index])

    def is_stranded(self, group: RemoteGroup) -> bool:
        """Whether there are engines, but none of the build that has made the group's tokens."""
        return bool(self.engines) and not any(self._goes_on(group, view) for view in self.engines.values())

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest facts, with limits that every connected engine has. None: no engine is connected."""
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
        return Load(max(1, ceil(wait_s if isfinite(wait_s) else 1.0)))

    @property
    def least_wait_s(self) -> float:
        """Expected wait of a request that arrives now, on the engine where it is shortest; infinite: on none."""
        return min((view.told.load.wait_s for view in self.engines.values() if view.is_open), default=inf)


def _lost(facts: EngineFacts, groups: list[RemoteGroup], loss: EngineLoss) -> LostRequests:
    """What of `groups` may have caused the loss of their engine."""
    if loss in (EngineLoss.OUTSIDE, EngineLoss.SILENT):
        tokenless = [group.number for group in groups if not group.is_proven_here]
        return LostRequests(facts.engine_id, silent=tokenless, is_sure=loss is EngineLoss.SILENT)
    if loss is EngineLoss.CUT_OFF:
        unanswered = [group.number for group in groups if not group.is_answered]
        return LostRequests(facts.engine_id, queued=unanswered, has_died=False)
    tells = facts.version >= WITH_BEGUN
    begun = {group.number: group for group in groups if (group.has_begun_here if tells else group.is_answered)}
    return LostRequests(
        name=facts.engine_id,
        begun=list(begun),
        proven=[number for number, group in begun.items() if group.is_proven_here],
        queued=[group.number for group in groups if group.number not in begun],
    )
