"""Targets are met only by what a GPU has shown, and the figures are read from the right stretch of a load."""

from pathlib import Path
from typing import Any

import pytest
from gpu_check.checks import test_server, test_steps
from gpu_check.checks.test_server import Page, step_figures
from gpu_check.report import TARGETS, as_markdown, figures_of, verdict

from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.output import table
from text_generation_benchmark.roofline import Ceilings, step_parts
from text_generation_benchmark.shapes import LLAMA_8B
from text_generation_benchmark.workload import Workload
from text_generation_common.models.config import read_config

AT_LEAST, AT_MOST = TARGETS[0], TARGETS[-1]


def entry(outcome: str, **more: Any) -> dict[str, Any]:
    return {"test": f"t.py::{outcome}", "outcome": outcome, "reason": "", "log": "", "lines": [], **more}


@pytest.mark.parametrize(
    ("target", "value", "said"),
    [(AT_LEAST, 0.81, "met: 81.0%"), (AT_LEAST, 0.79, "not met: 79.0%"), (AT_MOST, 0.02, "met: 2.0%"),
     (AT_MOST, 0.04, "not met: 4.0%"), (AT_MOST, None, "not run")],
)  # fmt: skip
def test_a_target_is_met_by_a_figure_of_a_gpu_and_by_nothing_else(target: Any, value: float | None, said: str) -> None:
    figures = {} if value is None else {target.figure: value}
    assert verdict(target, figures, on_gpu=True) == said
    assert verdict(target, figures, on_gpu=False) == "not run"


def test_the_page_has_what_was_measured_and_what_failed() -> None:
    lines = [["Speed", {"cells": {"a": "1"}, "figures": {"f": 0.5}}], ["Speed", {"cells": {"b": "2"}, "figures": {}}]]
    bad = entry("failed", reason="wrong | by far", log="its end")
    entries = [entry("passed", lines=lines), bad, entry("skipped", reason="no such GPU")]
    text = as_markdown("# head", entries, {AT_LEAST: "met: 81%"}, on_gpu=True)
    assert figures_of(entries) == {"f": 0.5}
    assert "## Speed\n\n| a | b |\n|---|---|\n| 1 |  |\n|  | 2 |" in text and "| no such GPU | 1 |" in text
    assert "| t.py | 1 | 1 | 1 | 0 |" in text and "## t.py::failed\n\nwrong | by far\n\n````text\nits end\n" in text
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def page(at_s: float, streams: int, steps: int = 0, sent: int = 5, answered: int = 5) -> Page:
    lines = {
        'tgi_batch_inference_count{method="prefill"}': sent,
        'tgi_batch_inference_success{method="prefill"}': answered,
        "tgi_batch_current_size": streams,
        "tgi_shard_decode_steps": steps,
        'tgi_batch_forward_duration_sum{method="decode"}': steps * 0.009,
        "tgi_slots_used": 300 + steps,
    }
    return Page("".join(f"{name} {value}\n" for name, value in lines.items()), at_s)


def test_only_a_stretch_in_which_all_streams_decode_and_no_prompt_runs_is_looked_at(tmp_path: Path) -> None:
    write_without_weights(tmp_path, LLAMA_8B)
    config = read_config(tmp_path)
    pages = [page(0, 3, 0), page(1, 3, 100), page(2, 3, 150, 6), page(3, 3, 200, 6, 6), page(4, 3, 300, 6, 6),
             page(5, 3, 400, 6, 6), page(6, 2, 500, 6, 6), page(9, 2, 800, 6, 6)]  # fmt: skip
    read = sum(part.bytes for part in step_parts(config, 3, 1, 200)[:3])
    cells, figures = step_figures(pages, Workload(3), config, Ceilings(200 * read, 1.0))
    assert cells["steps"] == "200" and cells["step ms"] == "10.000" and cells["context"] == "200"
    assert figures == pytest.approx({"decode at 3": 0.5, "outside at 3": 0.1})
    assert step_figures(pages, Workload(3, is_sampled=True), config, Ceilings(1, 1.0))[1] == {}
    for without in ([], [page(0, 3, 5)], [page(0, 3, 5), page(1, 3, 5)]):
        with pytest.raises((AssertionError, IndexError)):
            step_figures(without, Workload(3), config, Ceilings(1, 1.0))
    # 8.03 billion parameters, of which the embedding's are not read.
    assert step_parts(config, 1, 1, 1)[0].bytes == pytest.approx(2 * 6.98e9, rel=1e-3)
    assert sum(part.flops for part in step_parts(config, 1, 4096, 4096)) == pytest.approx(6.16e13, rel=1e-2)


def test_requests_join_at_once_so_that_the_largest_graph_is_recorded_before_it_is_measured() -> None:
    """Otherwise the warm-up never has all 256 rows together."""
    assert test_server.FLAGS[test_server.FLAGS.index("--waiting-served-ratio") + 1] == "0"


def test_torchs_words_of_a_call_that_waits_count_and_its_notice_of_a_prototype_does_not() -> None:
    """The texts are those of c10/cuda/CUDAFunctions.cpp."""
    notice = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    assert test_steps.WAITED in "called a synchronizing CUDA operation (function operator())"
    assert test_steps.WAITED not in notice
