"""The tables of families: shares beside a Llama's, and a peer that does not serve a model with its error."""

import pytest

from text_generation_benchmark.compare import last_line
from text_generation_benchmark.families.report import BesideLlama, llama_table, peer_table
from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.report import Compared, Peer, Row
from text_generation_benchmark.roofline import Ceilings, LoadWork, StepPart
from text_generation_benchmark.workload import Workload

FAST, BROKEN = Peer("fast", "1.0"), Peer("broken", "2.0")


def result(per_token_s: float) -> LoadResult:
    return LoadResult((StreamTimes(0.0, 10 * per_token_s, 11),), 11 * per_token_s)


def row(model: str, per_token_s: list[float], step_bytes: int) -> Row:
    results = [result(each) for each in per_token_s]
    peers, work = {"fast": [result(0.2)] * len(results)}, LoadWork([], [StepPart("weights", step_bytes)], 10)
    return Row(model, Workload(16), results, peers, work, [Ceilings(1e9, 1e12)] * len(results))


def test_a_share_is_compared_with_the_llama_of_its_round() -> None:
    measured = BesideLlama(row("m", [0.1, 0.2, 0.5], 10**7), row("llama", [0.2, 0.2, 0.4], 2 * 10**7), 31.25, "cpu (x)")
    assert measured.ratio == pytest.approx(0.5)  # rounds: 1, 0.5 and 0.4
    first, *_, line = llama_table("64 tokens in", [measured]).splitlines()
    assert "; kernels: cpu (x); " in first and "memory reads 1.0 to 1.0 GB/s, products make 1,000 to 1,000" in first
    assert line == "| m | 16 | 31.2 | 10 | 20 | 200.00 | 200.00 | 5.0% | 10.0% | weights: memory, 100% | 0.50× |"


def test_a_peer_with_an_error_has_it_below_the_table() -> None:
    measured = Compared([row("m", [0.1], 10**7)], "cpu", errors={"broken": "no bloom"})
    text = peer_table("64 tokens in", [FAST, BROKEN], [measured])
    assert (
        "| m | 16 | 10.0 | 5.0 (2.00×) | error | 100.00 | 200.00 (2.00×) | – | 9.1% | 10.0% | weights: memory, 100% |"
        in text
    )
    assert text.endswith("- m on broken: `no bloom`")


def test_an_error_is_shown_by_its_last_line() -> None:
    assert last_line(RuntimeError("ended; its last lines:\nTraceback\nValueError: no `bloom`\n\n")) == (
        "ValueError: no 'bloom'"
    )
    assert last_line(RuntimeError()) == "RuntimeError"
