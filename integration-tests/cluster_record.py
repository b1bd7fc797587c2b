"""What the clients of a deployment noticed of its faults, computed from their answers and the fronts' logs."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from asks import Ask
from cluster_faults import ClusterFault
from logs import Notice
from outcome import table
from streams import StreamAnswer, differences

# Kinds that end an engine for certain, so that every run must notice them.
ENDED = ("power lost", "machine killed")
# Kinds of which the fronts can only learn by a replica's silence. Silences of less than 3 s are not noticed.
SILENT = ("cable pulled", "partition", "machine stopped")
NOTICED_LIMIT_S, FLOWING_LIMIT_S = 10.0, 3.0
# Seconds after a fault in which a notice of its engine's loss, and the longest gap of a stream, count as its own.
EFFECT_S = 15.0
STALL_S = 4.0


@dataclass(frozen=True, slots=True)
class Effect:
    """What came of one fault."""

    fault: ClusterFault
    in_text: int  # number of streams that had received tokens before the fault, and were to receive more
    gap_s: float  # the longest time between two tokens of any stream, of those that overlap the fault
    was_connected: bool  # whether a front was connected to the engine
    noticed_s: float | None  # seconds until the last front had noticed the loss of the engine; None: none did
    flowing_s: float | None  # seconds from that moment to the next token of the stream that waited longest

    def failures(self) -> list[str]:
        if self.fault.kind not in (*ENDED, *SILENT):
            return []
        if self.noticed_s is None or self.flowing_s is None:
            is_missed = self.fault.kind in ENDED and self.was_connected
            return [f"{self.fault.kind} of {self.fault.victim}: not noticed within {EFFECT_S:.0f} s"] * is_missed
        found = []
        if self.noticed_s > NOTICED_LIMIT_S:
            found.append(f"{self.fault.kind} of {self.fault.victim}: noticed after {self.noticed_s:.1f} s")
        if self.flowing_s > FLOWING_LIMIT_S:
            found.append(
                f"{self.fault.kind} of {self.fault.victim}: streams flow {self.flowing_s:.1f} s after the notice"
            )
        return found


@dataclass(frozen=True, slots=True)
class ClusterResult:
    seed: int
    effects: Sequence[Effect]
    streams: int
    kinds: Mapping[str, int]  # number of streams by kind of ask
    with_front: int  # number of streams that were lost together with their front
    lost: Sequence[str]  # how the other streams ended that did not end normally
    different: Sequence[str]  # the streams whose outcome is not that of the run without faults, and how
    stalls: Sequence[str]
    problems: Sequence[str] = ()  # times that the deployment has not recovered

    @property
    def rows(self) -> int:
        return sum(effect.fault.rows for effect in self.effects)

    @property
    def in_text(self) -> int:
        """Number of streams in mid-text at the faults, added up. About as large a part of the requests on the victims
        was in mid-text as of all streams."""
        return sum(effect.in_text for effect in self.effects)

    def shortfalls(self, faults: int, of_each_kind: int, rows: int) -> list[str]:
        """What the run has fewer of than asked for."""
        times = Counter(effect.fault.kind for effect in self.effects)
        found = [
            f"{count} × {kind}, fewer than {of_each_kind}" for kind, count in times.items() if count < of_each_kind
        ]
        found += [f"{len(self.effects)} faults, fewer than {faults}"] if len(self.effects) < faults else []
        return found + ([f"{self.rows} requests on victims, fewer than {rows}"] if self.rows < rows else [])

    def details(self) -> list[str]:
        """Each stream that was lost, and each that differs."""
        return [*self.lost, *self.different]

    def failures(self) -> list[str]:
        found = [f"{len(self.lost)} of {self.streams} streams lost: {self.lost[0]}"] if self.lost else []
        found += [f"{len(self.different)} outcomes differ: {self.different[0]}"] if self.different else []
        return [*found, *self.problems, *(failure for effect in self.effects for failure in effect.failures())]


def result(
    seed: int,
    faults: Sequence[ClusterFault],
    notices: Sequence[Notice],
    asked: Sequence[Ask],
    expected: Sequence[StreamAnswer],
    answers: Sequence[StreamAnswer],
    different: Sequence[str],
) -> ClusterResult:
    """`different`: what was found to differ otherwise, such as texts that were asked for again."""
    broken, other = differences(asked, expected, answers)
    lost = [answer for answer in broken if not _is_with_front(answer, faults)]
    return ClusterResult(
        seed,
        [effect(fault, notices, answers) for fault in faults],
        len(answers),
        Counter(asked[answer.ask].kind for answer in answers),
        len(broken) - len(lost),
        [f"{asked[a.ask].kind}, port {a.port}, {a.started_s:.2f} … {a.ended_s:.2f}: {a.error}" for a in lost],
        [*different, *other],
        stalls(asked, answers),
    )


def _is_with_front(answer: StreamAnswer, faults: Sequence[ClusterFault]) -> bool:
    """Whether the front that had the connection has died."""
    return any(answer.port in fault.ports and answer.started_s < fault.lifted_s for fault in faults)


def effect(fault: ClusterFault, notices: Sequence[Notice], answers: Sequence[StreamAnswer]) -> Effect:
    streams = [answer.arrivals_s for answer in answers if answer.arrivals_s and not answer.error]
    in_text = [arrivals for arrivals in streams if arrivals[0] <= fault.at_s < arrivals[-1]]
    heard = [
        notice.at_s
        for notice in notices
        if notice.is_lost and notice.target == fault.target and fault.at_s <= notice.at_s <= fault.at_s + EFFECT_S
    ]
    firsts = list(_first_of_each_front(fault, notices)) if heard else []
    noticed_at_s = max(firsts, default=None)
    gaps = [gap for arrivals in streams for gap in _gaps(arrivals, fault.at_s)]
    noticed = flowing = None
    if noticed_at_s is not None:
        noticed = noticed_at_s - fault.at_s
        waits = [
            arrivals[bisect_right(arrivals, noticed_at_s)] - noticed_at_s
            for arrivals in streams
            if arrivals[0] <= noticed_at_s < arrivals[-1]
        ]
        flowing = max(waits, default=0.0)
    return Effect(fault, len(in_text), max(gaps, default=0.0), _was_connected(fault, notices), noticed, flowing)


def _was_connected(fault: ClusterFault, notices: Sequence[Notice]) -> bool:
    """Whether a front was connected to the victim's engine when the fault began."""
    before = [notice for notice in notices if notice.target == fault.target and notice.at_s < fault.at_s]
    return not all({notice.front: notice.is_lost for notice in before}.values())


def _first_of_each_front(fault: ClusterFault, notices: Sequence[Notice]) -> Iterator[float]:
    seen = set()
    for notice in notices:
        is_own = notice.is_lost and notice.target == fault.target
        if is_own and fault.at_s <= notice.at_s <= fault.at_s + EFFECT_S and notice.front not in seen:
            seen.add(notice.front)
            yield notice.at_s


def _gaps(arrivals: Sequence[float], at_s: float) -> Iterator[float]:
    """The times between two tokens that end after the fault, and begin within EFFECT_S after it."""
    for place in range(max(1, bisect_right(arrivals, at_s)), len(arrivals)):
        if arrivals[place - 1] > at_s + EFFECT_S:
            return
        yield arrivals[place] - arrivals[place - 1]


def stalls(asked: Sequence[Ask], answers: Sequence[StreamAnswer]) -> list[str]:
    """The gaps of streams that are longer than STALL_S, to be compared with the logs."""
    found = []
    for answer in answers:
        for place, (one, other) in enumerate(pairwise(answer.arrivals_s), start=1):
            if other - one > STALL_S:
                where = f"{place} of {len(answer.arrivals_s)} events"
                found.append(f"{one:.2f} +{other - one:.1f} s: {asked[answer.ask].kind}, {where}")
    return sorted(found)


def as_table(found: ClusterResult) -> str:
    """The Markdown table: a row for each kind of fault."""
    rows = []
    for kind in dict.fromkeys(effect.fault.kind for effect in found.effects):
        effects = [effect for effect in found.effects if effect.fault.kind == kind]
        noticed = [effect.noticed_s for effect in effects if effect.noticed_s is not None]
        flowing = [effect.flowing_s for effect in effects if effect.flowing_s is not None]
        gaps = [effect.gap_s for effect in effects]
        noticed_text = f"{median(noticed):.1f}, {max(noticed):.1f} ({len(noticed)} ×)" if noticed else "–"
        flowing_text = f"{max(flowing):.1f}" if flowing else "–"
        counts = [len(effects), sum(effect.fault.rows for effect in effects)]
        rows.append([kind, *counts, noticed_text, flowing_text, f"{median(gaps):.1f}, {max(gaps):.1f}"])
    head = "fault|times|requests on the victim|noticed after, median and worst s|flowing after, worst s"
    return (
        f"{table(f'{head}|longest gap of a stream, median and worst s', rows)}\n\n"
        f"Seed {found.seed}: {len(found.effects)} faults, {found.rows} requests on their victims (on average"
        f" {found.in_text / max(1, len(found.effects)):.0f} of the streams were in mid-text at a fault),"
        f" {found.streams} streams of {len(found.kinds)} kinds; {found.with_front} lost with their front,"
        f" {len(found.lost)} lost otherwise, {len(found.different)} with another outcome."
    )
