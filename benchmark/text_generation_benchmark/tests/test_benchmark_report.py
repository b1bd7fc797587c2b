import pytest

from text_generation_benchmark.cli import END, START, replace_table
from text_generation_benchmark.compare import Row, as_markdown, read_overlap
from text_generation_benchmark.load import LoadResult, StreamTimes

PAGE = """\
tgi_shard_decode_steps {steps}
tgi_shard_overlapped_steps {overlapped}
tgi_shard_step_gap_duration_bucket{{le="0.001"}} {fast}
tgi_shard_step_gap_duration_bucket{{le="0.002"}} {steps}
tgi_shard_step_gap_duration_bucket{{le="+Inf"}} {steps}
tgi_batch_forward_duration_sum{{method="decode"}} {seconds}
tgi_batch_forward_duration_count{{method="decode"}} {steps}
"""


def test_the_table_is_replaced_and_the_rest_stays() -> None:
    text = f"before\n{START}\nold\n{END}\nafter"
    assert replace_table(text, "new") == f"before\n{START}\nnew\n{END}\nafter"
    with pytest.raises(ValueError, match="no <!-- table"):
        replace_table("nothing", "new")


def test_overlap_is_what_moved_between_two_pages() -> None:
    before = PAGE.format(steps=100, overlapped=0, fast=100, seconds=1)
    after = PAGE.format(steps=200, overlapped=97, fast=130, seconds=2)
    overlap = read_overlap("m", before, after)
    assert (overlap.overlapped, overlap.median_gap_s, overlap.mean_step_s) == (0.97, 0.002, 0.01)


def test_ratios_are_ours_over_the_peers() -> None:
    stream = StreamTimes(tuple(0.1 + 0.01 * i for i in range(128)))
    row = Row("m", 1, LoadResult((stream,), wall_s=1.28), peer_s=2.56, step_bytes=10**8, bandwidth=2e10)
    assert row.ours.tokens_per_s == pytest.approx(100)
    assert row.peer_tokens_per_s == pytest.approx(50)
    assert row.share_of_bandwidth == pytest.approx(0.5)
    assert "| m | 1 | 100.0 | 50.0 | 2.00 | 10.00 | 100 | 50.0% |" in as_markdown([row], [], 2e10)
