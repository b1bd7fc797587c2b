"""Which engine gets a request: the one with the best score.

The score is `matched / blocks − LOAD_WEIGHT × (load − least) / (mean + 1)`. The engine has cached `matched` of the
prompt's `blocks`. An engine's `load` is the number of prompt tokens that it still has to compute, plus ROW_TOKENS for
each request that it has: the load of its last report, plus the load that this front has sent since. `least` and `mean`
are the smallest and the mean load of all engines that may be chosen.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from text_generation_router.fleet.cache_index import Counts
from text_generation_router.scheduling.request import Share

# The ways in which a front may choose an engine for a request.

MAX_ENGINES = 1024  # most engines of a deployment


class PlacementPolicy(StrEnum):
    SCORE = "score"  # by what is cached and by the load (`choice.py`)
    LEAST_LOAD = "least-load"  # by the load alone
    LEAST_REQUESTS = "least-requests"  # the fewest unfinished requests of this front
    ROUND_ROBIN = "round-robin"


LOAD_WEIGHT = 0.5
# A request counts as this many tokens beside those of its prompt, for the output that it still has to make. If a
# request counted as much less, a single prompt that is being computed would outweigh all cached blocks: fronts would
# then scatter their chats (docs/replicas.md).
ROW_TOKENS = 1000

Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine: the fields of a Load message (proto/engine.proto) that the choice needs."""

    running: int = 0  # requests with a row
    waiting: int = 0  # requests in the queue
    waiting_tokens: int = 0  # prompt and output tokens in the queue that are to be computed
    computing_tokens: int = 0  # prompt tokens of running requests that are to be computed
    wait_s: float = 0.0  # forecast: seconds until a request that arrives now starts
    is_ready: bool = True
    is_draining: bool = False

    @property
    def uncomputed(self) -> int:
        """Number of tokens of prompts that are to be computed."""
        return self.waiting_tokens + self.computing_tokens

    @property
    def tokens(self) -> int:
        """All work that is left, in tokens of prompts."""
        return self.uncomputed + ROW_TOKENS * (self.running + self.waiting)

    @property
    def is_open(self) -> bool:
        """Whether the engine wants new requests."""
        return self.is_ready and not self.is_draining


class EngineChoice:
    """The loads of all engines, as one front knows them. An engine may be chosen once it has reported its load.

    `turn`: of engines with equal scores and loads, the engine with the next number after `turn` is chosen, so fronts
    with different turns choose different engines.
    """

    def __init__(self, num_engines: int, turn: int = 0) -> None:
        self._reported: list[EngineLoad | None] = [None] * num_engines
        self._loads_E = np.zeros(num_engines)
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(num_engines)]  # sent requests: index, load
        self._open: Numbers = np.empty(0, dtype=np.intp)  # engines that may be chosen
        self._open_list: list[int] = []  # `_open` as a list
        self._turn = turn % num_engines

    @property
    def open(self) -> list[int]:
        """The engines that may be chosen: ready and not draining."""
        return self._open_list

    def load(self, engine: int) -> float:
        return float(self._loads_E[engine])

    def reported(self, engine: int) -> EngineLoad | None:
        """The last reported load of the engine. None: it has reported nothing, or is lost."""
        return self._reported[engine]

    def take_report(self, engine: int, load: EngineLoad, newest: int) -> None:
        """Notes a reported load. The load includes the requests up to index `newest`, the last request that the engine
        had accepted before; the load of requests that were sent later is added."""
        sent = self._sent[engine]
        while sent and sent[0][0] <= newest:
            sent.popleft()
        self._loads_E[engine] = load.tokens + sum(each for _, each in sent)
        before, self._reported[engine] = self._reported[engine], load
        if before is None or before.is_open != load.is_open:
            self._find_open()

    def send(self, engine: int, index: int, tokens: int, rows: int = 1) -> None:
        """Notes that a request was sent: `index` rises with each, `tokens` of its prompt are not cached there, and it
        has `rows` sequences."""
        load = tokens + ROW_TOKENS * rows
        self._sent[engine].append((index, load))
        self._loads_E[engine] += load

    def lose(self, engine: int) -> None:
        """Notes that the engine is lost: it is not chosen until it reports its load again."""
        self._reported[engine] = None
        self._sent[engine].clear()
        self._find_open()

    def choose(self, matched: Counts, blocks: int, among: Sequence[int] | None = None) -> int | None:
        """The engine with the best score for a prompt of `blocks` whole blocks; of engines with equal scores the least
        loaded engine, of equal loads the next in turn. `matched`: cached blocks of each engine. `among`: the engines
        that may be chosen, rising, if not all that are open. None: there is no engine to choose."""
        open_E = self._open
        if among is not None and among != self._open_list:
            open_E = np.intersect1d(open_E, np.array(among, dtype=np.intp))
        if not len(open_E):
            return None
        loads_E = self._loads_E[open_E]
        scores_E = (loads_E.min() - loads_E) * (LOAD_WEIGHT / (float(loads_E.sum()) / len(loads_E) + 1))
        if blocks:
            scores_E += matched[open_E] / blocks
        best_E = open_E[scores_E == scores_E.max()]
        chosen = int(best_E[0]) if len(best_E) == 1 else self._among_equals(best_E)
        self._turn = chosen
        return chosen

    def _among_equals(self, best_E: Numbers) -> int:
        loads_E = self._loads_E[best_E]
        best = best_E[loads_E == loads_E.min()]
        return int(best[np.searchsorted(best, self._turn, "right") % len(best)])

    def _find_open(self) -> None:
        is_open = [load is not None and load.is_open for load in self._reported]
        self._open = np.flatnonzero(is_open)
        self._open_list = self._open.tolist()


# Which queued requests move to another engine, by Withdraw. Each request moves at most once, except off an engine that
# drains, where it always may. Running requests leave such an engine too, a few at a time. The wait that an engine
# reports is the wait of a request behind all others. So a front looks at its newest queued requests first: for these
# requests the reported wait is about right.

# A request moves only if the other engine's wait is at most this part of the present wait, and at least GAIN_S seconds
# shorter.
PART, GAIN_S = 0.5, 2.0
# Running requests leave an engine that drains for engines that expect a wait of at most LEAVE_WAIT_S seconds and have
# at most LEAVE_TOKENS tokens to compute: LEAVE_AT_ONCE of them at most, or as many as have LEAVE_TOKENS together.
LEAVE_WAIT_S, LEAVE_TOKENS, LEAVE_AT_ONCE = 1.0, 4096, 8


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request of this front that has made no token, and whose engine is not known to have begun it."""

    index: int  # rises with the requests that a front sends to an engine
    engine: int
    tokens: int  # tokens of its prompt that are to be computed
    has_moved: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    index: int
    source: int
    target: int


def takes_leavers(load: EngineLoad) -> bool:
    """Whether the engine can take running requests of an engine that drains, without holding up its own."""
    return load.is_open and load.wait_s <= LEAVE_WAIT_S and load.uncomputed <= LEAVE_TOKENS


def plan_leaves(tokens: Iterable[int]) -> int:
    """How many of the first running requests leave together. `tokens`: what each has to compute again elsewhere."""
    count = total = 0
    for each in tokens:
        if count == LEAVE_AT_ONCE or (count and total + each > LEAVE_TOKENS):
            break
        count, total = count + 1, total + each
    return count


def plan_moves(queued: Iterable[QueuedRequest], loads: Mapping[int, EngineLoad]) -> list[Move]:
    """The moves that shorten waits, newest request first. `loads`: the last report of each engine; an engine that is
    not in it is never a target. Each planned move changes the waits that the next one is compared with: by the move's
    tokens, at the engine's own rate of seconds expected for each queued token.

    An engine that does not drain loses one request at a time, because all fronts see the same waits: if each front
    moved every request that seems right, the fronts together would move too many. The next reports of engines show what
    is left to move."""
    if not any(load.is_draining or load.wait_s >= GAIN_S for load in loads.values()):
        return []
    waits = {engine: load.wait_s for engine, load in loads.items()}
    targets = [engine for engine, load in loads.items() if load.is_open]
    target, moves, left = min(targets, key=waits.__getitem__, default=None), list[Move](), set[int]()
    for request in sorted(queued, key=lambda each: each.index, reverse=True):
        source = loads.get(request.engine)
        if source is None or target is None or request.engine == target:
            continue
        rate_s = _seconds_per_token(source) or _seconds_per_token(loads[target])
        here, there = waits[request.engine], waits[target] + request.tokens * rate_s
        gains = not request.has_moved and there <= min(PART * here, here - GAIN_S)
        if source.is_draining or (gains and request.engine not in left):
            left.add(request.engine)
            moves.append(Move(request.index, request.engine, target))
            waits[target], waits[request.engine] = there, max(0.0, here - request.tokens * rate_s)
            target = min(targets, key=waits.__getitem__)
    return moves


def _seconds_per_token(load: EngineLoad) -> float:
    return load.wait_s / load.uncomputed if load.uncomputed else 0.0


# The tokens that other engines have served to a tenant: a front sends this number to an engine with each request of the
# tenant.
#
# An engine reports the number of tokens that it has served to each tenant since its process started. A *life* is one
# run of that process, known by its incarnation number. Within a life the number only grows, and a front keeps the
# greatest number for each engine, life and tenant. So a report that is repeated, late or lost changes nothing once a
# later report has come. The engine in turn keeps the greatest sum that any front has sent to it (`Tenant.elsewhere`).

IDLE_S = 60.0  # seconds after which a tenant without new service is forgotten
MAX_LIVES = 8  # lives of one engine that are remembered singly; older lives only as a sum


@dataclass(slots=True)
class ServiceOfTenant:
    served: dict[int, dict[int, float]] = field(default_factory=dict)  # tokens, by engine and life
    total: float = 0.0  # the sum of `served`, and of lives that are not remembered singly
    grew_s: float = 0.0  # when `total` last grew


class ServiceBook:
    """The tokens that all engines have served to each tenant, as one front knows them. A later life of an engine has a
    greater number."""

    def __init__(self) -> None:
        self._tenants: dict[Share, ServiceOfTenant] = {}
        self._forgot_s = 0.0  # when idle tenants were last forgotten

    def __len__(self) -> int:
        return len(self._tenants)

    def take_report(self, engine: int, life: int, served: Mapping[Share, float], now_s: float) -> None:
        """Notes the tokens that an engine has served to each tenant in this life. Once in IDLE_S seconds also forgets
        the tenants whose service has not grown for as long."""
        if now_s - self._forgot_s >= IDLE_S:
            self._forgot_s = now_s
            self._tenants = {share: each for share, each in self._tenants.items() if now_s - each.grew_s < IDLE_S}
        for share, tokens in served.items():
            tenant = self._tenants.get(share)
            if tenant is None:
                tenant = self._tenants[share] = ServiceOfTenant(grew_s=now_s)
            lives = tenant.served.setdefault(engine, {})
            if len(lives) == MAX_LIVES and life not in lives:
                if life < min(lives):
                    continue
                del lives[min(lives)]
            more = tokens - lives.get(life, 0.0)
            if more > 0:
                lives[life] = tokens
                tenant.total += more
                tenant.grew_s = now_s

    def elsewhere(self, engine: int, life: int, share: Share) -> float:
        """Tokens served to the tenant by all other engines, and by this engine in its other lives."""
        tenant = self._tenants.get(share)
        return 0.0 if tenant is None else tenant.total - tenant.served.get(engine, {}).get(life, 0.0)
