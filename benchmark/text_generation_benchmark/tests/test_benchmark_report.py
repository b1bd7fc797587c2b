"""The tables show measured figures, and say so where a figure is missing."""

from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_benchmark import report_plots
from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.ours import Overlap, kernels_named, read_overlap
from text_generation_benchmark.output import END, START, replace_table
from text_generation_benchmark.report import Peer, Report, Row, tokens_per_s
from text_generation_benchmark.roofline import Ceilings, LoadWork, StepPart
from text_generation_benchmark.workload import PREFILL, Run, Workload, take_turns

PAGE = """\
tgi_shard_decode_steps {steps}
tgi_shard_overlapped_steps {overlapped}
tgi_shard_step_gap_duration_bucket{{le="0.001"}} {fast}
tgi_shard_step_gap_duration_bucket{{le="0.002"}} {steps}
tgi_shard_step_gap_duration_bucket{{le="+Inf"}} {steps}
tgi_batch_forward_duration_sum{{method="decode"}} {seconds}
tgi_batch_forward_duration_count{{method="decode"}} {steps}
"""
CEILINGS = Ceilings(bandwidth=2e10, flops=1e12)
# One step with the prompt takes 20 ms at least, a decode step 5 ms, of which 4 ms are weights.
WORK = LoadWork(
    [StepPart("weights", 10**8, 2 * 10**10)], [StepPart("weights", 8 * 10**7), StepPart("head", 2 * 10**7)], steps=127
)
FAST = Peer("fast", "1.0")
ABSENT = Peer("absent", "", "absent is not installed in .venv-absent, `make bench-peers` installs it")


def result(first: float, last: float, tokens: int, wall_s: float) -> LoadResult:
    return LoadResult((StreamTimes(first, last, tokens),), wall_s)


def report(*rows: Row, peers: tuple[Peer, ...] = (FAST, ABSENT), overlaps: tuple[Overlap, ...] = ()) -> str:
    return Report("one core.", peers, rows, overlaps).as_markdown()


def test_the_table_is_replaced_and_the_rest_stays() -> None:
    text = f"before\n{START}\nold\n{END}\nafter"
    assert replace_table(text, "new") == f"before\n{START}\nnew\n{END}\nafter"
    with pytest.raises(ValueError, match="no <!-- table"):
        replace_table("nothing", "new")


def test_overlap_is_the_difference_of_two_pages() -> None:
    before = PAGE.format(steps=100, overlapped=0, fast=100, seconds=1)
    after = PAGE.format(steps=200, overlapped=97, fast=130, seconds=2)
    overlap = read_overlap("m", before, after)
    assert (overlap.overlapped, overlap.median_gap_s, overlap.mean_step_s) == (0.97, 0.002, 0.01)
    assert "| m | 97.0% | ≤ 2.00 ms | ≤ 20.0% of 10.00 ms |" in report(overlaps=(overlap,))


def test_the_kernels_are_those_that_the_shard_names() -> None:
    started = "Server started at unix:///tmp/shard-0 (cpu, bfloat16, kernels: {})"
    named = {kernels_named(started.format(said)) for said in ("cpu (avx2)", "cpu (avx2); not amx, since there is none")}
    assert named == {"cpu (avx2)"}
    assert kernels_named(started.format("torch's, since no compiler was found")) == "torch's"
    assert kernels_named("ready") == "unknown"


def test_tokens_per_second_are_compared_as_ours_over_the_peers() -> None:
    ours, theirs = result(0.1, 1.37, 128, 1.28), result(0.1, 2.56, 128, 2.56)
    row = Row("m", Workload(1), [ours], {"fast": [theirs]}, WORK, [CEILINGS])
    assert row.limit_of_step == pytest.approx(0.5) and row.limit_of_load == pytest.approx((0.02 + 127 * 0.005) / 1.28)
    figures = "100.0 | 50.0 (2.00×) | not installed | 10.00 | 100 | 51.2% | 50.0% | weights: memory, 80% |"
    assert f"| m | 1 | {figures}" in report(row)
    sampled = replace(row, workload=Workload(1, is_sampled=True))
    assert "| m | 1, temperature 0.7, top_p 0.9 | 100.0 |" in report(sampled)


def test_first_tokens_are_compared_as_the_peers_over_ours() -> None:
    row = Row("m", PREFILL, [result(0.2, 0.2, 1, 0.2)], {"fast": [result(0.3, 0.3, 1, 0.4)]}, WORK, [CEILINGS])
    table = report(row)
    assert "| m | 1024 | 200 | 300 (1.50×) | not installed | 5120 | 10.0% | weights: products' peak, 100% |" in table
    assert "tokens in" not in table  # there is no empty table for the other kind of load


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """Rounds in a slow minute, a fast one and a medium one: ours is twice as fast in each, except for one outlier."""
    ours = [result(0.1, 1, 128, wall) for wall in (4.0, 1.0, 9.0)]
    theirs = [result(0.1, 1, 128, wall) for wall in (8.0, 2.0, 4.0)]
    row = Row("m", Workload(1), ours, {"fast": theirs}, WORK, [CEILINGS] * 3)
    assert "| 32.0 | 32.0 (2.00×) |" in report(row)


def test_a_share_of_the_limit_is_taken_with_the_ceilings_of_its_round() -> None:
    """The step takes 10 ms in each round, and its least time is 5, 2.5 and 1.25 ms: the median share is 25 %."""
    ours = [result(0.1, 1.37, 128, 1.37)] * 3
    row = Row("m", Workload(1), ours, {}, WORK, [Ceilings(speed, 1e12) for speed in (2e10, 4e10, 8e10)])
    assert row.limit_of_step == pytest.approx(0.25)


def test_servers_take_turns_after_a_short_run_each() -> None:
    calls = []

    def run_of(name: str) -> Run:
        def run(workload: Workload) -> LoadResult:
            calls.append((name, workload.new_tokens))
            return result(0, 1, workload.new_tokens, len(calls))

        return run

    results = take_turns({"a": run_of("a"), "b": run_of("b")}, Workload(1, new_tokens=9))
    assert calls == [("a", 4), ("b", 4), *[("a", 9), ("b", 9)] * 3]
    assert [r.wall_s for r in results["a"]] == [3, 5, 7] and [r.wall_s for r in results["b"]] == [4, 6, 8]


def test_an_absent_peer_is_named_with_the_way_to_install_it() -> None:
    row = Row("m", Workload(1), [result(0, 1, 128, 1)], {}, WORK, [CEILINGS])
    table = report(row)
    assert ABSENT.note in table
    assert "| – | not installed |" in table  # the first peer is installed, and has no figure for this load


def test_the_tables_are_drawn_with_a_line_for_each_server_that_has_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fast, slow = result(0.1, 1.37, 128, 1.28), result(0.1, 2.56, 128, 2.56)
    rows = [Row("m", Workload(n), [slow], {"fast": [fast]} if n < 4 else {}, WORK, [CEILINGS]) for n in (1, 2, 4)]
    prompt = Row("m", PREFILL, [result(0.2, 0.2, 1, 0.2)], {}, WORK, [CEILINGS])
    lines = report_plots._lines(Report("", (FAST, ABSENT), rows, ()), rows, tokens_per_s, 1)
    assert [(name, list(places)) for name, places, _ in lines] == [("this server", [1, 2, 4]), ("fast", [1, 2])]
    assert lines[1][2] == [pytest.approx(100.0)] * 2
    report_plots.draw_report(Report("", (FAST,), [*rows, prompt], ()), path := tmp_path / "c.png")
    assert path.read_bytes().startswith(b"\x89PNG")
