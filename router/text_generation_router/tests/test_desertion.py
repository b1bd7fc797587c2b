"""An engine that no front has been connected to for a while."""

from text_generation_router.serve_engine import Desertion


def test_an_engine_is_deserted_after_its_limit_without_fronts() -> None:
    desertion = Desertion(120.0, now_s=0.0)
    assert not desertion.judge(0, 119.0)
    assert desertion.judge(0, 120.0)


def test_a_front_begins_the_time_anew() -> None:
    desertion = Desertion(120.0, now_s=0.0)
    assert not desertion.judge(1, 500.0)
    assert not desertion.judge(0, 619.0)
    assert desertion.judge(0, 620.0)


def test_without_a_limit_an_engine_waits_for_ever() -> None:
    assert not Desertion(0.0, now_s=0.0).judge(0, 1e9)
