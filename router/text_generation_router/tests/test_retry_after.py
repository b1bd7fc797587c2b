from text_generation_router.retry_after import MAX_RETRY_AFTER_S, RetryAfter


def test_it_is_the_forecast_in_steps_times_the_length_of_the_last_ones() -> None:
    retry = RetryAfter(lambda: 100.0)
    for number in range(4):
        # Each is sent while the one before it runs: its time begins when that one has answered.
        retry.note_step(sent_s=number * 0.05 - 0.05, received_s=number * 0.05 + 0.05)
    assert retry.seconds(now_s=1.0) == 7  # 100 × (100 ms + 3 × 50 ms) ÷ 4 = 6.25 s


def test_it_is_a_second_at_least_and_a_minute_at_most() -> None:
    for steps, seconds in ((0.0, 1), (1.0, 1), (1e9, MAX_RETRY_AFTER_S)):
        retry = RetryAfter(lambda steps=steps: steps)  # type: ignore[misc]
        assert retry.seconds(0.0) == 1  # no step has been seen
        retry.note_step(0.0, 0.1)
        assert retry.seconds(10.0) == seconds


def test_many_refusals_at_once_cost_one_forecast() -> None:
    asked = []
    retry = RetryAfter(lambda: asked.append(1) or 100.0)  # type: ignore[func-returns-value]
    retry.note_step(0.0, 0.1)
    assert {retry.seconds(5.0 + n / 1000) for n in range(900)} == {10} and len(asked) == 1
    retry.seconds(6.1)
    assert len(asked) == 2
