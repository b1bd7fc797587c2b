"""The table of micro-benchmarks, and what runs them."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from text_generation_benchmark.micro import choice, loading, news, profile, router, scheduling, standby, windows
from text_generation_benchmark.output import columns

Times = Mapping[str, Sequence[float]]  # seconds of each call, or of each token, by what was called
UNITS_S = {"ms": 1e-3, "µs": 1e-6}
QUANTILES = {"best": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99}


@dataclass(frozen=True, slots=True)
class Micro:
    """`measure` takes the settings by their names, all with a default. It returns times, of which the quantiles are
    printed, or a table of its own. `compares`: the median of each time ÷ the first row's time of the same round is
    printed too."""

    sets_up: str
    timed: str
    unit: str
    measure: Callable[..., Times | str]
    compares: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings, by name."""
        return {name: each.default for name, each in inspect.signature(self.measure).parameters.items()}

    def run(self, settings: Mapping[str, Any]) -> str:
        rows = self.measure(**settings)
        if isinstance(rows, str):
            return rows
        first, unit_s, lines = next(iter(rows.values())), UNITS_S[self.unit.split()[0]], []
        for what, times in rows.items():
            figures = {name: f"{np.quantile(times, q) / unit_s:.2f}" for name, q in QUANTILES.items()}
            compared = {"÷ the first": f"{ratio(times, first):.3f}×"} if self.compares else {}
            lines.append({self.unit: what} | figures | compared)
        return columns(lines)


def ratio(times: Sequence[float], first: Sequence[float]) -> float:
    return median(one / other for one, other in zip(times, first, strict=True))


WINDOW = "a layer of m1b on compiled kernels, windows of 1,024 tokens, keys before them NaN"
QUEUE = "256 requests that run, 2,000 that wait, shared prefixes"
DECISIONS = "the scheduler's decisions and answers; looks into the prefix cache"
SHARD = "a shard in this process, a clock around each kernel"
MICROS = {
    "window-decode": Micro(WINDOW, "a decode step's attention, contexts in turns", "ms", windows.decode, True),
    "window-chunk": Micro(WINDOW, "attention of a prompt's chunk, contexts in turns", "ms", windows.chunk, True),
    "profile": Micro(SHARD, "a step, or a prompt", "ms", profile.profile),
    "decide": Micro(QUEUE, DECISIONS, "µs", scheduling.decide),
    "detokenize": Micro("the demo model's tokenizer", "random tokens into text", "µs per token", scheduling.detokenize),
    "choice": Micro("a front with 125 engines, their loads and caches", "hashing; choosing", "µs", choice.choose),
    "news": Micro("a front and an engine, over gRPC", "processor time for a message on each side", "µs", news.news),
    "load": Micro("a shard that loads random codes", "its memory, and seconds for each GB", "MiB", loading.load),
    "standby": Micro(
        "servers with `--standby on` and `off`", "a start; memory and processor time at rest", "s", standby.standby
    ),
    "router": Micro("a router, a shard without a model", "processor time for a token", "µs per token", router.router),
}


def listing() -> str:
    return columns(
        {
            "name": name,
            "sets up": each.sets_up,
            "is timed": each.timed,
            "unit": each.unit,
            "settings": " ".join(f"{setting}={_text(value)}" for setting, value in each.defaults.items()),
        }
        for name, each in MICROS.items()
    )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_micros(names: Sequence[str], settings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The name and the table of each. ValueError for a name or a setting that does not exist, or a wrong value."""
    if unknown := set(names) - set(MICROS):
        raise ValueError(f"there is no micro-benchmark {', '.join(sorted(unknown))}: choose {', '.join(MICROS)}")
    given = dict(setting.partition("=")[::2] for setting in settings)
    for name in names or MICROS:
        if unknown := given.keys() - MICROS[name].defaults:
            known = ", ".join(MICROS[name].defaults)
            raise ValueError(f"{name} has no setting {', '.join(sorted(unknown))}: choose {known}")
    for name in names or MICROS:
        each = MICROS[name]
        yield name, each.run({key: _value(key, text, each.defaults[key]) for key, text in given.items()})


def _value(key: str, text: str, default: Any) -> Any:
    """As the default's type. 0 is refused where it is not the default."""
    if isinstance(default, tuple):
        return tuple(_value(key, each, default[0]) for each in text.split(","))
    if isinstance(default, str):
        return text
    try:
        value = type(default)(text)
    except ValueError:
        raise ValueError(f"{key}={text} is not a number") from None
    if value < 0 or (value == 0 and default):
        raise ValueError(f"{key}={text} is too small")
    return value
