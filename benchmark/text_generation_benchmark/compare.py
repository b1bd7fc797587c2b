"""The server beside transformers' `generate` and the memory's speed, on the same machine in the same run."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from text_generation_benchmark.checkpoint import SHAPES, write_checkpoint
from text_generation_benchmark.load import LoadResult, run_load

INPUT_TOKENS, NEW_TOKENS = 256, 128
CONCURRENCY = (1, 16)
REPETITIONS = 3
PROMPT = "Once upon a time there was a small fox who lived near the old mill. " * 40


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    concurrency: int
    ours: LoadResult
    peer_s: float
    step_bytes: int  # weights and keys and values that one decode step has to read
    bandwidth: float  # bytes per second

    @property
    def peer_tokens_per_s(self) -> float:
        return self.concurrency * NEW_TOKENS / self.peer_s

    @property
    def share_of_bandwidth(self) -> float:
        return self.step_bytes / self.ours.per_token_s / self.bandwidth


@dataclass(frozen=True, slots=True)
class Overlap:
    """What the shard says about its steps under the largest load."""

    model: str
    overlapped: float  # share of decode steps whose successor was queued when they ended
    median_gap_s: float  # upper bound: the edge of the histogram bucket that holds the median
    mean_step_s: float


def read_bandwidth() -> float:
    """Bytes per second that all cores together read: the best of some passes over 1 GiB."""
    block = torch.ones(2**28, dtype=torch.float32)
    block.sum()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - started)
    return block.nbytes / min(times)


def step_bytes(model: Path, concurrency: int) -> int:
    """Read by a decode step in the middle of a run, in bfloat16: all weights once, every row's keys and values."""
    config = json.loads((model / "config.json").read_text())
    head_size = config["hidden_size"] // config["num_attention_heads"]
    per_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_size * 2
    weights = (model / "model.safetensors").stat().st_size
    return int(weights + concurrency * (INPUT_TOKENS + NEW_TOKENS / 2) * per_token)


@contextlib.contextmanager
def running_server(model: Path) -> Iterator[int]:
    """A server on a free port; yields the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="tgi-bench-")
    launcher = Path(sys.executable).parent / "text-generation-launcher"
    command = [str(launcher), "--model-id", str(model), "--port", str(port), "--hostname", "127.0.0.1"]
    command += ["--shard-uds-path", f"{folder}/shard", "--dtype", "bfloat16", "--max-total-tokens", "2048"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    try:
        _wait_until_ready(server, port)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def _wait_until_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if _get(port, "/health") is not None:
                return
        time.sleep(0.2)
    raise RuntimeError("the server was not ready after 120 s")


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        content: bytes = response.read()
    return content.decode()


def measure_ours(name: str, model: Path) -> tuple[dict[int, LoadResult], Overlap]:
    """The median run of each concurrency."""
    with running_server(model) as port:
        run_load(port, [PROMPT], INPUT_TOKENS, 8)
        results = {}
        for concurrency in CONCURRENCY:
            before = _get(port, "/metrics")
            runs = [run_load(port, [PROMPT] * concurrency, INPUT_TOKENS, NEW_TOKENS) for _ in range(REPETITIONS)]
            results[concurrency] = sorted(runs, key=lambda run: run.wall_s)[REPETITIONS // 2]
        return results, read_overlap(name, before, _get(port, "/metrics"))


def read_overlap(name: str, before: str, after: str) -> Overlap:
    """From the difference of two pages of metrics."""

    def moved(series: str) -> float:
        values = [re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE) for page in (before, after)]
        return float(values[1].group(1) if values[1] else 0) - float(values[0].group(1) if values[0] else 0)

    steps = moved("tgi_shard_decode_steps")
    edges = re.findall(r'^tgi_shard_step_gap_duration_bucket\{le="([^"]+)"\}', after, re.MULTILINE)
    gap = next(e for e in edges if moved(f'tgi_shard_step_gap_duration_bucket{{le="{e}"}}') >= steps / 2)
    forward = 'tgi_batch_forward_duration_{}{{method="decode"}}'
    mean = moved(forward.format("sum")) / moved(forward.format("count"))
    return Overlap(name, moved("tgi_shard_overlapped_steps") / steps, float(gap), mean)


def measure_peer(model: Path) -> dict[int, float]:
    """Seconds for each concurrency."""
    command = [sys.executable, "-m", "text_generation_benchmark.peer", str(model), str(INPUT_TOKENS), str(NEW_TOKENS)]
    result = subprocess.run([*command, *map(str, CONCURRENCY)], stdout=subprocess.PIPE, check=True)
    return {int(n): seconds for n, seconds in json.loads(result.stdout.splitlines()[-1]).items()}


def compare(demo_model: Path) -> tuple[list[Row], list[Overlap], float]:
    rows, overlaps = [], []
    bandwidth = read_bandwidth()
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        m100 = Path(folder) / "m100"
        write_checkpoint(m100, SHAPES["m100"], demo_model)
        for name, model in (("demo", demo_model), ("m100", m100)):
            ours, overlap = measure_ours(name, model)
            peer = measure_peer(model)
            overlaps.append(overlap)
            rows += [Row(name, n, ours[n], peer[n], step_bytes(model, n), bandwidth) for n in CONCURRENCY]
    return rows, overlaps, bandwidth


def as_markdown(rows: list[Row], overlaps: list[Overlap], bandwidth: float) -> str:
    lines = [
        f"{INPUT_TOKENS} tokens in, {NEW_TOKENS} out, bfloat16, {os.cpu_count()} cores, torch {torch.__version__};"
        f" memory reads {bandwidth / 1e9:.1f} GB/s. Medians of {REPETITIONS} runs.",
        "",
        "| model | concurrent | tokens/s | transformers | ratio | ms per token | first token ms | of memory limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row_line(row) for row in rows]
    lines += [
        "",
        "| model | decode steps with their successor queued | gap between steps | of a step |",
        "|---|---|---|---|",
    ]
    for overlap in overlaps:
        share = f"{overlap.median_gap_s / overlap.mean_step_s:.1%} of {overlap.mean_step_s * 1e3:.2f} ms"
        gap = f"≤ {overlap.median_gap_s * 1e3:.2f} ms"
        lines.append(f"| {overlap.model} | {overlap.overlapped:.1%} | {gap} | ≤ {share} |")
    return "\n".join(lines)


def _row_line(row: Row) -> str:
    cells = [
        row.model,
        str(row.concurrency),
        f"{row.ours.tokens_per_s:.1f}",
        f"{row.peer_tokens_per_s:.1f}",
        f"{row.ours.tokens_per_s / row.peer_tokens_per_s:.2f}",
        f"{row.ours.per_token_s * 1e3:.2f}",
        f"{row.ours.first_token_s * 1e3:.0f}",
        f"{row.share_of_bandwidth:.1%}",
    ]
    return f"| {' | '.join(cells)} |"
