from text_generation_benchmark.detokenization_speed import STOPS, as_markdown, measure
from text_generation_common.model_files import demo_directory


def test_each_way_to_ask_is_measured() -> None:
    times_us = measure(demo_directory(), rounds=1)
    assert list(times_us) == list(STOPS) and min(times_us.values()) > 0
    assert len(as_markdown(times_us).splitlines()) == 2 + len(STOPS)
