"""The metrics page that Prometheus reads, and the dashboard that queries these metrics."""

import re
from typing import Any

import httpx
import pytest
from board import (
    DASHBOARD,
    MONITORING,
    OF_TARGETS,
    VARIABLES,
    Query,
    Series,
    check_answer,
    names_of,
    panels,
    queries,
    series_of,
)
from calls import at_once, generate
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

from text_generation_common.flags.http import HttpFlags


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> str:
    """The metrics page of a server that has answered and refused requests."""
    at_once(server.url, generate("Once upon a time", max_new_tokens=4), generate("Once more", max_new_tokens=4))
    httpx.post(f"{server.url}/generate", json={"inputs": ""})
    return httpx.get(f"{server.url}/metrics", timeout=30).text


@pytest.fixture(scope="module")
def series(page: str) -> Series:
    return series_of(page)


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


@pytest.mark.parametrize(
    "query",
    [query for query in queries() if "tgi_key_" not in query[0]],
    ids=[f"{panel.title}, {query[1]}" for panel in panels() for query in panel.queries if "tgi_key_" not in query[0]],
)
def test_a_live_server_answers_every_query_of_the_dashboard(series: Series, query: Query) -> None:
    """The queries about keys are asked in test_keys.py, because this server has none."""
    check_answer(series, query)


def test_the_dashboards_variables_are_those_of_its_queries(series: Series) -> None:
    assert set(VARIABLES) == OF_TARGETS | {"datasource"}
    for name in OF_TARGETS:
        asked = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", VARIABLES[name]["query"]["query"])
        assert asked is not None and asked[1] in series and asked[2] == name
    sources = {target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])}
    assert sources == {"${datasource}"}


def test_every_metric_of_the_scheduler_is_shown(series: Series) -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for expression, _ in queries() for name in names_of(expression)}
    ours = {
        name
        for name in series
        if re.match(r"tgi_(slots|prefi|queue|shard|recomputed|books|router|front|tenants)", name)
    }
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
