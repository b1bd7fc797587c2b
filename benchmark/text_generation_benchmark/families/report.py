"""The tables of `families`."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from text_generation_benchmark.output import table
from text_generation_benchmark.report import (
    LIMIT_HEAD,
    NO_FIGURE,
    Compared,
    Errors,
    Peer,
    Row,
    machine_of,
    per_token_s,
    said_of,
    tokens_per_s,
)  # fmt: skip
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


def llama_table(load: str, measured: Sequence[BesideLlama]) -> str:
    rows = [row for each in measured for row in (each.family, each.llama)]
    head = ["model", "streams", "experts read", "MB a step", "Llama's", "ms per token", "Llama's"]
    head += ["of limit", "Llama's", "most of a step's limit", "share ÷ Llama's"]
    said = f"{machine_of([each.kernels for each in measured], rows)}; {load}. Medians of {ROUNDS} rounds."
    return f"{said}\n\n{table(head, [each.cells() for each in measured])}"


def peer_table(load: str, peers: Sequence[Peer], measured: Sequence[Compared]) -> str:
    rows = [row for each in measured for row in each.rows]
    names = [peer.name for peer in peers]
    head = ["model", "streams", "tokens/s", *names, "ms per token", *names, *LIMIT_HEAD]
    said = (
        f"{machine_of([each.kernels for each in measured], rows)}; {load}. Medians of {ROUNDS} rounds; {said_of(peers)}"
    )
    lines = table(head, [_peer_cells(row, peers, each.errors) for each in measured for row in each.rows])
    errors = [
        f"- {each.rows[0].model} on {name}: `{error}`" for each in measured for name, error in each.errors.items()
    ]
    return "\n\n".join(part for part in (said, lines, "\n".join(errors)) if part)


def _peer_cells(row: Row, peers: Sequence[Peer], errors: Errors) -> list[str]:
    cells = [row.model, str(row.workload.concurrency), f"{row.of_ours(tokens_per_s):.1f}"]
    cells += row.beside_all(peers, tokens_per_s, ".1f", errors=errors)
    cells.append(f"{row.of_ours(per_token_s) * 1e3:.2f}")
    return cells + row.beside_all(peers, per_token_s, ".2f", less_is_better=True) + row.limits()
