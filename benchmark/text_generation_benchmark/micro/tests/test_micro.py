"""Each micro-benchmark measures what it says, and the runner takes names and settings."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from text_generation_benchmark.cli import app
from text_generation_benchmark.live.reading import ProcessTime, WriterTime, events_of
from text_generation_benchmark.micro import choice, loading, news, scheduling, standby, windows
from text_generation_benchmark.micro.profile import saved_bytes
from text_generation_benchmark.micro.random_files import BLOCKS, FORMATS, write_model
from text_generation_benchmark.micro.router import RouterTime, measure, router_table
from text_generation_benchmark.micro.table import MICROS, ratio, run_micros
from text_generation_benchmark.micro.windows import WindowedLayer, in_turns
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes
from text_generation_common.quantized.tensors import codes
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.library import Library, choose_target

TINY = LlamaShape(hidden=64, intermediate=64, layers=1, heads=4, kv_heads=2, vocabulary=64)


def table_of(name: str, *settings: str) -> list[str]:
    [(_, text)] = run_micros([name], settings)
    return text.splitlines()


def test_all_are_listed_with_their_settings() -> None:
    result = CliRunner().invoke(app, ["micro", "--list"])
    assert result.exit_code == 0 and len(result.output.splitlines()) == 2 + len(MICROS)
    assert "| streams=1,16,64,256 seconds=5.0 step_ms=0.0 route=generate" in result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["windows"], "there is no micro-benchmark windows: choose window-decode, window-chunk, profile"),
        (["choice", "-s", "rows=3"], "choice has no setting rows: choose engines, calls"),
        (["choice", "-s", "engines=few"], "engines=few is not a number"),
        (["choice", "-s", "engines=1"], "engines=1: a front chooses among 2 to"),
        (["router", "-s", "streams=3,0"], "streams=0 is too small"),
        (["standby", "-s", "model=m7"], "m7 is not a model that is measured: choose demo, m100"),
        (["router", "-s", "route=sms"], "sms is not a route that is measured: choose generate, chat"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["micro", *arguments])
    assert result.exit_code == 1 and reason in result.stderr and result.stderr.count("\n") == 1


# Bytes that loading may take beside weights and two tensors, whatever their size: four threads have six tensors each
# with a byte for each number of a slice. Numbers in float32 would take twice as many in this model.
SLACK = 4 * 6 * codes.NUMBERS_AT_ONCE


@pytest.mark.parametrize("name", FORMATS)
def test_loading_takes_little_more_than_the_weights_in_each_format(tmp_path: Path, name: str) -> None:
    shape = LlamaShape(1024, 2816, 1, heads=16, kv_heads=4, vocabulary=64)
    model, tensors = write_model(tmp_path, name, shape)
    packed, peak, kept = loading.memory_of(model)
    assert 0.9 * sum(tensors) < packed < 1.1 * sum(tensors)
    assert kept <= peak <= loading.allowed(packed, tensors) + SLACK
    config = read_config(model)
    saved = saved_bytes(model, config, 2)  # what the profile of a step counts
    assert saved.total() == 2 * sum(map(math.prod, shapes(config).values())) - packed
    assert all(saved[part] > 0 for part in ("weights", *["head"] * (name in BLOCKS)))


def test_each_way_to_detokenize_is_measured() -> None:
    times = scheduling.detokenize(rounds=1)
    assert list(times) == list(scheduling.STOPS) and all(min(each) > 0 for each in times.values())
    assert len(table_of("detokenize", "rounds=1")) == 2 + len(scheduling.STOPS)


def test_a_full_server_with_a_long_queue_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "KEYSTROKES", 500)
    times = scheduling.decide(20)
    decisions, answers, *_ = times.values()
    assert len(decisions) >= 5 and min(decisions) > 0 and min(answers) > 0
    assert len(times) == 4 and "2,000 waiting" in next(iter(times))


def test_the_measured_front_knows_the_caches_of_its_engines() -> None:
    random = np.random.default_rng(0)
    chats = [choice.prompt_of(random, choice.CHAT_BLOCKS) for _ in range(4)]
    _, placement = choice.front_of(random, 3, chats, [])
    matched = [placement.index.matched(choice.hashes_of(chat)).tolist() for chat in chats]
    assert matched == [[50, 20, 20], [20, 50, 20], [20, 20, 50], [50, 20, 20]]


def test_all_rows_of_a_front_s_choice_are_measured() -> None:
    lines = table_of("choice", "engines=3", "calls=10")
    assert len(lines) == 6 and all("| 0.00 |" not in line for line in lines[4:])


def test_both_sides_of_both_messages_are_measured() -> None:
    costs = news.news(hashes=5, messages=50)
    assert len(costs) == 4 and all(len(means) == 1 for means in costs.values())


def test_a_router_and_a_program_that_only_writes_are_measured() -> None:
    times = measure((3,), 0.3, 0.0, "generate")
    assert [time.streams for time in times] == [3]
    assert times[0].router.tokens > 30 and times[0].floor.tokens > 30
    assert len(router_table(times).splitlines()) == 3


def test_what_is_more_with_processes_that_wait_is_that_of_turns_and_at_rest_that_of_the_last() -> None:
    costs = {
        way: [standby.StandbyCost(ready_s, 2.0, 3.0, rest_mib << 20, 2**20, 0.5) for ready_s, rest_mib in each]
        for way, each in {"on": [(1.5, 0), (1.0, 0), (4.0, 70)], "off": [(1.0, 9), (1.25, 9), (2.0, 50)]}.items()
    }
    first, *_, memory, _, _ = standby.rows(costs)
    assert [*first.values()][1:] == ["1.50", "1.25", "0.50 (-0.25 to 2.00)"]
    assert [*memory.values()][1:] == ["70.00", "50.00", "20.00"]


def test_time_and_memory_of_a_server_are_those_of_all_its_processes() -> None:
    grandchild = "x = bytearray(64 << 20)\nfor _ in range(10**6): pass\nprint(flush=True)\ninput()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        whole, own = standby.memory(process.pid)
        times = standby.processor_s(process.pid), standby.run_s(process.pid)
        assert len(standby.family(process.pid)) == 2 and whole > own > 64 << 20 and min(times) > 0.01
        assert standby.load(process.pid, 0.2) < 0.5
        process.communicate(b"\n")


def test_time_per_token_and_per_step_are_told_apart() -> None:
    floor = WriterTime(ProcessTime(1.0, 1.0), 1_000_000, 1.0)
    times = [
        RouterTime(streams, WriterTime(ProcessTime(200e-6 + streams * 8e-6, 0.0), streams, 1.0), floor)
        for streams in (1, 16, 256)
    ]
    assert router_table(times).endswith("User time: 8.0 µs per token, and 200 µs per step.")


def test_events_are_the_chunks_that_went_over_the_wire() -> None:
    chunk = "8\r\ndata: 1\n\n\r\n"
    answer = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunk}{chunk}8\r\nda".encode()
    assert events_of(answer) == [chunk, chunk]


def tiny_layer() -> tuple[CpuKernels, WindowedLayer]:
    target = choose_target().target
    assert target is not None
    return CpuKernels(Library(target), 1), WindowedLayer(TINY, rows=2, window=64, chunk=16, longest=300)


def test_every_context_is_measured_for_decode_steps_and_chunks() -> None:
    measured = [windows.decode(2, 64, (64, 200), 2), windows.chunk(16, 64, (64, 200), 2)]
    assert [list(times) for times in measured] == [["64 tokens", "200 tokens"]] * 2
    assert all(len(seconds) == 2 for times in measured for seconds in times.values())
    table = table_of("window-decode", "rows=2", "window=64", "contexts=64,200", "rounds=2")
    assert table[2].startswith("| 64 tokens ") and table[2].endswith(" | 1.000×      |")


def test_contexts_have_the_same_result_because_windows_hold_the_same_keys() -> None:
    kernels, layer = tiny_layer()
    assert torch.equal(layer.decode(kernels, 64)(), layer.decode(kernels, 64 + 128)())
    assert torch.equal(layer.chunk(kernels, 128)(), layer.chunk(kernels, 256)())


@pytest.mark.parametrize("what", ["decode", "chunk"])
def test_a_kernel_that_reads_before_the_window_is_noticed(what: str) -> None:
    kernels, layer = tiny_layer()
    in_turns({200: getattr(layer, what)(kernels, 200)}, rounds=1)
    layer.options = replace(layer.options, window=65)
    with pytest.raises(RuntimeError, match="attention at 200 tokens: a result is not finite"):
        in_turns({200: getattr(layer, what)(kernels, 200)}, rounds=1)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    assert ratio([1.1, 2.0, 8.0], [1.0, 2.0, 4.0]) == pytest.approx(1.1)
