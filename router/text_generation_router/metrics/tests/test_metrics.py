import os
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from text_generation_router.fleet.values import RemoteCounts
from text_generation_router.metrics.metrics import FRONT_COUNTS, Metrics, duration_buckets, half_doublings
from text_generation_router.metrics.page import render

GOLDEN = Path(__file__).with_name("metrics.golden")


# The longest context of any model that is served, in tokens.
LONGEST = 2**20
FACTS = {"model": "org/m", "version": "0.1", "dtype": "float32", "kernels": "c", "device": "cpu", "shards": "1"}


def made(max_input_tokens: int = 1000, max_total_tokens: int = 2048, tgi_buckets: bool = False) -> Metrics:
    metrics = Metrics(tgi_buckets)
    metrics.set_limits(max_input_tokens, max_total_tokens)
    return metrics


@pytest.fixture
def metrics() -> Metrics:
    return made()


def series_of(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in render(metrics.registry).splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def bounds_of(metrics: Metrics, name: str) -> list[str]:
    return [series.split('"')[1] for series in series_of(metrics) if series.startswith(f"{name}_bucket")]


def test_the_page_has_the_bytes_that_dashboards_read(metrics):
    metrics.request_count.inc(3)
    metrics.request_failure.labels(err="validation").inc()
    metrics.request_duration.observe(0.0002)
    metrics.request_duration.observe(1000)
    metrics.request_input_length.observe(10)
    metrics.queue_size.set(2)
    metrics.batch_current_max_tokens.set(12.5)
    metrics.batch_forward_duration.labels(method="decode").observe(0.5)
    metrics.time_between_tokens.observe(0.02, 3)
    assert render(metrics.registry) == GOLDEN.read_text()


def test_a_fresh_page_has_at_most_1000_series_with_the_longest_context_too():
    metrics = made(LONGEST, LONGEST)
    metrics.describe(lambda: FACTS)
    assert 500 < len(series_of(metrics)) <= 1000


def test_all_that_fronts_count_is_on_the_page(metrics):
    assert set(FRONT_COUNTS) == {field.name for field in fields(RemoteCounts)}
    names = {f"tgi_front_{name}" for name, _ in FRONT_COUNTS.values()}
    assert {name for name in series_of(metrics) if name.startswith("tgi_front")} == names | {
        f"tgi_front_{name}" for name in ("engines", "suspects", "cached_blocks")
    }


def test_tgis_buckets_are_all_there_when_they_are_asked_for():
    metrics = made(1000, 2048, tgi_buckets=True)
    assert bounds_of(metrics, "tgi_batch_next_size") == [*map(str, range(1, 1025)), "+Inf"]
    assert bounds_of(metrics, "tgi_request_input_length") == [*map(str, range(10, 1001, 10)), "+Inf"]
    for name in ("max_new_tokens", "generated_tokens"):
        bounds = bounds_of(metrics, f"tgi_request_{name}")
        assert (len(bounds), bounds[0], bounds[-2]) == (101, "20.48", "2048")
    assert series_of(metrics).keys() - series_of(made()).keys(), "not the default"


@pytest.mark.parametrize(
    ("maximum", "bounds"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (7, [1, 2, 3, 4, 6, 7]), (16, [1, 2, 3, 4, 6, 8, 12, 16])],
)
def test_sizes_have_two_buckets_for_each_doubling_and_end_with_the_largest_possible(maximum, bounds):
    assert half_doublings(maximum) == bounds


def test_facts_are_labels_that_any_parser_reads_back(metrics):
    facts = dict(FACTS)
    metrics.describe(lambda: facts)
    facts["model"] = 'a "b"\\c\nd'
    families = {family.name: family for family in text_string_to_metric_families(render(metrics.registry))}
    (sample,) = families["tgi_info"].samples
    assert sample.value == 1 and sample.labels == facts


def test_the_process_has_the_names_that_all_prometheus_clients_use(metrics):
    metrics.describe(lambda: FACTS)
    series, text = series_of(metrics), render(metrics.registry)
    assert series["process_cpu_seconds_total"] > 0 and "# TYPE process_cpu_seconds_total counter\n" in text
    assert series["process_resident_memory_bytes"] > 2**20
    assert series["process_open_fds"] >= len(os.listdir("/proc/self/fd")) - 2
    assert {"process_max_fds", "process_start_time_seconds", "process_virtual_memory_bytes"} <= series.keys()


def test_duration_buckets_are_tgis():
    buckets = duration_buckets()
    assert (buckets[0], buckets[5], buckets[-1]) == (0.00015000000000000001, 0.0011390624999999999, 145.61096060497135)
    assert len(buckets) == 35


def test_no_metric_has_the_suffixes_of_prometheus_client(metrics):
    text = render(metrics.registry)
    assert "_total " not in text.replace("tgi_batch_max_total_tokens", "") and "_created" not in text
    assert 'le="1.0"' not in text


def test_two_sets_of_metrics_are_independent():
    first, second = Metrics(), Metrics()
    first.request_count.inc()
    assert "tgi_request_count 1" in render(first.registry) and "tgi_request_count 0" in render(second.registry)
