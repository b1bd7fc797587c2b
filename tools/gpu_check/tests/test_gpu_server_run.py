"""The bytes and operations counted for the served model, and the figures read from its server's metrics."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_check.ceilings import MEMORY
from gpu_check.findings import Context, Known, Request
from gpu_check.model import kv_bytes, prefill_flops, weight_bytes
from gpu_check.results import TARGETS
from gpu_check.server_run import EIGHT_BITS, FULL, REHEARSAL, decode_figures, server_command
from gpu_check.windows import Page, Window, longest_window

from text_generation_benchmark.checkpoint import write_without_weights
from text_generation_benchmark.load import LoadResult, StreamTimes
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import LLAMA_8B, LlamaShape
from text_generation_benchmark.workload import Workload
from text_generation_common.models.config import read_config
from text_generation_server.models.loading import shapes

SMALL = LlamaShape(hidden=64, intermediate=96, layers=3, heads=4, kv_heads=2, vocabulary=3000, tied=False)


def page(at_s: float, streams: int, steps: int = 0, prefills: int = 5, answered: int = 5) -> Page:
    lines = {
        'tgi_batch_inference_count{method="prefill"}': prefills,
        'tgi_batch_inference_success{method="prefill"}': answered,
        "tgi_batch_current_size": streams,
        "tgi_shard_decode_steps": steps,
        'tgi_batch_forward_duration_sum{method="decode"}': steps * 0.009,
        "tgi_shard_step_gap_duration_sum": steps * 0.0001,
        "tgi_slots_used": 100 + steps,
    }
    return Page(at_s, "".join(f"{name} {value}\n" for name, value in lines.items()))


def test_only_a_stretch_in_which_all_streams_decode_and_no_prompt_runs_is_looked_at():
    pages = [
        page(0, 3, 0), page(1, 3, 100), page(2, 3, 150, prefills=6), page(3, 3, 200, prefills=6, answered=6),
        page(4, 3, 300, 6, 6), page(5, 3, 400, 6, 6), page(6, 2, 500, 6, 6), page(9, 2, 800, 6, 6),
    ]  # fmt: skip
    window = longest_window(pages, 3)
    assert window is not None and window.steps == 200
    assert window.step_s == pytest.approx(0.01) and window.device_s == pytest.approx(0.009)
    assert window.outside == pytest.approx(0.1) and window.context_tokens == 400


@pytest.mark.parametrize("pages", [[], [page(0, 3, 5)], [page(0, 3, 5), page(1, 4, 9)], [page(0, 3, 5), page(1, 3, 5)]])
def test_without_two_looks_at_the_same_stretch_there_is_no_window(pages):
    assert longest_window(pages, 3) is None


def context_with(**figures: float) -> Context:
    return Context(torch.device("cpu"), Request("m:f", "journal", Known(figures)))


def test_decode_figures_are_shares_of_the_ceiling():
    window = Window(10, step_s=2.0, device_s=1.9, gap_s=0.0, context_tokens=500)
    load = LoadResult((StreamTimes(0.1, 1.1, 11, (0.1,) * 99 + (0.5,)),), 1.1)
    context = context_with(**{MEMORY: weight_bytes(SMALL) + 500 * kv_bytes(SMALL)})
    plan = replace(REHEARSAL, shape=SMALL)
    measured = decode_figures(context, plan, Workload(64), load, window)
    assert measured.figures["decode at 64"] == pytest.approx(0.5)
    assert measured.figures["outside at 64"] == pytest.approx(0.05)
    assert measured.cells["99% of gaps ≤ ms"] == "500.00"
    assert "decode at 64" not in decode_figures(context_with(), plan, Workload(64), load, window).figures
    assert decode_figures(context, plan, Workload(64), load, None).failure


def test_a_server_with_another_cache_sets_no_figure_of_a_target():
    window = Window(10, step_s=2.0, device_s=1.9, gap_s=0.0, context_tokens=500)
    load = LoadResult((StreamTimes(0.1, 1.1, 11),), 1.1)
    plan = replace(REHEARSAL, shape=SMALL, cache=torch.float8_e4m3fn)
    figures = decode_figures(context_with(**{MEMORY: 1e9}), plan, Workload(64), load, window).figures
    assert figures and not set(figures) & {target.figure for target in TARGETS}


def test_keys_and_values_in_8_bits_have_a_scale_for_each_head():
    assert kv_bytes(LLAMA_8B, torch.float8_e4m3fn) == 131072 // 2 + 32 * 2 * 8 * 4


def test_requests_join_at_once_so_that_the_largest_graph_is_recorded_before_it_is_measured():
    """Otherwise the warm-up never has all 256 rows together."""
    for plan in (FULL, EIGHT_BITS, REHEARSAL):
        assert plan.arguments[plan.arguments.index("--waiting-served-ratio") + 1] == "0"


def test_bytes_are_those_of_the_weights_without_the_embedding_and_the_norms(tmp_path: Path):
    write_without_weights(tmp_path, SMALL)
    config = read_config(tmp_path)
    read = {name: shape for name, shape in shapes(config).items() if "embed" not in name and "norm" not in name}
    assert weight_bytes(SMALL) == 2 * sum(map(math.prod, read.values()))


def test_the_8b_shape_has_8_billion_parameters():
    parameters = weight_bytes(LLAMA_8B) / 2 + LLAMA_8B.vocabulary * LLAMA_8B.hidden
    assert parameters == pytest.approx(8.03e9, rel=1e-3)
    assert kv_bytes(LLAMA_8B) == 131072
    assert prefill_flops(LLAMA_8B, 4096) == pytest.approx(2 * 6.98e9 * 4096 + 4.4e12, rel=2e-2)


def test_the_folder_has_what_prompts_and_server_need_and_a_text_for_every_id(tmp_path: Path):
    write_without_weights(tmp_path, SMALL)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL.vocabulary
    assert len(tokenizer.encode(Prompts(tmp_path).make(1, 20)[0]).ids) == 20


def test_the_server_is_started_without_installed_programs(tmp_path: Path):
    command = server_command(REHEARSAL, tmp_path)
    words = list(command.arguments)
    assert words[words.index("--load-format") + 1] == "dummy"
    for program in ("text-generation-server", "text-generation-router"):
        script = tmp_path / "programs" / program
        assert script.stat().st_mode & 0o111
        compile(script.read_text(), str(script), "exec")
