"""The dashboard of monitoring/: its panels and queries, and whether a metrics page answers a query."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITORING = Path(__file__).parent.parent / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
# Labels that Prometheus itself adds to what it scrapes.
OF_TARGETS = {"job", "instance"}
WORDS_OF_PROMQL = {"sum", "rate", "increase", "histogram_quantile"}
QUANTILE = re.compile(
    r"histogram_quantile\([\d.]+, sum by \(([^)]*)\) \(rate\((\w+)\{[^}]*\}\[\$__rate_interval\]\)\)\)"
)

# Labels of each metric, with the values of each label.
Series = dict[str, dict[str, set[str]]]
Query = tuple[str, str]  # expression and legend


@dataclass(frozen=True, slots=True)
class Panel:
    id: int
    title: str
    description: str
    columns: range
    lines: range
    queries: tuple[Query, ...]


def panels() -> list[Panel]:
    return [_panel(panel) for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def _panel(panel: Any) -> Panel:
    at = panel["gridPos"]
    return Panel(
        panel["id"],
        panel["title"],
        panel["description"],
        range(at["x"], at["x"] + at["w"]),
        range(at["y"], at["y"] + at["h"]),
        tuple((target["expr"], target["legendFormat"]) for target in panel["targets"]),
    )


def queries() -> list[Query]:
    return [query for panel in panels() for query in panel.queries]


def series_of(page: str) -> Series:
    """The metrics and labels that a query can name. Their names are read from the text, because prometheus_client's
    parser changes names and Prometheus does not."""
    found: Series = {}
    for line in page.splitlines():
        if match := re.fullmatch(r"(tgi_\w+)(?:\{(.*)\})? \S+", line):
            labels = found.setdefault(match[1], {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', match[2] or ""):
                labels.setdefault(label, set()).add(value)
    return found


def check_answer(series: Series, query: Query) -> None:
    """AssertionError if the page with `series` does not answer `query`."""
    expression, legend = query
    asked = dict(_selectors(expression))
    assert names_of(expression) == set(asked), "each metric is asked for with its labels, and nothing else is a metric"
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in labels.split(", ")}
    for name, matchers in asked.items():
        assert name in series
        assert grouped <= set(series[name])
        assert set(matchers) >= OF_TARGETS and all(matchers[label] == f"${label}" for label in OF_TARGETS)
        for label in set(matchers) - OF_TARGETS:
            assert matchers[label] in series[name][label]
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == grouped - {"le"}
    quantiles = QUANTILE.findall(expression)
    assert len(quantiles) == expression.count("histogram_quantile")
    assert sorted(name for _, name in quantiles) == sorted(name for name in asked if name.endswith("_bucket"))
    assert all("le" in labels.split(", ") for labels, _ in quantiles)


def _selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        yield name, dict(re.findall(r'(\w+)=~?"([^"]*)"', matchers))


def names_of(expression: str) -> set[str]:
    """All words of an expression except labels and the words of PromQL."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS_OF_PROMQL
