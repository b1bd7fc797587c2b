"""Reads the server's metrics for a time in which the server ran only decode steps, with all streams."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_benchmark.metrics import metric
from text_generation_benchmark.process import get

# Pauses between two readings: a short load is read a few times, and a long one is not read often.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.04, 0.32


@dataclass(frozen=True, slots=True)
class Page:
    """The server's metrics at one point in time."""

    at_s: float
    text: str

    def value(self, series: str) -> float:
        return metric(self.text, series)

    @property
    def prefills(self) -> tuple[float, float]:
        """Number of prefills (sent to the shards, answered by them)."""
        names = ("tgi_batch_inference_count", "tgi_batch_inference_success")
        return tuple(self.value(f'{name}{{method="prefill"}}') for name in names)  # type: ignore[return-value]

    def is_decoding(self, streams: int) -> bool:
        sent, answered = self.prefills
        return sent == answered and self.value("tgi_batch_current_size") == streams


@dataclass(frozen=True, slots=True)
class Window:
    """Means over the decode steps between two pages."""

    steps: int
    step_s: float  # wall time of a step, in seconds
    device_s: float  # part of a step's wall time in which the device computed
    gap_s: float  # part of a step's wall time in which the shard had no step to run
    context_tokens: float  # tokens of context of all streams together, mean of the two pages

    @property
    def outside(self) -> float:
        """Share of the wall time during which the device did not compute."""
        return 1 - self.device_s / self.step_s


class Watch:
    """Reads the metrics again and again while a load runs."""

    def __init__(self, port: int) -> None:
        self.pages: list[Page] = []
        self._port = port
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._done.wait(pause_s):
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            asked_s = time.perf_counter()
            text = get(self._port, "/metrics")
            self.pages.append(Page((asked_s + time.perf_counter()) / 2, text))


def longest_window(pages: Sequence[Page], streams: int) -> Window | None:
    """The longest time between two pages of metrics during which all streams decoded and no prefill ran. None if no two
    successive pages show this."""
    best: tuple[Page, Page] | None = None
    first: Page | None = None
    for page in pages:
        if not page.is_decoding(streams):
            first = None
        elif first is None or first.prefills != page.prefills:
            first = page
        elif best is None or page.at_s - first.at_s > best[1].at_s - best[0].at_s:
            best = (first, page)
    return None if best is None else _between(*best)


def _between(first: Page, last: Page) -> Window | None:
    def moved(series: str) -> float:
        return last.value(series) - first.value(series)

    steps = moved("tgi_shard_decode_steps")
    if not steps:
        return None
    return Window(
        steps=int(steps),
        step_s=(last.at_s - first.at_s) / steps,
        device_s=moved('tgi_batch_forward_duration_sum{method="decode"}') / steps,
        gap_s=moved("tgi_shard_step_gap_duration_sum") / steps,
        context_tokens=(first.value("tgi_slots_used") + last.value("tgi_slots_used")) / 2,
    )
