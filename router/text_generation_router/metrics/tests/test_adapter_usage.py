from prometheus_client import CollectorRegistry

from text_generation_router.metrics.adapter_usage import AdapterUsage
from text_generation_router.metrics.key_usage import add_usages
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.page import render

LONGEST = 2**20


def series_of(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in render(registry).splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_texts_of_an_adapter_count_under_its_name_and_those_of_the_model_under_none():
    registry = CollectorRegistry()
    usage = AdapterUsage(["sql", "poems"], registry)
    usage.count_text("sql", 7, 3)
    usage.count_text("sql", 1, 0)
    usage.count_text("", 100, 100)
    found = series_of(registry)
    assert {name: value for name, value in found.items() if value} == {
        'tgi_adapter_texts{adapter="sql"}': 2,
        'tgi_adapter_prompt_tokens{adapter="sql"}': 8,
        'tgi_adapter_output_tokens{adapter="sql"}': 3,
    }
    assert 'tgi_adapter_texts{adapter="poems"}' in found


def test_adapters_beyond_32_share_a_name_and_a_server_without_adapters_has_no_such_series():
    registry = CollectorRegistry()
    usage = AdapterUsage([f"a{number}" for number in range(64)], registry)
    usage.count_text("a31", 1, 1)
    usage.count_text("a32", 1, 1)
    usage.count_text("a63", 1, 1)
    found = series_of(registry)
    assert found['tgi_adapter_texts{adapter="a31"}'] == 1 and found['tgi_adapter_texts{adapter="other"}'] == 2
    assert len(found) == 3 * 33
    empty = CollectorRegistry()
    AdapterUsage([], empty).count_text("a", 1, 1)
    assert not series_of(empty)


def test_a_fresh_page_with_25_keys_and_32_adapters_has_at_most_1150_series():
    metrics = Metrics()
    metrics.set_limits(LONGEST, LONGEST)
    metrics.describe(lambda: {})
    add_usages({bytes([number]): f"key{number}" for number in range(26)}, None, metrics.registry)
    metrics.add_adapters([f"a{number}" for number in range(40)])
    assert 1100 < len(series_of(metrics.registry)) <= 1150
