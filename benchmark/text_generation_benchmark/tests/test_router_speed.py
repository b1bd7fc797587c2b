from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.router.reading import ProcessTime, WriterTime, events_of
from text_generation_benchmark.router.speed import RouterTime, as_markdown, measure
from text_generation_common.model_files import demo_directory


def test_a_router_and_a_program_that_only_writes_are_measured() -> None:
    times = measure(demo_directory(), (3,), 0.3, GenerateStream())
    assert [time.streams for time in times] == [3]
    assert times[0].router.tokens > 30 and times[0].floor.tokens > 30
    assert len(as_markdown(times).splitlines()) == 3


def test_time_per_token_and_per_step_are_told_apart() -> None:
    floor = WriterTime(ProcessTime(1.0, 1.0), 1_000_000, 1.0)
    times = [
        RouterTime(streams, WriterTime(ProcessTime(200e-6 + streams * 8e-6, 0.0), streams, 1.0), floor)
        for streams in (1, 16, 256)
    ]
    assert as_markdown(times).endswith("User time: 8.0 µs per token, and 200 µs per step.")


def test_events_are_the_chunks_that_went_over_the_wire() -> None:
    chunk = "8\r\ndata: 1\n\n\r\n"
    answer = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunk}{chunk}8\r\nda".encode()
    assert events_of(answer) == [chunk, chunk]
