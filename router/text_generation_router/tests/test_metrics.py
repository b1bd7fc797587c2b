from pathlib import Path

import pytest

from text_generation_router.metrics import Metrics, duration_buckets, render

GOLDEN = Path(__file__).with_name("metrics.golden")


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.set_limits(max_input_tokens=1000, max_total_tokens=2048)
    return metrics


def test_the_page_has_the_bytes_that_dashboards_read(metrics):
    """The golden file leaves out the buckets of the longest histogram; the next test counts these buckets."""
    metrics.request_count.inc(3)
    metrics.request_failure.labels(err="validation").inc()
    metrics.request_duration.observe(0.0002)
    metrics.request_duration.observe(1000)
    metrics.request_input_length.observe(10)
    metrics.queue_size.set(2)
    metrics.batch_current_max_tokens.set(12.5)
    metrics.batch_forward_duration.labels(method="decode").observe(0.5)
    metrics.time_between_tokens.observe(0.02, 3)
    lines = [line for line in render(metrics.registry).split("\n") if "batch_next_size_bucket" not in line]
    assert "\n".join(lines) == GOLDEN.read_text()


def test_batch_sizes_have_a_bucket_each(metrics):
    lines = [line for line in render(metrics.registry).split("\n") if line.startswith("tgi_batch_next_size_bucket")]
    expected = [*range(1, 1025), "+Inf"]
    assert lines == [f'tgi_batch_next_size_bucket{{le="{bound}"}} 0' for bound in expected]


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
