"""The metrics page that Prometheus reads, and the dashboard that queries these metrics."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from calls import at_once, generate
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

from text_generation_common.flags.http import HttpFlags

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


@dataclass(frozen=True, slots=True)
class Panel:
    id: int
    title: str
    description: str
    columns: range
    lines: range
    queries: tuple[tuple[str, str], ...]  # (expression, legend) of each query


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


def queries() -> list[tuple[str, str]]:
    return [query for panel in panels() for query in panel.queries]


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> str:
    """The metrics page of a server that has answered and refused requests."""
    at_once(server.url, generate("Once upon a time", max_new_tokens=4), generate("Once more", max_new_tokens=4))
    httpx.post(f"{server.url}/generate", json={"inputs": ""})
    return httpx.get(f"{server.url}/metrics", timeout=30).text


@pytest.fixture(scope="module")
def series(page: str) -> Series:
    """The metrics and labels that a query can name. Their names are read from the text, because prometheus_client's
    parser changes names and Prometheus does not."""
    found: Series = {}
    for line in page.splitlines():
        if match := re.fullmatch(r"(tgi_\w+)(?:\{(.*)\})? \S+", line):
            labels = found.setdefault(match[1], {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', match[2] or ""):
                labels.setdefault(label, set()).add(value)
    return found


def test_the_page_parses_and_nothing_of_it_is_lost(page: str) -> None:
    families = list(text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 40 and all(name.startswith(("tgi_", "process_")) for name in names)
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    assert [sample.value for family in families for sample in family.samples] == [
        float(line.rsplit(" ", 1)[1]) for line in lines
    ]


def test_histograms_add_up(page: str) -> None:
    """The counts of the buckets never decrease, and the last bucket counts all observations."""
    for family in text_string_to_metric_families(page):
        if family.type == "histogram":
            counts: dict[Any, list[float]] = {}
            for sample in family.samples:
                if not sample.name.endswith("_sum"):
                    counts.setdefault(sample.labels.get("method"), []).append(sample.value)
            for *buckets, total in counts.values():
                assert buckets == sorted(buckets) and buckets[-1] == total, family.name


@pytest.mark.parametrize("query", queries(), ids=[f"{p.title}, {legend}" for p in panels() for _, legend in p.queries])
def test_a_live_server_answers_every_query_of_the_dashboard(series: Series, query: tuple[str, str]) -> None:
    expression, legend = query
    asked = dict(_selectors(expression))
    assert _names(expression) == set(asked), "each metric is asked for with its labels, and nothing else is a metric"
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


def _names(expression: str) -> set[str]:
    """All words of an expression except labels and the words of PromQL."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS_OF_PROMQL


def test_the_dashboards_variables_are_those_of_its_queries(series: Series) -> None:
    assert set(VARIABLES) == OF_TARGETS | {"datasource"}
    for name in OF_TARGETS:
        asked = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", VARIABLES[name]["query"]["query"])
        assert asked is not None and asked[1] in series and asked[2] == name
    sources = {target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])}
    assert sources == {"${datasource}"}


def test_every_metric_of_the_scheduler_is_shown(series: Series) -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for expression, _ in queries() for name in _names(expression)}
    ours = {name for name in series if re.match(r"tgi_(slots|prefi|queue|shard|recomputed|books|router|front)", name)}
    ours |= {"tgi_request_preemptions", "tgi_request_resumes", "tgi_request_length_estimate_ratio", "tgi_batch_concat"}
    ours |= {f"tgi_request_time_{what}_duration" for what in ("to_first_token", "between_tokens")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in ours} <= shown


def test_no_panel_hides_another() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [(x, y) for panel in panels() for x in panel.columns for y in panel.lines]
    assert len(places) == len(set(places)) and max(x for x, _ in places) < 24
    assert all(panel.description.endswith(".") for panel in panels())


def test_the_sample_configuration_scrapes_where_the_server_is_by_default() -> None:
    text = (MONITORING / "prometheus.yml").read_text()
    assert f'targets: ["localhost:{HttpFlags().port}"]' in text and "metrics_path: /metrics" in text
