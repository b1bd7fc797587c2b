"""The tables of `families`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from text_generation_benchmark.ceilings import machine
from text_generation_benchmark.output import table
from text_generation_benchmark.report import LIMIT_HEAD, NO_FIGURE, Peer, Row, per_token_s, tokens_per_s
from text_generation_benchmark.workload import ROUNDS


@dataclass(frozen=True, slots=True)
class BesideLlama:
    """One model under one load, beside a Llama whose decode step reads as many bytes, both on this server."""

    family: Row
    llama: Row
    experts_read: float | None  # in each layer; None: the model has none
    kernels: str  # that the server computed with

    @property
    def ratio(self) -> float:
        """Bytes per second of the model ÷ of the Llama: the median of the rounds' ratios."""
        pairs = zip(self.family.ours, self.llama.ours, strict=True)
        bytes_ratio = self.family.step_bytes / self.llama.step_bytes
        return median(bytes_ratio * llama.per_token_s / family.per_token_s for family, llama in pairs)

    def cells(self) -> list[str]:
        experts = NO_FIGURE if self.experts_read is None else f"{self.experts_read:.1f}"
        cells = [self.family.model, str(self.family.workload.concurrency), experts]
        cells += [f"{row.step_bytes / 1e6:,.0f}" for row in (self.family, self.llama)]
        cells += [f"{row.of_ours(per_token_s) * 1e3:.2f}" for row in (self.family, self.llama)]
        cells += [f"{row.limit_of_step:.1%}" for row in (self.family, self.llama)]
        return [*cells, self.family.bound(self.family.work.step), f"{self.ratio:.2f}×"]


@dataclass(frozen=True, slots=True)
class BesidePeers:
    """One model under one load, beside the peers that serve it. `errors` has the error of each peer that does not."""

    row: Row
    errors: Mapping[str, str]
    kernels: str  # that the server computed with

    def cells(self, peers: Sequence[Peer]) -> list[str]:
        row = self.row
        cells = [row.model, str(row.workload.concurrency), f"{row.of_ours(tokens_per_s):.1f}"]
        for peer in peers:
            theirs = row.beside(peer, tokens_per_s, less_is_better=False)
            missing = "error" if peer.name in self.errors else NO_FIGURE
            cells.append(f"{theirs[0]:.1f} ({theirs[1]:.2f}×)" if theirs else missing)
        cells.append(f"{row.of_ours(per_token_s) * 1e3:.2f}")
        for peer in peers:
            token = row.beside(peer, per_token_s, less_is_better=True)
            cells.append(f"{token[0] * 1e3:.2f} ({token[1]:.2f}×)" if token else NO_FIGURE)
        return [*cells, f"{row.limit_of_load:.1%}", f"{row.limit_of_step:.1%}", row.bound(row.work.step)]


def llama_table(load: str, measured: Sequence[BesideLlama]) -> str:
    rows = [row for each in measured for row in (each.family, each.llama)]
    head = ["model", "streams", "experts read", "MB a step", "Llama's", "ms per token", "Llama's"]
    head += ["of limit", "Llama's", "most of a step's limit", "share ÷ Llama's"]
    said = f"{_machine(measured, rows)}; {load}. Medians of {ROUNDS} rounds."
    return f"{said}\n\n{table(head, [each.cells() for each in measured])}"


def peer_table(load: str, peers: Sequence[Peer], measured: Sequence[BesidePeers]) -> str:
    names = [peer.name for peer in peers]
    head = ["model", "streams", "tokens/s", *names, "ms per token", *names, *LIMIT_HEAD]
    versions = ", ".join(f"{peer.name} {peer.version}" for peer in peers if peer.version)
    notes = [f"{peer.note}." for peer in peers if peer.note]
    faster = f"a ratio over 1 means faster than {versions or 'no peer'}"
    said = f"{_machine(measured, [each.row for each in measured])}; {load}. Medians of {ROUNDS} rounds; {faster}."
    errors = {(each.row.model, name): error for each in measured for name, error in each.errors.items()}
    listed = "\n".join(f"- {model} on {name}: `{error}`" for (model, name), error in errors.items())
    lines = table(head, [each.cells(peers) for each in measured])
    return "\n\n".join(part for part in (" ".join([said, *notes]), lines, listed) if part)


def _machine(measured: Sequence[BesideLlama] | Sequence[BesidePeers], rows: Sequence[Row]) -> str:
    return machine([each.kernels for each in measured], [ceilings for row in rows for ceilings in row.ceilings])


def last_line(error: Exception) -> str:
    """The last line of an error, without characters that end a line of code in Markdown."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).replace("`", "'")
