"""TGI's three tables, in Markdown."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from text_generation_benchmark.output import Row, aligned_table
from text_generation_benchmark.shards.config import ShardBenchmarkConfig
from text_generation_benchmark.shards.statistics import (
    DECODE_MS,
    DECODE_TOKENS_PER_S,
    PREFILL_MS,
    PREFILL_TOKENS_PER_S,
    TOKEN_MS,
    Results,
    Round,
    Summary,
    summarize,
)
from text_generation_router.text.validation import AskedSampling


def tables(config: ShardBenchmarkConfig, results: Results) -> str:
    """All three tables. Batch sizes without a measured round are left out."""
    parts = (parameters_table(config), latency_table(results), throughput_table(results))
    return "\n\n\n".join(parts)


def parameters_table(config: ShardBenchmarkConfig) -> str:
    asked = config.asked
    rows = {
        "Model": config.tokenizer_name,
        "Sequence Length": str(config.sequence_length),
        "Decode Length": str(config.decode_length),
        "Top N Tokens": _option(asked, "top_n_tokens"),
        "N Runs": str(config.runs),
        "Warmups": str(config.warmups),
        "Temperature": _option(asked, "temperature"),
        "Top K": _option(asked, "top_k"),
        "Top P": _option(asked, "top_p"),
        "Typical P": _option(asked, "typical_p"),
        "Repetition Penalty": _option(asked, "repetition_penalty"),
        "Frequency Penalty": _option(asked, "frequency_penalty"),
        "Watermark": str(asked.values.watermark).lower(),
        "Do Sample": str(asked.values.do_sample).lower(),
    }
    return aligned_table([("Parameter", "Value"), *rows.items()])


def latency_table(results: Results) -> str:
    header = ("Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99")
    rows = []
    for series in (PREFILL_MS, TOKEN_MS, DECODE_MS):
        for batch_size, measured in _measured(results):
            summary = summarize(series, measured)
            values = (*_extremes(summary), summary.p50, summary.p90, summary.p99)
            rows.append((series.step, str(batch_size), *(f"{value:.2f} ms" for value in values)))
    return aligned_table([header, *merged(rows)])


def throughput_table(results: Results) -> str:
    header = ("Step", "Batch Size", "Average", "Lowest", "Highest")
    rows = []
    for series in (PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S):
        for batch_size, measured in _measured(results):
            values = _extremes(summarize(series, measured))
            rows.append((series.step, str(batch_size), *(f"{value:.2f} tokens/secs" for value in values)))
    return aligned_table([header, *merged(rows)])


def merged(rows: Sequence[Row]) -> list[Row]:
    """A cell that equals the cell above it is left empty, as in TGI's tables."""
    if not rows:
        return []
    return [
        rows[0],
        *(["" if cell == over else cell for over, cell in zip(*pair, strict=True)] for pair in pairwise(rows)),
    ]


def _measured(results: Results) -> Iterator[tuple[int, list[Round]]]:
    return ((batch_size, rounds) for batch_size, rounds in results.measured.items() if rounds)


def _extremes(summary: Summary) -> tuple[float, float, float]:
    return summary.average, summary.lowest, summary.highest


def _option(asked: AskedSampling, name: str) -> str:
    """An optional value as TGI, which is written in Rust, prints it."""
    return f"Some({getattr(asked.values, name)})" if name in asked.given else "None"
