"""The results of a check: whether targets are met, how many tests passed, and the tables of what they measured."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_check.plugin import LATER, Entry
from text_generation_benchmark.output import table


class Target(NamedTuple):
    name: str
    figure: str  # name of the figure that the target limits
    limit: float
    at_least: bool = True


TARGETS = (
    Target("decode of one stream, bfloat16, of the memory's ceiling", "decode at 1", 0.80),
    Target("decode of 64 streams at 1,000 tokens, weights and KV, of the memory's ceiling", "decode at 64", 0.70),
    Target("prefill of 4,096 tokens, of the matrix ceiling", "prefill", 0.55),
    Target("outside the GPU, of a decode step's wall time at 64 streams", "outside at 64", 0.03, at_least=False),
)


def figures_of(entries: Iterable[Entry]) -> dict[str, float]:
    return {name: value for entry in entries for _, line in entry["lines"] for name, value in line["figures"].items()}


def verdict(target: Target, figures: Mapping[str, float], on_gpu: bool) -> str:
    """A target is met only if a GPU has shown it."""
    value = figures.get(target.figure)
    if value is None or not on_gpu:
        return "not run"
    met = value >= target.limit if target.at_least else value <= target.limit
    return f"{'met' if met else 'not met'}: {value:.1%}"


def as_markdown(head: str, entries: list[Entry], verdicts: Mapping[Target, str], on_gpu: bool) -> str:
    parts = [head, *["A rehearsal without a GPU: it says nothing about speed."] * (not on_gpu)]
    rows = [(of.name, f"{'≥' if of.at_least else '≤'} {of.limit:.0%}", said) for of, said in verdicts.items()]
    parts.append(table(("target", "wanted", "verdict"), rows))
    outcomes = ("passed", "failed", "skipped", LATER)
    counts = Counter((entry["test"].partition("::")[0], entry["outcome"]) for entry in entries)
    lines = [
        (file, *(str(counts[file, outcome]) for outcome in outcomes)) for file in dict.fromkeys(f for f, _ in counts)
    ]
    parts.append(table(("tests", *outcomes), lines))
    tables: dict[str, list[Mapping[str, str]]] = {}
    for title, line in (line for entry in entries for line in entry["lines"]):
        tables.setdefault(title, []).append(line["cells"])
    for title, all_cells in tables.items():
        columns = list(dict.fromkeys(column for cells in all_cells for column in cells))
        parts += [f"## {title}", table(columns, [[cells.get(c, "") for c in columns] for cells in all_cells])]
    skipped = Counter(entry["reason"] for entry in entries if entry["outcome"] == "skipped")
    if skipped:
        parts += ["## Skipped", table(("why", "tests"), [(why, str(count)) for why, count in skipped.items()])]
    for entry in entries:
        if entry["outcome"] == "failed":
            parts += [f"## {entry['test']}", entry["reason"], f"````text\n{entry['log']}\n````"]
    return "\n\n".join(parts) + "\n"
