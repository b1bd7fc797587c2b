"""What a terminal shows of a benchmark that runs: results in, a picture out. Knows no keys and no clock."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from text_generation_benchmark.shards.statistics import (
    DECODE_MS,
    DECODE_TOKENS_PER_S,
    PREFILL_MS,
    PREFILL_TOKENS_PER_S,
    TOKEN_MS,
    Results,
    Round,
    Series,
    Summary,
    histogram,
    summarize,
)

KEYS = "<- | -> | tab: change batch size | q / CTRL + c: quit"
BINS = 8
BAR_WIDTH = 20
FIGURES = ("average", "lowest", "highest", "p50", "p90", "p99")


def picture(title: str, results: Results, shown: int) -> Layout:
    """With the figures of the batch size `shown`."""
    running = results.current
    whole = Layout()
    whole.split_column(
        Layout(Text(f"{title}\n{KEYS}", no_wrap=True, overflow="ellipsis"), size=2),
        Layout(name="progress", size=3),
        Layout(Panel(_tabs(results.batch_sizes, shown), title="Batch Size"), size=3),
        Layout(name="figures"),
    )
    whole["progress"].split_row(
        Layout(_gauge("Total Progress", results.share_finished)),
        Layout(_gauge(f"Batch Size {running}", results.finished[running] / results.rounds_each)),
    )
    measured = results.measured[shown]
    whole["figures"].split_row(
        Layout(_half("Prefill", measured, [("Latency", PREFILL_MS)], PREFILL_TOKENS_PER_S)),
        Layout(_half("Decode", measured, [("Token", TOKEN_MS), ("Total", DECODE_MS)], DECODE_TOKENS_PER_S)),
    )
    return whole


def _tabs(batch_sizes: Sequence[int], shown: int) -> Text:
    tabs = [Text(f" {size} ", "bold reverse" if size == shown else "") for size in batch_sizes]
    return Text("|", no_wrap=True).join(tabs)


def _gauge(title: str, share: float) -> Panel:
    row = Table.grid(expand=True)
    row.add_column(ratio=1)
    row.add_column(width=5, justify="right")
    row.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}")
    return Panel(row, title=title)


def _half(name: str, measured: list[Round], latencies: list[tuple[str, Series]], throughput: Series) -> RenderableType:
    if not measured:
        return Panel("no round has been measured yet", title=name)
    half = Layout()
    half.split_column(
        Layout(Panel(_latencies(measured, latencies), title=f"{name} Latency"), size=len(FIGURES) + 3),
        Layout(Panel(_throughput(summarize(throughput, measured)), title=f"{name} Throughput"), size=3),
        Layout(Panel(_bars(measured, latencies[0][1]), title=f"{latencies[0][1].step} Latencies")),
    )
    return half


def _latencies(measured: list[Round], columns: list[tuple[str, Series]]) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row("", *(Text(name, justify="right") for name, _ in columns))
    summaries = [summarize(series, measured) for _, series in columns]
    for figure in FIGURES:
        values = (f"{getattr(summary, figure):.2f} ms" for summary in summaries)
        table.add_row(figure, *(Text(value, justify="right") for value in values))
    return table


def _throughput(summary: Summary) -> str:
    return f"{summary.average:.2f} tokens/secs (lowest {summary.lowest:.2f}, highest {summary.highest:.2f})"


def _bars(measured: list[Round], series: Series) -> Table:
    bins = histogram([series.value_of(done) for done in measured], BINS)
    most = max(bin.count for bin in bins)
    table = Table.grid(padding=(0, 1))
    for bin in bins:
        bar = "█" * -(-bin.count * BAR_WIDTH // most)
        table.add_row(Text(f"{bin.low:.2f} – {bin.high:.2f} ms", justify="right"), bar, str(bin.count))
    return table
