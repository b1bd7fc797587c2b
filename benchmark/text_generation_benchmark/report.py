"""The tables of `compare`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

from text_generation_benchmark.ceilings import machine
from text_generation_benchmark.load import LoadResult
from text_generation_benchmark.ours import Overlap
from text_generation_benchmark.output import table
from text_generation_benchmark.roofline import Ceilings, LoadWork, StepPart, bound_by, least_s, mean_ceilings
from text_generation_benchmark.workload import ROUNDS, SAMPLING, Workload

NO_FIGURE = "–"
SAMPLED = "".join(f", {name} {value}" for name, value in SAMPLING.items())
Figure = Callable[[LoadResult], float]
Errors = Mapping[str, str]  # each peer's name and error, if the peer does not serve a model
NONE: Errors = {}
tokens_per_s: Figure = attrgetter("tokens_per_s")
per_token_s: Figure = attrgetter("per_token_s")
first_token_s: Figure = attrgetter("first_token_s")
LIMIT_HEAD = ("of limit: tokens/s", "ms per token", "most of a step's limit")
STEP_HEAD = ("ms per token", "first token ms", *LIMIT_HEAD)
PROMPT_HEAD = ("prompt tokens/s", "of limit", "most of the limit")


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer's results. `version` is empty if the peer is not installed. `note` says how to install the peer, or what
    an installed peer cannot do.
    """

    name: str
    version: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one model under one load. Results and ceilings are in the order of the rounds."""

    model: str
    workload: Workload
    ours: Sequence[LoadResult]
    peers: Mapping[str, Sequence[LoadResult]]
    work: LoadWork  # bytes that the steps of the load read, and operations that they compute
    ceilings: Sequence[Ceilings]

    @property
    def step_bytes(self) -> int:
        """Weights, keys, values and logits that one decode step has to read."""
        return sum(part.bytes for part in self.work.step)

    @property
    def limit_of_step(self) -> float:
        """The least time of a decode step ÷ the time from one token to the next."""
        return self._median(lambda ours, ceilings: least_s(self.work.step, ceilings) / ours.per_token_s)

    @property
    def limit_of_load(self) -> float:
        """The least time of the whole load ÷ the time that it took."""
        return self._median(lambda ours, ceilings: self.work.least_s(ceilings) / ours.wall_s)

    @property
    def limit_of_prompts(self) -> float:
        """The least time of all prompts ÷ the time to the first token."""
        return self._median(lambda ours, ceilings: least_s(self.work.prompts, ceilings) / ours.first_token_s)

    def bound(self, parts: Sequence[StepPart]) -> str:
        return bound_by(parts, mean_ceilings(self.ceilings))

    def _median(self, share: Callable[[LoadResult, Ceilings], float]) -> float:
        return median(map(share, self.ours, self.ceilings))

    def of_ours(self, figure: Figure) -> float:
        return median(map(figure, self.ours))

    def beside(self, peer: Peer, figure: Figure, *, less_is_better: bool) -> tuple[float, float] | None:
        """The peer's median figure, and how many times better ours is: the median of the rounds' ratios. Ratios are
        taken within a round, because the machine's speed changes between rounds. None if the peer has no results.
        """
        if (theirs := self.peers.get(peer.name)) is None:
            return None
        ratios = [figure(a) / figure(b) for a, b in zip(self.ours, theirs, strict=True)]
        return median(map(figure, theirs)), median(1 / ratio if less_is_better else ratio for ratio in ratios)

    def beside_all(
        self, peers: Sequence[Peer], figure: Figure, form: str, *, less_is_better: bool = False, errors: Errors = NONE
    ) -> list[str]:
        """A cell for each peer. Times are in milliseconds."""
        cells = []
        for peer in peers:
            theirs = self.beside(peer, figure, less_is_better=less_is_better)
            missing = "error" if peer.name in errors else NO_FIGURE if peer.version else "not installed"
            cells.append(
                f"{theirs[0] * (1e3 if less_is_better else 1):{form}} ({theirs[1]:.2f}×)" if theirs else missing
            )
        return cells

    def limits(self) -> list[str]:
        """The cells of LIMIT_HEAD."""
        return [f"{self.limit_of_load:.1%}", f"{self.limit_of_step:.1%}", self.bound(self.work.step)]

    @property
    def is_prefill(self) -> bool:
        return self.workload.new_tokens == 1


@dataclass(frozen=True, slots=True)
class Compared:
    """One model beside the peers that serve it."""

    rows: Sequence[Row]
    kernels: str  # that our server computed with
    overlap: Overlap | None = None
    errors: Errors = field(default_factory=dict)


def machine_of(kernels: Iterable[str], rows: Sequence[Row]) -> str:
    return machine(kernels, [ceilings for row in rows for ceilings in row.ceilings])


def said_of(peers: Sequence[Peer]) -> str:
    """What a ratio means, and the notes on the peers."""
    versions = ", ".join(f"{peer.name} {peer.version}" for peer in peers if peer.version)
    notes = [f"{peer.note}." for peer in peers if peer.note]
    return " ".join([f"a ratio over 1 means faster than {versions or 'no peer'}.", *notes])


@dataclass(frozen=True, slots=True)
class Report:
    machine: str
    peers: Sequence[Peer]
    rows: Sequence[Row]
    overlaps: Sequence[Overlap]

    def as_markdown(self) -> str:
        heading = f"{self.machine} Medians of {ROUNDS} rounds, no prompt is sent twice; {said_of(self.peers)}"
        parts = [heading, self._decode_table(), self._prefill_table(), _overlap_table(self.overlaps)]
        return "\n\n".join(part for part in parts if part)

    def _decode_table(self) -> str:
        rows = [row for row in self.rows if not row.is_prefill]
        if not rows:
            return ""
        tokens_in, tokens_out = rows[0].workload.input_tokens, rows[0].workload.new_tokens
        head = ["model", "streams", "tokens/s", *(peer.name for peer in self.peers), *STEP_HEAD]
        lines = [self._decode_cells(row) for row in rows]
        return f"{tokens_in} tokens in, {tokens_out} out; tokens per second:\n\n{table(head, lines)}"

    def _decode_cells(self, row: Row) -> list[str]:
        streams = f"{row.workload.concurrency}{SAMPLED if row.workload.is_sampled else ''}"
        cells = [row.model, streams, f"{row.of_ours(tokens_per_s):.1f}"]
        cells += row.beside_all(self.peers, tokens_per_s, ".1f")
        cells += [f"{row.of_ours(per_token_s) * 1e3:.2f}", f"{row.of_ours(first_token_s) * 1e3:.0f}"]
        return cells + row.limits()

    def _prefill_table(self) -> str:
        rows = [row for row in self.rows if row.is_prefill]
        if not rows:
            return ""
        head = ["model", "prompt", "ms", *(peer.name for peer in self.peers), *PROMPT_HEAD]
        lines = [self._prefill_cells(row) for row in rows]
        return f"One stream, milliseconds to the first token:\n\n{table(head, lines)}"

    def _prefill_cells(self, row: Row) -> list[str]:
        first, tokens = row.of_ours(first_token_s), row.workload.input_tokens
        cells = [row.model, str(tokens), f"{first * 1e3:.0f}"]
        cells += row.beside_all(self.peers, first_token_s, ".0f", less_is_better=True)
        return [*cells, f"{tokens / first:.0f}", f"{row.limit_of_prompts:.1%}", row.bound(row.work.prompts)]


def _overlap_table(overlaps: Sequence[Overlap]) -> str:
    if not overlaps:
        return ""
    lines = []
    for overlap in overlaps:
        share = f"{overlap.median_gap_s / overlap.mean_step_s:.1%} of {overlap.mean_step_s * 1e3:.2f} ms"
        gap = f"≤ {overlap.median_gap_s * 1e3:.2f} ms"
        lines.append([overlap.model, f"{overlap.overlapped:.1%}", gap, f"≤ {share}"])
    return table(["model", "decode steps with their successor queued", "gap between steps", "of a step"], lines)
