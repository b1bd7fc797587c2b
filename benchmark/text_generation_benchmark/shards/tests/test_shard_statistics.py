"""Figures and tables: percentiles, merged cells, and the text of all three tables."""

from pathlib import Path

import pytest

from text_generation_benchmark.shards import plots
from text_generation_benchmark.shards.config import Plan
from text_generation_benchmark.shards.tables import LATENCIES, Results, Round, merged, summarize, tables
from text_generation_common.sampling import Sampling
from text_generation_router.text.validation import AskedSampling

GOLDEN = """\
| Parameter          | Value     |
|--------------------|-----------|
| Model              | some/name |
| Sequence Length    | 256       |
| Decode Length      | 5         |
| Top N Tokens       | Some(3)   |
| N Runs             | 2         |
| Warmups            | 1         |
| Temperature        | Some(0.5) |
| Top K              | None      |
| Top P              | Some(1.0) |
| Typical P          | None      |
| Repetition Penalty | None      |
| Frequency Penalty  | None      |
| Watermark          | false     |
| Do Sample          | true      |


| Step           | Batch Size | Average   | Lowest    | Highest   | p50       | p90       | p99       |
|----------------|------------|-----------|-----------|-----------|-----------|-----------|-----------|
| Prefill        | 1          | 15.00 ms  | 10.00 ms  | 20.00 ms  | 20.00 ms  | 20.00 ms  | 20.00 ms  |
|                | 4          |           |           |           |           |           |           |
| Decode (token) | 1          | 35.00 ms  | 20.00 ms  | 50.00 ms  | 50.00 ms  | 50.00 ms  | 50.00 ms  |
|                | 4          | 100.00 ms | 100.00 ms | 100.00 ms | 100.00 ms | 100.00 ms | 100.00 ms |
| Decode (total) | 1          | 140.00 ms | 80.00 ms  | 200.00 ms | 200.00 ms | 200.00 ms | 200.00 ms |
|                | 4          | 400.00 ms | 400.00 ms | 400.00 ms | 400.00 ms | 400.00 ms | 400.00 ms |


| Step    | Batch Size | Average              | Lowest               | Highest               |
|---------|------------|----------------------|----------------------|-----------------------|
| Prefill | 1          | 19200.00 tokens/secs | 12800.00 tokens/secs | 25600.00 tokens/secs  |
|         | 4          | 76800.00 tokens/secs | 51200.00 tokens/secs | 102400.00 tokens/secs |
| Decode  | 1          | 35.00 tokens/secs    | 20.00 tokens/secs    | 50.00 tokens/secs     |
|         | 4          | 40.00 tokens/secs    | 40.00 tokens/secs    | 40.00 tokens/secs     |
"""


def a_round(prefill_s: float, decode_s: float = 0.08, batch_size: int = 1, is_warmup: bool = False) -> Round:
    return Round(batch_size, is_warmup, 256, 4, prefill_s, decode_s)


def results_of(*rounds: Round, batch_sizes: tuple[int, ...] = (1, 4), rounds_each: int = 3) -> Results:
    results = Results(batch_sizes, rounds_each)
    for done in rounds:
        results.add(done)
    return results


def test_a_percentile_is_the_element_at_the_floor_of_its_share_of_the_sorted_values() -> None:
    summary = summarize([a_round(ms / 1e3).prefill_ms for ms in (7, 3, 9, 1, 5, 8, 2, 10, 4, 6)])
    values = [summary[name] for name in ("p50", "p90", "p99", "Lowest", "Highest", "Average")]
    assert values == pytest.approx([6, 10, 10, 1, 10, 5.5])


def test_throughput_counts_all_requests_and_decode_steps_only() -> None:
    done = a_round(0.5, 0.08, batch_size=4)
    assert done.prefill_tokens_per_s == pytest.approx(4 * 256 / 0.5)
    assert done.decode_tokens_per_s == pytest.approx(4 * 4 / 0.08)
    assert done.token_ms == pytest.approx(20)


def test_warm_ups_are_counted_and_not_measured() -> None:
    results = results_of(a_round(1, is_warmup=True), a_round(2), a_round(3))
    assert [done.prefill_s for done in results.measured[1]] == [2, 3]
    assert results.finished == {1: 3, 4: 0}


def test_a_cell_is_empty_where_it_equals_the_one_above() -> None:
    assert merged([("a", "1"), ("a", "2"), ("b", "2"), ("a", "2")]) == [("a", "1"), ["", "2"], ["b", ""], ["a", ""]]


def test_the_tables_are_tgis() -> None:
    asked = AskedSampling.of({"temperature": 0.5, "top_p": 1.0, "top_n_tokens": 3, "do_sample": True})
    plan = Plan((1, 4, 8), 256, 5, 2, 1, Sampling())
    results = results_of(
        a_round(0.3, 9.0, is_warmup=True),
        a_round(0.01, 0.08),
        a_round(0.02, 0.2),
        a_round(0.01, 0.4, 4),
        a_round(0.02, 0.4, 4),
        batch_sizes=(1, 4, 8),
    )
    assert tables("some/name", plan, asked, results) == GOLDEN.strip()


def test_the_tables_are_drawn_at_the_batch_sizes_that_were_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = results_of(a_round(0.01), a_round(0.02), a_round(0.03, 0.4, 4), batch_sizes=(1, 4, 8))
    lines = {name: (list(sizes), values) for name, sizes, values in plots._means(results, LATENCIES)}
    assert lines["Prefill"] == ([1, 4], [pytest.approx(15), pytest.approx(30)])
    plots.draw_shards(results, path := tmp_path / "s.png")
    assert path.read_bytes().startswith(b"\x89PNG")
