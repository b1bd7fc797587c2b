"""This project's server, and its shard's metrics of decode steps."""

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_benchmark.metrics import metric
from text_generation_benchmark.process import ServerCommand, free_port, running


@dataclass(frozen=True, slots=True)
class Overlap:
    """Facts about decode steps under the largest load, from the shard's metrics."""

    model: str
    overlapped: float  # share of decode steps that ended with the next step already queued
    median_gap_s: float  # upper bound: the edge of the histogram bucket that holds the median
    mean_step_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    port: int
    kernels: str  # that its shard computes with


# In the line that a shard logs when it has started.
KERNELS = re.compile(r"kernels: ([\w']+(?: \(\w+\))?)")
LAUNCHER = Path(sys.executable).parent / "text-generation-launcher"


def server_command(model: Path, folder: Path, launcher: Path = LAUNCHER, more: Sequence[str] = ()) -> ServerCommand:
    port = free_port()
    arguments = [str(launcher), "--model-id", str(model), "--port", str(port), "--hostname", "127.0.0.1"]
    arguments += ["--shard-uds-path", f"{folder}/shard", "--dtype", "bfloat16", "--max-total-tokens", "4096"]
    # The KV cache gets more slots than any load here needs, but not all free memory, which the peers share.
    arguments += ["--max-batch-total-tokens", "32768"]
    return ServerCommand("the server", [*arguments, *more], port, "/health", start_s=300)


@contextlib.contextmanager
def running_ours(model: Path, launcher: Path = LAUNCHER, more: Sequence[str] = ()) -> Iterator[Served]:
    """`launcher` may belong to another version that is installed elsewhere. `more`: more flags."""
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder:
        command = server_command(model, Path(folder), launcher, more)
        log = Path(folder) / "log"
        with running(command, log):
            yield Served(command.port, kernels_named(log.read_text()))


def kernels_named(log: str) -> str:
    """The kernels that a shard names when it has started. A shard without compiled kernels is slow without an error."""
    named = KERNELS.search(log)
    return named[1] if named else "unknown"


def read_overlap(name: str, before: str, after: str) -> Overlap:
    """The overlap, from two pages of metrics: one read before the load, the other after it."""

    def moved(series: str) -> float:
        return metric(after, series) - metric(before, series)

    steps = moved("tgi_shard_decode_steps")
    edges = re.findall(r'^tgi_shard_step_gap_duration_bucket\{le="([^"]+)"\}', after, re.MULTILINE)
    gap = next(e for e in edges if moved(f'tgi_shard_step_gap_duration_bucket{{le="{e}"}}') >= steps / 2)
    forward = 'tgi_batch_forward_duration_{}{{method="decode"}}'
    mean = moved(forward.format("sum")) / moved(forward.format("count"))
    return Overlap(name, moved("tgi_shard_overlapped_steps") / steps, float(gap), mean)
