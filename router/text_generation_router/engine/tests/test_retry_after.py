from text_generation_router.engine.overload import MAX_RETRY_AFTER_S, RetryAfter


def test_retry_after_is_the_forecast_in_steps_times_the_mean_duration_of_the_last_steps() -> None:
    retry = RetryAfter(lambda: 100.0)
    for number in range(4):
        # Each step is sent while the previous step runs, so its duration begins with the previous answer.
        retry.note_step(sent_s=number * 0.05 - 0.05, received_s=number * 0.05 + 0.05)
    assert retry.seconds(now_s=1.0) == 7  # 100 × (100 ms + 3 × 50 ms) ÷ 4 = 6.25 s


def test_retry_after_is_between_one_second_and_one_minute() -> None:
    for steps, seconds in ((0.0, 1), (1.0, 1), (1e9, MAX_RETRY_AFTER_S)):
        retry = RetryAfter(lambda steps=steps: steps)  # type: ignore[misc]
        assert retry.seconds(0.0) == 1  # no step has answered yet
        retry.note_step(0.0, 0.1)
        assert retry.seconds(10.0) == seconds


def test_many_refusals_at_once_cost_one_forecast() -> None:
    asked = []
    retry = RetryAfter(lambda: asked.append(1) or 100.0)  # type: ignore[func-returns-value]
    retry.note_step(0.0, 0.1)
    assert {retry.seconds(5.0 + n / 1000) for n in range(900)} == {10} and len(asked) == 1
    retry.seconds(6.1)
    assert len(asked) == 2
