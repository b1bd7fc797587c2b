"""The pace of news changes seldom, and floods end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.fleet.cache_news import EVERY_MS, MAX_EVERY_MS, MS_PER_ENGINE, next_pace_ms
from text_generation_router.fleet.values import BURST_BYTES, BYTES_PER_S, MESSAGE_BYTES, NewsBudget
from text_generation_router.wire.version import WireError

PACES = (250, 500, 1000)


@given(pace=st.sampled_from(PACES), engines=st.integers(1, 1024), more=st.integers(-3, 3))
def test_a_front_with_more_engines_gets_fewer_news_of_each_and_few_engines_more_or_less_change_nothing(
    pace: int, engines: int, more: int
) -> None:
    found = next_pace_ms(pace, engines)
    assert found in PACES and min(MS_PER_ENGINE * engines, MAX_EVERY_MS) <= max(found, EVERY_MS)
    assert found <= max(EVERY_MS, 4 * MS_PER_ENGINE * engines)
    assert next_pace_ms(found, engines) == found
    if engines > 100 and (back := next_pace_ms(found, engines + more)) != found:
        assert next_pace_ms(back, engines) == back, "the pace does not go to and fro"


def test_the_pace_of_few_engines_is_the_engines_own() -> None:
    assert [next_pace_ms(EVERY_MS, engines) for engines in (1, 25, 26, 50, 51, 125)] == [250, 250, 500, 500, 1000, 1000]
    assert [next_pace_ms(1000, engines) for engines in (125, 25, 24, 12, 1)] == [1000, 1000, 500, 250, 250]


def test_news_at_a_normal_rate_are_never_too_much_and_a_flood_is() -> None:
    budget = NewsBudget(0.0)
    budget.take(BURST_BYTES - MESSAGE_BYTES, 0.0)
    for second in range(1, 100):
        budget.take(BYTES_PER_S - MESSAGE_BYTES, float(second))
    with pytest.raises(WireError, match="too much news"):
        for _ in range(10):
            budget.take(BYTES_PER_S, 100.0)
