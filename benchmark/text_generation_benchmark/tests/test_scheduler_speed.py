from text_generation_benchmark.scheduler_speed import measure


def test_a_full_server_with_a_long_queue_is_measured() -> None:
    speed = measure(20)
    assert len(speed.decisions_s) >= 5 and min(speed.decisions_s) > 0 and min(speed.answers_s) > 0
    rows = speed.as_markdown().splitlines()
    assert len(rows) == 6 and "2,000 waiting" in rows[2]
