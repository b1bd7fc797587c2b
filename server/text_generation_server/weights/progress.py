"""Shows the progress of a download: a bar on a terminal, plain log lines elsewhere."""

import logging
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Protocol

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, tqdm

from text_generation_server.weights.files import LineStyle

logger = logging.getLogger(__name__)

# Seconds over which the speed is averaged.
SPEED_S = 10.0


class Progress(Protocol):
    """Shows the progress of downloads. `received` and `finished` are called from several threads."""

    def received(self, name: str, num_bytes: int) -> None:
        """Notes that `num_bytes` of the file have been received, including bytes of earlier tries. The first call of a
        try has these only."""

    def finished(self, name: str) -> None: ...

    def close(self) -> None:
        """To be called once, when all files are there or the download has failed."""


class Quiet:
    """A progress that shows nothing, for small files."""

    def received(self, name: str, num_bytes: int) -> None:
        pass

    def finished(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


class DownloadSpeed:
    """The bytes per second of the last SPEED_S seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, now_s: float, num_bytes: int) -> float:
        """Notes that `num_bytes` have been received by now, and returns the speed. 0.0 at the first call."""
        self._seen.append((now_s, num_bytes))
        while len(self._seen) > 1 and self._seen[1][1] == 0:  # the wait for the first bytes says nothing of the speed
            self._seen.popleft()
        while now_s - self._seen[0][0] > SPEED_S and len(self._seen) > 2:
            self._seen.popleft()
        first_s, before = self._seen[0]
        return max(0.0, (num_bytes - before) / (now_s - first_s)) if now_s > first_s else 0.0


class Lines:
    """Logs a line every few seconds, also while nothing arrives, and when a file is finished."""

    def __init__(self, num_files: int, num_bytes: int, style: LineStyle) -> None:
        self._num_files = num_files
        self._num_bytes = num_bytes
        self._style = style
        self._received: dict[str, int] = {}
        self._held: dict[str, int] = {}  # bytes of earlier tries, which say nothing of the speed
        self._num_finished = 0
        self._speed = DownloadSpeed()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        logger.info("Downloading %d %s, %s", num_files, "file" if num_files == 1 else "files", sized(num_bytes))
        self._speed.at(time.monotonic(), 0)
        self._thread = threading.Thread(target=self._log_regularly, daemon=True)
        self._thread.start()

    def received(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._held[name] = min(self._held.get(name, num_bytes), num_bytes)
            self._received[name] = num_bytes

    def finished(self, name: str) -> None:
        with self._lock:
            self._num_finished += 1
            self._log()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _log_regularly(self) -> None:
        while not self._closed.wait(self._style.every_s):
            with self._lock:
                self._log()

    def _log(self) -> None:
        received = sum(self._received.values())
        speed = self._speed.at(time.monotonic(), received - sum(self._held.values()))
        is_done = self._num_finished == self._num_files
        left = self._num_bytes - received
        left_s = 0 if is_done else max(1, round(left / speed)) if speed else None
        fields = {"received_bytes": received, "total_bytes": self._num_bytes, "bytes_per_s": round(speed)}
        logger.info(
            "Download: [%d/%d] -- ETA: %s -- %s of %s, %s/s",
            self._num_finished,
            self._num_files,
            "unknown" if left_s is None else timedelta(seconds=left_s),
            sized(received),
            sized(self._num_bytes),
            sized(speed),
            extra={"fields": fields | {"left_s": left_s} if self._style.has_fields else {}},
        )


class Bar:
    """Shows one bar for the bytes of all files, on stderr."""

    def __init__(self, num_files: int, num_bytes: int) -> None:
        self._bar = tqdm(total=num_bytes or None, unit="B", unit_scale=True, desc="Download")  # type: ignore[no-untyped-call]
        self._num_left = num_files
        self._received: dict[str, int] = {}
        self._lock = threading.Lock()

    def received(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._bar.update(num_bytes - self._received.get(name, 0))
            self._received[name] = num_bytes

    def finished(self, name: str) -> None:
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self._bar.close()

    def close(self) -> None:
        self._bar.close()


def make_progress(num_files: int, num_bytes: int, style: LineStyle) -> Progress:
    if sys.stderr.isatty() and not are_progress_bars_disabled():
        return Bar(num_files, num_bytes)
    return Lines(num_files, num_bytes, style)


def sized(num_bytes: float) -> str:
    """The number with a unit, as vendors of disks count: 1 MB is a million bytes."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
