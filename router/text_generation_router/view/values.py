"""The values of an engine's state. Tables are columns of equal length, which takes a third of the bytes of rows."""

from dataclasses import dataclass

Numbers = tuple[int, ...]
SHORT_CHARS = 8


def short_id(name: str) -> str:
    """A front's id as people see it."""
    return name[:SHORT_CHARS]


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The running requests, oldest place first."""

    id: Numbers = ()
    tenant: tuple[str, ...] = ()
    age_s: tuple[float, ...] = ()
    prompt: Numbers = ()
    cached: Numbers = ()  # tokens that the prefix cache had at the first start
    prefilled: Numbers = ()  # tokens of the history that are cached or in sent chunks
    prefill_to: Numbers = ()  # tokens of the history that the last start computes
    made: Numbers = ()
    most: Numbers = ()  # the most new tokens
    expected: Numbers = ()  # mean of the lengths that admission drew
    slots: Numbers = ()
    paused: Numbers = ()  # 1: the client does not read


@dataclass(frozen=True, slots=True)
class WaitColumns:
    """The first waiting requests."""

    id: Numbers = ()
    tenant: tuple[str, ...] = ()
    age_s: tuple[float, ...] = ()
    prompt: Numbers = ()
    made: Numbers = ()
    most: Numbers = ()
    reason: tuple[str, ...] = ()  # as the label `reason` of tgi_queue_waits; "turn": nothing but its turn


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """The token slots in order, as runs of cells with equal use. A cell of several slots has their strongest use."""

    capacity: int
    slots_per_cell: int
    runs: Numbers  # for each run: 4 * length + use, of FREE to HELD in slot_map.py
    counts: Numbers  # number of slots of each use


@dataclass(frozen=True, slots=True)
class TreeColumns:
    """The largest nodes of the prefix tree; each after the nodes above it."""

    tokens: Numbers = ()
    parent: Numbers = ()  # place in the table of the nearest node above; -1: the table has none
    before: Numbers = ()  # tokens above the node
    locks: Numbers = ()  # requests that hold it
    used: Numbers = ()  # counter of uses at its last unlock: the least goes first
    num_nodes: int = 0  # nodes of the whole tree
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The newest steps."""

    number: Numbers = ()
    rows: Numbers = ()  # rows that got a token by decoding
    prompt: Numbers = ()  # prompt tokens
    joined: Numbers = ()
    total_us: Numbers = ()  # time in the shards
    gap_us: Numbers = ()  # idle time before the step


@dataclass(frozen=True, slots=True)
class ShardNote:
    """The shards. Times are seconds before now."""

    is_ready: bool = False
    since_s: float = 0.0  # in this state
    epoch: int = 0
    world_size: int = 0
    kernels: str = ""
    num_losses: int = 0
    loss: str = ""  # why the shards were lost last
    loss_s: float | None = None


@dataclass(frozen=True, slots=True)
class FrontNote:
    """A front that is connected, or the last one that has left."""

    id: str
    requests: int  # on this engine, at the time
    left_s: float | None = None  # seconds since it has left


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    rows: RowColumns
    num_running: int
    queue: WaitColumns
    num_waiting: int
    slots: SlotRuns
    tree: TreeColumns
    steps: StepColumns
    shards: ShardNote
    fronts: tuple[FrontNote, ...]
    preemptions: int
    recomputed_tokens: int
    prefix_hit_tokens: int
    prefilled_tokens: int
